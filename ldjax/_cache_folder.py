"""The folder of what was fetched and measured."""

import os
import pathlib


def cache_folder() -> pathlib.Path:
  """Where ldjax keeps what it fetched and measured: `$XDG_CACHE_HOME/ldjax`."""
  base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
  return (
    pathlib.Path(base) if base else pathlib.Path.home() / ".cache"
  ) / "ldjax"
