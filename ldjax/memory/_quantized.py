"""How keys and values are held: as floats, or in eight bits with scales.

Quantised rows are made before any attention reads them and moved as they are,
so that a position looks to everybody as it will look once committed.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ldjax import _base, typing

Array = typing.Array

_FLOATS = ("float32", "bfloat16", "float16")
_LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""What the largest number of a row becomes."""
_SMALLEST = 1e-30
"""A row of smaller numbers counts as zeros: its scale could be subnormal."""


def cache_dtype(dtype: jax.typing.DTypeLike) -> np.dtype:
  """The dtype of a cache by its name or type.

  Args:
    dtype: float32, bfloat16 or float16, or in eight bits with scales int8 or
      float8_e4m3fn.

  Raises:
    ValueError: for one that no cache can have.

  Example:
    >>> cache_dtype("int8").itemsize
    1
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
  held = cache_dtype(dtype)

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
  held = cache_dtype(dtype)
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


class QuantizationError(NamedTuple):
  """How far quantised entries are from what they were, a layer each.

  The error of an entry is counted against the largest number of its position,
  head and half: int8 rounds by at most 1 / 254 of it, float8_e4m3fn by 1 / 28.
  """

  largest: np.ndarray
  """[L, 2] float32, of keys and of values."""
  rms: np.ndarray
  """[L, 2] float32, root of the summed squares of the errors over that of the
  entries."""


@functools.partial(jax.jit, static_argnums=2)
def _quantize_layer(
  layer: Array, live: Array, dtype: np.dtype
) -> tuple[_base.QuantizedKV, Array, Array]:
  held = cast_kv(layer, dtype)
  assert isinstance(held, _base.QuantizedKV)

  def halves(x: Array) -> Array:
    kept = jnp.where(live[:, None, :, None], x.astype(jnp.float32), 0.0)
    return kept.reshape(*layer.shape[:-1], 2, -1)

  before = halves(layer)
  scales = jnp.where(live[:, None, :, None], held.scales, 0.0)
  error = halves(held.values) * scales[..., None] - before
  top = jnp.abs(before).max(-1)
  relative = jnp.abs(error).max(-1) / jnp.where(top == 0, 1.0, top)
  squares = jnp.square(before).sum((0, 1, 2, 4))
  rms = jnp.sqrt(
    jnp.square(error).sum((0, 1, 2, 4)) / jnp.where(squares == 0, 1.0, squares)
  )
  return held, relative.max((0, 1, 2)), rms


def quantize(
  layers: tuple[_base.KV, ...], live: Array, dtype: jax.typing.DTypeLike
) -> tuple[tuple[_base.KV, ...], QuantizationError]:
  """Quantises pages, a layer at a time, each deleted once it is done.

  Args:
    layers: L layers [P, K, Z, 2H] of floats, not traced.
    live: [P, Z] bool, the slots whose error counts.
    dtype: int8 or float8_e4m3fn.

  Raises:
    ValueError: for a dtype without scales, or pages that are quantised.
  """
  wanted = cache_dtype(dtype)
  if wanted.name in _FLOATS:
    raise ValueError(
      f"quantising to {wanted.name} would save nothing; give one of"
      f" {', '.join(_LARGEST)}"
    )
  done: list[_base.KV] = []
  largest: list[np.ndarray] = []
  rms: list[np.ndarray] = []
  for layer in layers:
    if isinstance(layer, _base.QuantizedKV):
      raise ValueError(f"the pages are quantised already, to {layer.dtype}")
    held, *errors = _quantize_layer(layer, live, wanted)
    # On the host, so that the layer was read before it is deleted.
    for found, error in zip((largest, rms), errors, strict=True):
      found.append(np.asarray(error))
    layer.delete()
    done.append(held)
  return tuple(done), QuantizationError(np.stack(largest), np.stack(rms))
