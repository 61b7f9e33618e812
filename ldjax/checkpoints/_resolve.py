"""From what a user types to a path: a file, the demo, a repository's name."""

import os
import pathlib
import re

from ldjax.checkpoints import _demo, _hugging_face, _rules, _weights

_REPOSITORY = re.compile(
  r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?"
)
_SMALL = (
  "config.json",
  "generation_config.json",
  _weights.FORMATS[0].index,
  "tokenizer.json",
  "tokenizer_config.json",
  "special_tokens_map.json",
  "chat_template.jinja",
)


def resolve(
  path_or_id: str | os.PathLike[str],
  progress: _rules.Progress | None = None,
) -> pathlib.Path:
  """Finds a model by path, by the word "demo", or by a repository's name.

  Of a repository only what ldjax reads is fetched: the configuration, which is
  checked at once, the tokenizer, and `model.safetensors` or the shards that the
  index names, or, where there are none, PyTorch files. With
  `HF_HUB_OFFLINE=1` nothing is fetched.

  Args:
    path_or_id: an existing file or folder; the string "demo" for
      `fetch_demo` (write "./demo" for a folder of that name); or "org/name",
      or "org/name@revision" with a branch, a tag or a commit, looked up in the
      Hugging Face cache and fetched if it is not there.
    progress: called with lines of text about what is fetched.

  Returns:
    An existing file or folder.

  Raises:
    FileNotFoundError: if it is none of these, if the repository has no
      weights, or if it is not in the cache and cannot be fetched.
    OSError: if it cannot be fetched for another reason.
    ValueError: if the repository's model is not supported.

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
  if isinstance(path_or_id, str) and (
    match := _REPOSITORY.fullmatch(path_or_id)
  ):
    return _repository(match["name"], match["revision"], progress)
  raise FileNotFoundError(
    f"{os.fspath(path_or_id)!r} is no file or folder here, not 'demo' and not"
    " a repository's name like 'org/name'"
  )


def _repository(
  name: str, revision: str | None, progress: _rules.Progress | None
) -> pathlib.Path:
  if progress is not None:
    progress(f"looking up {name} on the Hugging Face hub")
  folder = _snapshot(name, revision, _SMALL)
  if not (folder / "config.json").is_file():
    raise FileNotFoundError(
      f"{name!r} has no config.json ({folder}); a repository must hold a model"
      " in Hugging Face's format. For a GGUF file, fetch the file and give its"
      " path"
    )
  _hugging_face.read_folder_config(folder)  # refused before it is fetched
  # By the commit found, so that all parts are of one version.
  commit = folder.name
  for kind in _weights.FORMATS:
    if not _weights.is_there(folder, kind):
      folder = _snapshot(name, commit, (kind.index, kind.single))
    if not _weights.is_there(folder, kind):
      continue
    files = _weights.named(folder, kind)
    if not all((folder / file).is_file() for file in files):
      folder = _snapshot(name, commit, files)
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
      raise FileNotFoundError(
        f"{name!r} has no {missing[0]} ({folder}); it was fetched in part:"
        " resolve it again with access to the hub"
      )
    return folder
  singles = " and no ".join(kind.single for kind in _weights.FORMATS)
  raise FileNotFoundError(
    f"{name!r} has no {singles} ({folder}). Either it was fetched in part:"
    " resolve it again with access to the hub; or its weights are in a format"
    " that is not read"
  )


def _snapshot(
  name: str, revision: str | None, files: tuple[str, ...]
) -> pathlib.Path:
  # Imported late: it reads environment variables as it is imported.
  import huggingface_hub
  from huggingface_hub import constants, errors

  shown = name if revision is None else f"{name}@{revision}"
  try:
    return pathlib.Path(
      huggingface_hub.snapshot_download(
        name, revision=revision, allow_patterns=list(files)
      )
    )
  except errors.LocalEntryNotFoundError as error:
    state = (
      "HF_HUB_OFFLINE is set"
      if constants.HF_HUB_OFFLINE
      else "the hub cannot be reached"
    )
    raise FileNotFoundError(
      f"{shown!r} is no file or folder here, is not (or not whole) in the"
      f" Hugging Face cache {constants.HF_HUB_CACHE}, and {state}: {error}"
    ) from error
  except errors.RevisionNotFoundError as error:
    raise FileNotFoundError(
      f"{name!r} has no branch, tag or commit {revision!r}"
    ) from error
  except errors.RepositoryNotFoundError as error:
    raise FileNotFoundError(
      f"{name!r} is no file or folder here and no repository on the Hugging"
      " Face hub that you can see; log in if it is private or gated"
    ) from error
