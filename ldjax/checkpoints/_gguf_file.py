"""The container of a GGUF file: metadata and the list of tensors.

The package `gguf` knows the quantised types and is used for them. Its reader
makes a Python object of every element of every array, which for a vocabulary of
49152 tokens takes seconds, twice (weights, tokenizer); this one reads the same
header in about a tenth of a second and says where a damaged file ends.

Source: the GGUF specification, versions 2 and 3 (ggml/docs/gguf.md).
"""

import math
import mmap
import os
import pathlib
import struct
from typing import Any, NamedTuple

import gguf
import numpy as np

_SCALARS = {
  0: "B",
  1: "b",
  2: "H",
  3: "h",
  4: "I",
  5: "i",
  6: "f",
  7: "?",
  10: "Q",
  11: "q",
  12: "d",
}
_STRING, _ARRAY = 8, 9


class TensorInfo(NamedTuple):
  """One tensor of a GGUF file: shape as NumPy orders it, place in bytes."""

  name: str
  shape: tuple[int, ...]
  kind: gguf.GGMLQuantizationType
  start: int
  size: int


class Contents(NamedTuple):
  """What the header of a GGUF file says."""

  path: pathlib.Path
  metadata: dict[str, Any]
  tensors: tuple[TensorInfo, ...]


class _Cursor:
  """Reads little-endian values from a buffer and knows where it ends."""

  def __init__(self, data: mmap.mmap, path: pathlib.Path):
    self.data = data
    self.path = path
    self.at = 0

  def take(self, size: int) -> int:
    start = self.at
    if size < 0 or start + size > len(self.data):
      raise ValueError(
        f"{self.path}: the GGUF header ends early: {size} bytes are needed at"
        f" byte {start} and the file has {len(self.data)}; it is truncated or"
        " damaged, fetch it again"
      )
    self.at = start + size
    return start

  def scalar(self, code: str) -> Any:
    start = self.take(struct.calcsize("<" + code))
    return struct.unpack_from("<" + code, self.data, start)[0]

  def string(self) -> str:
    size = self.scalar("Q")
    start = self.take(size)
    try:
      return self.data[start : start + size].decode("utf-8")
    except UnicodeDecodeError as error:
      raise ValueError(
        f"{self.path}: the text at byte {start} is not UTF-8; the file is"
        " damaged"
      ) from error

  def value(self, kind: int, key: str) -> Any:
    if kind == _STRING:
      return self.string()
    if kind in _SCALARS:
      return self.scalar(_SCALARS[kind])
    if kind != _ARRAY:
      raise ValueError(
        f"{self.path}: metadata {key!r} has the unknown type {kind}"
      )
    item, count = self.scalar("I"), self.scalar("Q")
    if item in _SCALARS:
      dtype = np.dtype("<" + _SCALARS[item]) if item != 7 else np.dtype(bool)
      start = self.take(count * dtype.itemsize)
      return np.frombuffer(self.data, dtype, count, start).tolist()
    if count > len(self.data):
      self.take(count)
    return [self.value(item, key) for _ in range(count)]


