"""Safetensors folders: one file, or an index and the shards it names."""

import contextlib
import functools
import json
import pathlib
from collections.abc import Container
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors

from ldjax.checkpoints import _rules

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES: dict[str, np.dtype[Any]] = {
  "BF16": np.dtype(jnp.bfloat16),
  "F16": np.dtype(np.float16),
  "F32": np.dtype(np.float32),
}
_INTEGERS: dict[str, np.dtype[Any]] = {
  "I32": np.dtype(np.int32),
  "I64": np.dtype(np.int64),
  "BOOL": np.dtype(np.bool_),
}


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """A JSON object from a file, or an error that names the file."""
  try:
    value = json.loads(path.read_text(encoding="utf-8"))
  except (UnicodeDecodeError, json.JSONDecodeError) as error:
    raise ValueError(f"{path}: not readable as JSON: {error}") from error
  if not isinstance(value, dict):
    raise ValueError(f"{path}: holds a {type(value).__name__}, not an object")
  return value


def _indexed(index: pathlib.Path) -> dict[str, str]:
  weights = read_json(index).get("weight_map")
  if not isinstance(weights, dict) or not weights:
    raise ValueError(f"{index}: has no weight_map")
  for tensor, name in weights.items():
    if (
      not isinstance(name, str)
      or pathlib.PurePosixPath(name).name != name
      or pathlib.PureWindowsPath(name).name != name
    ):
      raise ValueError(
        f"{index}: tensor {tensor!r} is said to be in {name!r}, which is not a"
        " plain file name inside the folder; refused"
      )
  return weights


def wanted(folder: pathlib.Path) -> tuple[str, ...]:
  """Names of the weight files that a folder should hold, by its index if any.

  Raises:
    ValueError: for a damaged index, or a shard outside the folder.
  """
  index = folder / INDEX
  if index.is_file():
    return tuple(dict.fromkeys(_indexed(index).values()))
  return (_SINGLE,)


def locate(folder: pathlib.Path) -> tuple[list[pathlib.Path], dict[str, str]]:
  """The weight files of a Hugging Face folder, and the index if there is one.

  Returns:
    The files, and for each tensor the index's file name (empty without index).

  Raises:
    FileNotFoundError: without safetensors, or with a shard missing.
    ValueError: for a damaged index, or a shard outside the folder.
  """
  files = [folder / name for name in wanted(folder)]
  index = folder / INDEX
  if index.is_file():
    for file in files:
      if not file.is_file():
        raise FileNotFoundError(
          f"{file}: this shard is named by {INDEX} and is missing; fetch the"
          " model again"
        )
    return files, _indexed(index)
  if files[0].is_file():
    return files, {}
  pickles = sorted(path.name for path in folder.glob("*.bin"))
  hint = (
    f"; it holds {pickles[0]}, and PyTorch pickles are not read: convert it"
    " with model.save_pretrained(folder) of a current transformers"
    if pickles
    else ""
  )
  raise FileNotFoundError(f"{folder}: no {_SINGLE} and no {INDEX}{hint}")


class Reader(contextlib.ExitStack):
  """Safetensors files, open while weights are read."""

  def tensors(
    self, path: pathlib.Path, integers: Container[str] = ()
  ) -> list[_rules.Tensor]:
    """What one file offers.

    Args:
      path: the file.
      integers: names of tensors that must be integers or truth values; all
        others are floats.

    Raises:
      ValueError: for a damaged or truncated file, or a tensor of another type.
    """
    try:
      file = self.enter_context(safetensors.safe_open(path, framework="np"))
    except safetensors.SafetensorError as error:
      raise ValueError(
        f"{path}: not a whole safetensors file ({error}); it is truncated or"
        " damaged, fetch it again"
      ) from error
    found = []
    for name in file.keys():  # noqa: SIM118 (not a dict)
      piece = file.get_slice(name)
      found.append(
        _rules.offer(
          name,
          path,
          piece.get_shape(),
          piece.get_dtype(),
          _INTEGERS if name in integers else _DTYPES,
          functools.partial(file.get_tensor, name),
        )
      )
    return found


def check_index(
  tensors: list[_rules.Tensor], weights: dict[str, str], index: pathlib.Path
) -> None:
  """Checks that the shards hold what the index says they hold.

  Raises:
    ValueError: naming the tensor.
  """
  where = {(tensor.name, tensor.file) for tensor in tensors}
  for name, file in weights.items():
    if (name, file) not in where:
      raise ValueError(f"{index}: says {name!r} is in {file}, which lacks it")
  for tensor in tensors:
    if tensor.name not in weights:
      raise ValueError(
        f"{tensor.file}: tensor {tensor.name!r} is not named by {index.name};"
        " it would be left over"
      )
