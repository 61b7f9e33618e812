"""How keys and values are held: as floats, or in eight bits with scales.

Quantised rows are made before any attention reads them and moved as they are,
so that a position looks to everybody as it will look once committed.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ldjax import _base, typing

Array = typing.Array

_FLOATS = ("float32", "bfloat16", "float16")
_LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""What the largest number of a row becomes."""
_SMALLEST = 1e-30
"""A row of smaller numbers counts as zeros: its scale could be subnormal."""


def check_dtype(dtype: jax.typing.DTypeLike) -> Any:
  """Returns `jnp.dtype(dtype)`.

  Raises:
    ValueError: for one that no cache can have.
  """
  choices = (*_FLOATS, *_LARGEST)
  try:
    found = jnp.dtype(dtype)
  except TypeError:
    found = None
  if found is None or found.name not in choices:
    raise ValueError(
      f"the cache's dtype is {dtype if found is None else found.name}; it must"
      f" be one of {', '.join(choices)}"
    )
  return found


def empty_layers(
  num_layers: int, shape: tuple[int, ...], dtype: jax.typing.DTypeLike
) -> tuple[_base.KV, ...]:
  """L layers of zeros [..., 2H]."""
  held = check_dtype(dtype)

  def layer() -> _base.KV:
    values = jnp.zeros(shape, held)
    if held.name in _FLOATS:
      return values
    return _base.QuantizedKV(values, jnp.zeros((*shape[:-1], 2), jnp.float32))

  return tuple(layer() for _ in range(num_layers))


def cast_kv(kv: Array, dtype: jax.typing.DTypeLike) -> _base.KV:
  """Keys and values as a cache of some dtype holds them.

  A target passes its block through this before it attends to it.

  Args:
    kv: [..., 2H] of floats, keys then values on the last axis.
    dtype: of the cache, `view.pages[0].dtype`.

  Returns:
    An array [..., 2H], or for int8 and float8_e4m3fn a `QuantizedKV`: each row
    of H numbers is divided by a scale that takes its largest to the largest
    of the dtype, and rounded. A row of zeros has the scale 0, one with a number
    that is not finite the scale NaN.

  Raises:
    ValueError: for a dtype that no cache can have.

  Example:
    >>> import jax.numpy as jnp
    >>> cast_kv(jnp.array([[1., -2., 0., 0.]]), jnp.int8).values.tolist()
    [[64, -127, 0, 0]]
  """
  held = check_dtype(dtype)
  if held.name in _FLOATS:
    return kv.astype(held)
  halves = kv.astype(jnp.float32).reshape(*kv.shape[:-1], 2, -1)
  largest = jnp.abs(halves).max(-1)
  sound = jnp.isfinite(largest)
  small = largest < _SMALLEST
  divisor = jnp.where(sound & ~small, largest, 1.0) / _LARGEST[held.name]
  values = jnp.where(
    (sound & ~small)[..., None], halves / divisor[..., None], 0.0
  )
  if held.name == "int8":
    values = jnp.round(values)
  scales = jnp.where(small, 0.0, jnp.where(sound, divisor, jnp.nan))
  return _base.QuantizedKV(values.astype(held).reshape(kv.shape), scales)


def write(
  layers: tuple[_base.KV, ...],
  block_kv: tuple[_base.KV, ...],
  path: Array,
  page: Array,
  slot: Array,
) -> tuple[_base.KV, ...]:
  """Copies the path's entries of a block into pages, bit for bit.

  Args:
    layers: L layers [P, K, Z, 2H].
    block_kv: L layers [R, T, K, 2H].
    path: [R, X] int32 indices into T.
    page: [R, X] int32, or [R, 1]; P or more for what is not written.
    slot: [R, X] int32; Z or more for what is not written.

  Raises:
    ValueError: for layers that are not held as those of the cache.
  """
  for layer, block in zip(layers, block_kv, strict=True):
    if isinstance(layer, _base.QuantizedKV) != isinstance(
      block, _base.QuantizedKV
    ):
      raise ValueError(
        f"a layer of block_kv is a {type(block).__name__} of {block.dtype.name}"
        f" in a cache of {layer.dtype.name}; pass it through"
        " memory.cast_kv(kv, view.pages[0].dtype) before it is attended to"
      )

  def one(layer: Array, block: Array) -> Array:
    found = jax.vmap(lambda b, p: b.at[p].get(mode="clip"))(block, path)
    return layer.at[page, :, slot].set(found, mode="drop")

  return jax.tree.map(one, tuple(layers), tuple(block_kv))