def _tensor(cursor: _Cursor) -> TensorInfo:
  name = cursor.string()
  rank = cursor.scalar("I")
  if rank > 8:
    raise ValueError(
      f"{cursor.path}: tensor {name!r} has {rank} axes; the file is damaged"
    )
  shape = tuple(cursor.scalar("Q") for _ in range(rank))[::-1]
  number = cursor.scalar("I")
  try:
    kind = gguf.GGMLQuantizationType(number)
  except ValueError as error:
    raise ValueError(
      f"{cursor.path}: tensor {name!r} has type number {number}, which the"
      " installed package gguf does not know; a newer gguf may"
    ) from error
  block, size = gguf.GGML_QUANT_SIZES[kind]
  if shape and shape[-1] % block:
    raise ValueError(
      f"{cursor.path}: tensor {name!r} has rows of {shape[-1]}, not a multiple"
      f" of {kind.name}'s block of {block}; the file is damaged"
    )
  start = cursor.scalar("Q")
  return TensorInfo(name, shape, kind, start, math.prod(shape) // block * size)


def open_gguf(path: str | os.PathLike[str]) -> Contents:
  """Reads the header of a GGUF file and checks that its tensors fit in it.

  Args:
    path: the file.

  Returns:
    Metadata by key, and the tensors with absolute places.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: if it is not a GGUF file of version 2 or 3, or is truncated.
  """
  path = pathlib.Path(path)
  with open(path, "rb") as file:
    if os.fstat(file.fileno()).st_size < 24:
      raise ValueError(f"{path}: too short to be a GGUF file")
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
      return _parse(_Cursor(data, path))


def _parse(cursor: _Cursor) -> Contents:
  path, total = cursor.path, len(cursor.data)
  if cursor.data[:4] != b"GGUF":
    raise ValueError(
      f"{path}: not a GGUF file (it begins with {bytes(cursor.data[:4])!r})"
    )
  cursor.take(4)
  version = cursor.scalar("I")
  if version not in (2, 3):
    raise ValueError(
      f"{path}: GGUF version {version} cannot be read; versions 2 and 3 of"
      " little-endian files can"
    )
  tensor_count, key_count = cursor.scalar("Q"), cursor.scalar("Q")
  metadata: dict[str, Any] = {}
  for _ in range(key_count):
    key = cursor.string()
    if key in metadata:
      raise ValueError(f"{path}: metadata {key!r} is given twice")
    metadata[key] = cursor.value(cursor.scalar("I"), key)
  tensors = [_tensor(cursor) for _ in range(tensor_count)]
  alignment = metadata.get("general.alignment", 32)
  if not isinstance(alignment, int) or alignment < 1:
    raise ValueError(f"{path}: general.alignment is {alignment!r}")
  base = -(-cursor.at // alignment) * alignment
  placed = []
  for tensor in tensors:
    start = base + tensor.start
    if start + tensor.size > total:
      raise ValueError(
        f"{path}: tensor {tensor.name!r} ends at byte {start + tensor.size}"
        f" and the file has {total}; it is truncated, fetch it again"
      )
    placed.append(tensor._replace(start=start))
  return Contents(path, metadata, tuple(placed))


def dequantize(contents: Contents, tensor: TensorInfo) -> np.ndarray:
  """The values of one tensor as float32, in memory of its own."""
  raw = np.fromfile(
    contents.path, np.uint8, count=tensor.size, offset=tensor.start
  )
  if raw.size != tensor.size:
    raise ValueError(
      f"{contents.path}: tensor {tensor.name!r} has {raw.size} of"
      f" {tensor.size} bytes; the file changed while it was read"
    )
  rows = raw.reshape(*tensor.shape[:-1], -1)
  values = gguf.quants.dequantize(rows, tensor.kind)
  return values.astype(np.float32, copy=False).reshape(tensor.shape)


def check_kinds(contents: Contents) -> None:
  """Refuses a file with a type that cannot be turned into floats.

  Raises:
    ValueError: naming the tensor and the type.
  """
  known: dict[gguf.GGMLQuantizationType, bool] = {}
  for tensor in contents.tensors:
    if tensor.kind not in known:
      size = gguf.GGML_QUANT_SIZES[tensor.kind][1]
      try:
        gguf.quants.dequantize(np.zeros((1, size), np.uint8), tensor.kind)
      except NotImplementedError:
        known[tensor.kind] = False
      else:
        known[tensor.kind] = True
    if not known[tensor.kind]:
      raise ValueError(
        f"{contents.path}: tensor {tensor.name!r} is of type"
        f" {tensor.kind.name}, which cannot be dequantised; convert the file"
        " to Q8_0, a K-quant, F16 or F32"
      )


def read_gguf_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
  """All metadata of a GGUF file, tokenizer included, by key.

  Args:
    path: the file.

  Returns:
    Numbers, booleans, texts and lists of them.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: if it is not a GGUF file, or is truncated.

  Example:
    >>> import pathlib, tempfile, gguf, ldjax
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "tiny.gguf"
    >>> writer = gguf.GGUFWriter(path, "llama")
    >>> writer.write_header_to_file()
    >>> writer.write_kv_data_to_file()
    >>> writer.close()
    >>> ldjax.checkpoints.read_gguf_metadata(path)
    {'general.architecture': 'llama'}

  Source: the GGUF specification.
  """
  return open_gguf(path).metadata
