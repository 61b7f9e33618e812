"""From what a user types to a path: a file, the demo, a repository's name."""

import os
import pathlib
import re

from ldjax.checkpoints import _demo, _rules

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WANTED = ("*.json", "*.safetensors", "*.jinja", "tokenizer*")


def resolve(
  path_or_id: str | os.PathLike[str],
  progress: _rules.Progress | None = None,
) -> pathlib.Path:
  """Finds a model by path, by the word "demo", or by a repository's name.

  Args:
    path_or_id: an existing file or folder; the string "demo" for
      `fetch_demo` (write "./demo" for a folder of that name); or "org/name",
      looked up in the Hugging Face cache and fetched if it is not there.
    progress: called with lines of text about what is fetched.

  Returns:
    An existing file or folder.

  Raises:
    FileNotFoundError: if it is none of these.
    OSError: if it cannot be fetched.

  Example:
    >>> import tempfile, ldjax
    >>> folder = tempfile.mkdtemp()
    >>> str(ldjax.checkpoints.resolve(folder)) == folder
    True

  Source: huggingface_hub's `snapshot_download`.
  """
  if path_or_id == "demo":
    return _demo.fetch_demo(progress)
  path = pathlib.Path(path_or_id).expanduser()
  if path_or_id != "" and path.exists():  # Path("") is the working folder
    return path
  if isinstance(path_or_id, str) and _REPOSITORY.fullmatch(path_or_id):
    return _snapshot(path_or_id, progress)
  raise FileNotFoundError(
    f"{os.fspath(path_or_id)!r} is no file or folder here, not 'demo' and not"
    " a repository's name like 'org/name'"
  )


def _snapshot(name: str, progress: _rules.Progress | None) -> pathlib.Path:
  # Imported late: it reads environment variables as it is imported.
  import huggingface_hub
  from huggingface_hub import errors

  if progress is not None:
    progress(f"looking up {name} on the Hugging Face hub")
  try:
    return pathlib.Path(
      huggingface_hub.snapshot_download(name, allow_patterns=list(_WANTED))
    )
  except errors.LocalEntryNotFoundError as error:
    raise FileNotFoundError(
      f"{name!r} is no file or folder here, is not in the Hugging Face cache,"
      f" and the hub cannot be reached ({error})"
    ) from error
  except errors.RepositoryNotFoundError as error:
    raise FileNotFoundError(
      f"{name!r} is no file or folder here and no repository on the Hugging"
      " Face hub that you can see; log in if it is private or gated"
    ) from error
