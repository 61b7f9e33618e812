"""Files and folders that take their place whole."""

import contextlib
import json
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

_NAMES = {
  "float32": "F32",
  "float16": "F16",
  "bfloat16": "BF16",
  "int64": "I64",
  "int32": "I32",
  "bool": "BOOL",
}


class Source(NamedTuple):
  """A tensor that is to be written, made when its turn comes."""

  shape: tuple[int, ...]
  dtype: np.dtype[Any]
  read: Callable[[], np.ndarray]


def of_arrays(arrays: Mapping[str, Any]) -> dict[str, Source]:
  """Sources of arrays that are there already."""

  def source(array: Any) -> Source:
    return Source(
      tuple(array.shape), np.dtype(array.dtype), lambda: np.asarray(array)
    )

  return {name: source(array) for name, array in arrays.items()}


def write_safetensors(
  path: pathlib.Path,
  sources: Mapping[str, Source],
  on_tensor: Callable[[str], None] | None = None,
) -> None:
  """Writes a safetensors file, holding one tensor at a time.

  Args:
    path: the file.
    sources: tensors by name, written in this order.
    on_tensor: called with the name of each tensor written.

  Raises:
    ValueError: if a source makes another array than it said.

  Source: the safetensors format.
  """
  header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
  end = 0
  for name, source in sources.items():
    begin = end
    end += source.dtype.itemsize * int(np.prod(source.shape, dtype=np.int64))
    header[name] = {
      "dtype": _NAMES[source.dtype.name],
      "shape": list(source.shape),
      "data_offsets": [begin, end],
    }
  text = json.dumps(header, separators=(",", ":")).encode("utf-8")
  text += b" " * (-len(text) % 8)
  with path.open("wb") as file:
    file.write(len(text).to_bytes(8, "little") + text)
    for name, source in sources.items():
      array = source.read()
      if array.shape != source.shape or array.dtype != source.dtype:
        raise ValueError(
          f"tensor {name!r} came as {array.dtype.name} of shape {array.shape},"
          f" not as {source.dtype.name} of shape {source.shape}"
        )
      # Bytes of an array of any layout, also of an empty or a scalar one.
      array = np.ascontiguousarray(array).reshape(-1)
      file.write(array.view(np.uint8).data)
      if on_tensor is not None:
        on_tensor(name)


def json_text(value: Any) -> str:
  """A JSON object as its file holds it."""
  return json.dumps(value, indent=2, allow_nan=False) + "\n"


def write_files(
  folder: pathlib.Path,
  files: Iterable[tuple[str, Callable[[pathlib.Path], object]]],
) -> None:
  """Writes files of a folder, each of which takes its place whole.

  Args:
    folder: made if absent; files of the same names are replaced.
    files: names, and what writes each to the path that it is given.
  """
  folder.mkdir(parents=True, exist_ok=True)
  for name, write in files:
    partial = folder / f"{name}.part"
    try:
      write(partial)
      partial.replace(folder / name)
    finally:
      partial.unlink(missing_ok=True)


def text_writer(text: str) -> Callable[[pathlib.Path], object]:
  """What writes a text."""
  return lambda path: path.write_text(text, encoding="utf-8")


def check_free(target: pathlib.Path, force: bool) -> None:
  """Raises FileExistsError for a place that is taken, unless `force`."""
  if target.exists() and not force:
    raise FileExistsError(
      f"{target.absolute()} exists; give another place, or replace it with"
      " force=True (--force)"
    )


@contextlib.contextmanager
def new_folder(target: pathlib.Path, force: bool) -> Iterator[pathlib.Path]:
  """A folder to write in, which takes its place whole or not at all.

  Args:
    target: the place; what is there stays until the new one is whole.
    force: whether to replace what is there.

  Yields:
    A folder beside `target`.

  Raises:
    FileExistsError: see `check_free`.
  """
  check_free(target, force)
  target = target.absolute()
  target.parent.mkdir(parents=True, exist_ok=True)
  partial = pathlib.Path(
    tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-")
  )
  try:
    yield partial
    partial.chmod(0o755)
    if target.exists():
      aside = pathlib.Path(tempfile.mkdtemp(dir=target.parent, prefix=".old-"))
      target.replace(aside / target.name)
      partial.replace(target)
      shutil.rmtree(aside)
    else:
      partial.replace(target)
  finally:
    shutil.rmtree(partial, ignore_errors=True)
