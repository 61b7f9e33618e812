"""Tensors of a PyTorch file (`.pt`, `.bin`), read without torch.

`torch.save` writes a zip of a pickle and of one member for each storage. The
pickle is run by an unpickler that knows the few names a table of tensors
needs and refuses every other, so nothing of the file is executed.
"""

import collections
import contextlib
import functools
import io
import math
import pathlib
import pickle
import struct
import zipfile
from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ldjax.checkpoints import _rules

_STORAGES: dict[str, np.dtype[Any]] = {
  "FloatStorage": np.dtype(np.float32),
  "HalfStorage": np.dtype(np.float16),
  "BFloat16Storage": np.dtype(jnp.bfloat16),
  "LongStorage": np.dtype(np.int64),
  "IntStorage": np.dtype(np.int32),
  "BoolStorage": np.dtype(np.bool_),
}
_BY_NAME = {dtype.name: dtype for dtype in _STORAGES.values()}
_FLOATS = {name: _BY_NAME[name] for name in ("float32", "float16", "bfloat16")}
_INTEGERS = {name: _BY_NAME[name] for name in ("int64", "int32", "bool")}
_LARGEST_PICKLE = 64 << 20
# What zipfile raises for a damaged archive.
_DAMAGE = (
  zipfile.BadZipFile,
  EOFError,
  NotImplementedError,
  OSError,
  OverflowError,
  RuntimeError,
  UnicodeError,
  struct.error,
)


class _Kind(NamedTuple):
  name: str


class _Storage(NamedTuple):
  key: str
  dtype: np.dtype[Any]
  size: int


class _View(NamedTuple):
  storage: _Storage
  offset: int
  shape: tuple[int, ...]
  strides: tuple[int, ...]


def _count(value: Any, least: int = 0) -> int:
  if type(value) is not int or value < least:
    raise pickle.UnpicklingError(f"{value!r} is not a size")
  return value


def _sizes(value: Any) -> tuple[int, ...]:
  if not isinstance(value, tuple):
    raise pickle.UnpicklingError(f"{value!r} is not a tuple of sizes")
  return tuple(map(_count, value))


def _tensor(
  storage: Any, offset: Any, shape: Any, strides: Any, *_: Any
) -> _View:
  if not isinstance(storage, _Storage):
    raise pickle.UnpicklingError(f"{storage!r} is not a storage")
  shape, strides = _sizes(shape), _sizes(strides)
  if len(shape) != len(strides):
    raise pickle.UnpicklingError(f"strides {strides} for the shape {shape}")
  last = _count(offset)
  if math.prod(shape):
    last += sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    if last >= storage.size:
      raise pickle.UnpicklingError(
        f"a tensor of shape {shape} reaches past its storage of"
        f" {storage.size} numbers"
      )
  return _View(storage, offset, shape, strides)


def _parameter(data: Any, *_: Any) -> Any:
  return data


_GLOBALS = {
  ("collections", "OrderedDict"): collections.OrderedDict,
  ("torch._utils", "_rebuild_tensor_v2"): _tensor,
  ("torch._utils", "_rebuild_parameter"): _parameter,
  **{("torch", name): _Kind(name) for name in _STORAGES},
}


class _Unpickler(pickle.Unpickler):
  def find_class(self, module: str, name: str) -> Any:
    try:
      return _GLOBALS[module, name]
    except KeyError:
      raise pickle.UnpicklingError(
        f"it asks for {module}.{name}, which no table of tensors needs;"
        " nothing of it was run"
      ) from None

  def persistent_load(self, pid: Any) -> _Storage:
    match pid:
      case ("storage", _Kind(name=name), str(key), str(), size):
        return _Storage(key, _STORAGES[name], _count(size))
    raise pickle.UnpicklingError(f"{pid!r} is not a storage")


def _member(
  archive: zipfile.ZipFile, name: str, path: pathlib.Path
) -> zipfile.ZipInfo:
  try:
    info = archive.getinfo(name)
  except KeyError:
    raise ValueError(
      f"{path}: has no {name}; it is damaged or not of torch.save"
    ) from None
  # As torch.save writes them, so that no member is larger than the file.
  if info.compress_type != zipfile.ZIP_STORED or (
    info.file_size != info.compress_size
  ):
    raise ValueError(
      f"{path}: {name} is compressed, which torch.save does not do; refused"
    )
  return info


