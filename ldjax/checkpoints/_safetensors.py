"""Safetensors files: what they offer, and JSON beside them."""

import contextlib
import functools
import json
import pathlib
from collections.abc import Callable, Container
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors

from ldjax.checkpoints import _rules

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
_UNREAD = np.dtype(np.float32)


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """A JSON object from a file, or an error that names the file."""
  try:
    value = json.loads(path.read_text(encoding="utf-8"))
  except (UnicodeDecodeError, json.JSONDecodeError) as error:
    raise ValueError(f"{path}: not readable as JSON: {error}") from error
  if not isinstance(value, dict):
    raise ValueError(f"{path}: holds a {type(value).__name__}, not an object")
  return value


class Reader(contextlib.ExitStack):
  """Safetensors files, open while weights are read."""

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
          {piece.get_dtype(): _UNREAD}
          if unneeded(name)
          else _INTEGERS
          if name in integers
          else _DTYPES,
          functools.partial(file.get_tensor, name),
        )
      )
    return found
