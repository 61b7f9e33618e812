"""Noise that is a function of (sequence key, position, token id).

One draw a position, whatever was drafted: this is what makes speculative
text equal to plain text at any temperature.
"""

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ldjax import typing

Array = typing.Array

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def _rotate_left(x: Array, by: int) -> Array:
  return (x << np.uint32(by)) | (x >> np.uint32(32 - by))


def threefry2x32(
  key0: Array, key1: Array, x0: Array, x1: Array
) -> tuple[Array, Array]:
  """Hashes the counter (x0, x1) under (key0, key1), 20 rounds.

  Only adds, shifts and xors of uint32, so that a kernel can call it on a
  tile, and the host on NumPy arrays. All arguments must have one shape.

  Returns:
    Two uint32 arrays of that shape.

  Example:
    >>> import jax.numpy as jnp
    >>> zero = jnp.uint32(0)
    >>> [hex(int(x)) for x in threefry2x32(zero, zero, zero, zero)]
    ['0x6b200159', '0x99ba4efe']

  Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
  """
  keys = (key0, key1, key0 ^ key1 ^ np.uint32(0x1BD11BDA))
  x0, x1 = x0 + keys[0], x1 + keys[1]
  for block in range(5):
    for by in _ROTATIONS[block % 2]:
      x0 = x0 + x1
      x1 = _rotate_left(x1, by) ^ x0
    x0 = x0 + keys[(block + 1) % 3]
    x1 = x1 + keys[(block + 2) % 3] + np.uint32(block + 1)
  return x0, x1


def gumbel_at(key: Array, position: Array, ids: Array) -> Array:
  """Standard Gumbel noise of some token ids at one position of a sequence.

  Only elementwise operations, so that a kernel can call it on a tile.

  Args:
    key: [B, 2] uint32, see `sequence_key`.
    position: [B] int32, the absolute position that the token will take.
    ids: [B, n] int32.

  Returns:
    [B, n] float32, finite; an entry depends on (key, position, id) alone.

  Example:
    >>> import jax.numpy as jnp
    >>> key, position = sequence_key(7)[None], jnp.array([3])
    >>> some = gumbel_at(key, position, jnp.array([[4, 0]]))
    >>> all = gumbel(key, position, 5)
    >>> bool((some == all[:, jnp.array([4, 0])]).all())
    True
  """
  return gumbel_tile(
    key[:, :1], key[:, 1:], position.astype(jnp.uint32)[:, None], ids
  )


def gumbel_tile(key0: Array, key1: Array, position: Array, ids: Array) -> Array:
  """`gumbel_at` on the parts of its arguments, as a kernel holds them.

  Args:
    key0: [B, 1] uint32, the first words of the keys.
    key1: [B, 1] uint32, the second ones.
    position: [B, 1] uint32.
    ids: [B, n] int32.

  Example:
    >>> import jax.numpy as jnp
    >>> one = jnp.ones((1, 1), jnp.uint32)
    >>> gumbel_tile(one, one, one, jnp.array([[4, 0]])).shape
    (1, 2)
  """
  bits, _ = threefry2x32(
    jnp.broadcast_to(key0, ids.shape),
    jnp.broadcast_to(key1, ids.shape),
    jnp.broadcast_to(position, ids.shape),
    ids.astype(jnp.uint32),
  )
  # 31 bits as a fixed-point number in (0, 1): small values, which become the
  # large noise that decides, keep all their bits.
  uniform = ((bits >> np.uint32(1)).astype(jnp.int32)).astype(jnp.float32)
  uniform = (uniform + 0.5) * jnp.float32(2.0**-31)
  uniform = jnp.minimum(uniform, jnp.float32(1.0 - 2.0**-24))
  return -jnp.log(-jnp.log1p(-uniform))


def gumbel(key: Array, position: Array, vocab_size: int) -> Array:
  """Standard Gumbel noise for each token id at one position of a sequence.

  Args:
    key: [B, 2] uint32, see `sequence_key`.
    position: [B] int32, the absolute position that the token will take.
    vocab_size: V.

  Returns:
    [B, V] float32, finite; entry v depends on (key, position, v) alone.

  Example:
    >>> import jax.numpy as jnp
    >>> key = sequence_key(7)[None]
    >>> wide = gumbel(key, jnp.array([3]), 11)
    >>> narrow = gumbel(key, jnp.array([3]), 5)
    >>> bool((wide[:, :5] == narrow).all())
    True
  """
  ids = jnp.arange(vocab_size, dtype=jnp.int32)[None]
  shape = (key.shape[0], vocab_size)
  return gumbel_at(key, position, jnp.broadcast_to(ids, shape))


def _seed_words(seed: int | Array) -> Array | np.ndarray:
  """The two words that `jax.random.key(seed)` holds, without its truncation."""
  if isinstance(seed, jax.Array) and jnp.issubdtype(
    seed.dtype, jax.dtypes.prng_key
  ):
    words = jax.random.key_data(seed)
    if words.shape != (2,):
      raise ValueError(
        f"seed is a key of shape {seed.shape} with {words.shape[-1]} words;"
        " give one threefry key, as jax.random.key(0) makes it"
      )
    return words
  if isinstance(seed, jax.core.Tracer):
    raise TypeError(
      "a seed inside jit or vmap must be a key: pass jax.random.key(seed) in"
      f" place of the traced integer {seed}"
    )
  number = operator.index(seed)
  if not 0 <= number < 2**64:
    raise ValueError(f"seed is {number}; it must be in [0, 2**64)")
  return np.array([number >> 32, number & 0xFFFFFFFF], dtype=np.uint32)


def sequence_keys(seeds: Sequence[int | Array], sample: int = 0) -> Any:
  """`sequence_key` of each seed, hashed in one go: [B, 2] uint32.

  Integers are hashed on the host: a server makes a key a request, and each
  operation of a device takes its turn behind the running step.
  """
  if not seeds:
    return np.zeros((0, 2), np.uint32)
  words = [_seed_words(seed) for seed in seeds]
  host = all(isinstance(word, np.ndarray) for word in words)
  xp: Any = np if host else jnp
  array = xp.stack([xp.asarray(word) for word in words])
  shape = array.shape[:1]
  one, two = threefry2x32(
    array[:, 0],
    array[:, 1],
    xp.full(shape, 0xFFFFFFFF, xp.uint32),
    xp.full(shape, sample, xp.uint32),
  )
  return xp.stack([one, two], axis=1)


def sequence_key(seed: int | Array, sample: int = 0) -> Array:
  """The key of one sequence, from its seed and its sample index.

  Args:
    seed: an integer in [0, 2**64), or a key of `jax.random.key` (threefry).
    sample: the index among several samples of one prompt.

  Returns:
    [2] uint32.

  Raises:
    ValueError: for a seed out of range or a key of another kind.

  Example:
    >>> bool((sequence_key(1) == sequence_key(1, sample=1)).all())
    False
  """
  return jnp.asarray(sequence_keys([seed], sample)[0])
