"""A cache folder of each test's own."""

import pytest


@pytest.fixture(autouse=True)
def cache_home(tmp_path, monkeypatch):
  """`$XDG_CACHE_HOME` of this test."""
  folder = tmp_path / "cache"
  monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
  return folder