def _read(
  archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: pathlib.Path
) -> bytes:
  try:
    return archive.read(info)
  except _DAMAGE as error:
    raise ValueError(
      f"{path}: {info.filename} is damaged ({error}); fetch the file again"
    ) from error


def _load(
  archive: zipfile.ZipFile, prefix: str, view: _View, path: pathlib.Path
) -> np.ndarray:
  storage = view.storage
  info = _member(archive, f"{prefix}data/{storage.key}", path)
  if info.file_size != storage.size * storage.dtype.itemsize:
    raise ValueError(
      f"{path}: {info.filename} holds {info.file_size} bytes; {storage.size}"
      f" numbers of {storage.dtype.name} are"
      f" {storage.size * storage.dtype.itemsize}"
    )
  flat = np.frombuffer(_read(archive, info, path), storage.dtype)
  strides = [step * storage.dtype.itemsize for step in view.strides]
  # `_tensor` has checked that it stays inside.
  return np.lib.stride_tricks.as_strided(
    flat[view.offset :], view.shape, strides
  ).copy()


def _unpickle(
  archive: zipfile.ZipFile, path: pathlib.Path
) -> tuple[str, dict[str, _View]]:
  pickles = [
    name for name in archive.namelist() if name.split("/")[1:] == ["data.pkl"]
  ]
  if len(pickles) != 1:
    raise ValueError(
      f"{path}: holds {len(pickles)} members named data.pkl and one is needed;"
      " it is not of torch.save (or is a TorchScript program)"
    )
  prefix = pickles[0].removesuffix("data.pkl")
  order = f"{prefix}byteorder"
  if order in archive.namelist():
    order = _read(archive, _member(archive, order, path), path).decode("ascii")
    if order != "little":
      raise ValueError(f"{path}: byteorder is {order!r}; only little is read")
  info = _member(archive, pickles[0], path)
  if info.file_size > _LARGEST_PICKLE:
    raise ValueError(
      f"{path}: {info.filename} has {info.file_size} bytes; a table of tensors"
      f" has at most {_LARGEST_PICKLE}"
    )
  program = io.BytesIO(_read(archive, info, path))
  try:
    table = _Unpickler(program).load()
  # A pickle that is damaged, or made to do harm, may fail in any way.
  except Exception as error:
    raise ValueError(
      f"{path}: its pickle is not one of tensors alone ({error})"
    ) from error
  if not isinstance(table, Mapping):
    raise ValueError(
      f"{path}: holds a {type(table).__name__}, not a table of tensors"
    )
  for name, value in table.items():
    if not isinstance(name, str) or not isinstance(value, _View):
      raise ValueError(f"{path}: entry {name!r} is not a tensor with a name")
  return prefix, dict(table)


class Reader(contextlib.ExitStack):
  """PyTorch files, open while weights are read."""

  def tensors(
    self,
    path: pathlib.Path,
    integers: Container[str] = (),
    unneeded: Callable[[str], bool] = lambda name: False,
  ) -> list[_rules.Tensor]:
    """What one file offers.

    Args:
      path: the file.
      integers: names of tensors that must be integers or truth values; all
        others are floats.
      unneeded: whether a tensor of that name will not be read and may be of
        any type.

    Raises:
      ValueError: for a file of another format, a damaged one, one whose
        pickle holds anything but tensors, or a tensor of another type.
    """
    try:
      archive = self.enter_context(zipfile.ZipFile(path))
    except FileNotFoundError:
      raise
    except _DAMAGE as error:
      raise ValueError(
        f"{path}: not a whole file of torch.save ({error}). If it is older than"
        " PyTorch 1.6, load it there with weights_only=True and save it again"
      ) from error
    prefix, table = _unpickle(archive, path)
    return [
      _rules.offer(
        name,
        path,
        view.shape,
        view.storage.dtype.name,
        _BY_NAME
        if unneeded(name)
        else _INTEGERS
        if name in integers
        else _FLOATS,
        functools.partial(_load, archive, prefix, view, path),
      )
      for name, view in table.items()
    ]
