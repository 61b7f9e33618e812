"""Weights of fewer bits, and the product that they enter."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from ldjax import typing

Array = typing.Array

PRECISIONS = ("bfloat16", "float16", "int8", "int4", "w8a8")
"""What `narrow` knows, besides leaving a weight as it is."""

_TILE = 32
"""Columns of an int4 weight that share a scale."""


def _qwix() -> Any:
  try:
    import qwix
  except ImportError as error:
    raise ValueError(
      "int8 and int4 weights need the package qwix; install it with pip install"
      " 'ldjax[quantized]'"
    ) from error
  return qwix


@struct.dataclass
class NarrowWeight:
  """A weight `[out, in]` in eight or four bits, with scales.

  With `rows`, what is multiplied by it is brought to eight bits as well, each
  row by its own largest number, and the sums are those of integers: they do
  not depend on how many rows there are.
  """

  array: Any
  """A `qwix.QArray`: values [out, in] int8 or int4, scales [out, groups]."""
  rows: bool = struct.field(pytree_node=False)
  """Whether the rows go to eight bits too."""

  @property
  def shape(self) -> tuple[int, ...]:
    """[out, in]."""
    return self.array.qvalue.shape

  def wide(self, dtype: jax.typing.DTypeLike) -> Array:
    """The weight [out, in] as numbers of a dtype, near what it was made of."""
    values, scale = self.array.qvalue, self.array.scale
    out, width = values.shape
    groups = values.astype(jnp.float32).reshape(out, scale.shape[1], -1)
    wide = groups * scale.astype(jnp.float32)[..., None]
    return wide.reshape(out, width).astype(dtype)

  def product(self, rows: Array) -> Array:
    """Integers [n, in] x [out, in], scaled: [n, out] float32.

    Args:
      rows: [n, in].
    """
    wide = rows.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=1, keepdims=True)
    # A row of zeros has no scale; one with a NaN gives NaN.
    scale = jnp.where(largest == 0, 1.0, largest) / 127.0
    values = jnp.round(wide / scale).astype(jnp.int8)
    count = values.shape[0]
    if count == 1:
      # XLA:CPU has a product of integer matrices, none by a vector.
      values = jnp.pad(values, ((0, 1), (0, 0)))
    sums = lax.dot_general(
      values,
      self.array.qvalue,
      (((1,), (1,)), ((), ())),
      preferred_element_type=jnp.int32,
    )[:count]
    return sums.astype(jnp.float32) * scale * self.array.scale[:, 0][None]


def narrow(weight: Array, precision: str) -> Array | NarrowWeight:
  """A weight in fewer bits.

  Args:
    weight: [out, in].
    precision: "bfloat16" or "float16" (the product is of such numbers, summed
      in float32 where the device can), "int8" or "int4" (the weight alone;
      every 32 columns of an int4 row share a scale), or "w8a8" (int8 weights
      times rows brought to int8).

  Returns:
    What `linear` takes as a weight.

  Raises:
    ValueError: for another precision, or without the package qwix.

  Example:
    >>> import jax
    >>> weight = jax.random.normal(jax.random.key(0), (3, 64))
    >>> narrow(weight, "bfloat16").dtype.name
    'bfloat16'

  Source: Dettmers et al. 2022, "LLM.int8()" (a scale for each row of both
  factors).
  """
  if precision not in PRECISIONS:
    raise ValueError(
      f"precision is {precision!r}; known are"
      f" {', '.join(map(repr, PRECISIONS))}"
    )
  if precision in ("bfloat16", "float16"):
    return weight.astype(precision)
  qwix = _qwix()
  if precision == "int4":
    width = weight.shape[1]
    array = qwix.quantize(
      weight,
      "int4",
      channelwise_axes=(0,),
      tiled_axes={1: _TILE if width % _TILE == 0 else width},
    )
  else:
    array = qwix.quantize(weight, jnp.int8, channelwise_axes=(0,))
  return NarrowWeight(array=array, rows=precision == "w8a8")
