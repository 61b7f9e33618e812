"""A draft that knows the text and is right as often as it is told to be."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ldjax import decoding, typing

Array = typing.Array


class OracleParams(NamedTuple):
  """What an oracle knows: weights of its draft, so that they are data."""

  texts: Array
  """[B, S] int32; row b is expected to hold token `texts[b, s]` at position
  s."""
  hit_rate: Array
  """[] float32, the share of positions at which it tells the truth."""
  seed: Array
  """[] uint32, picks the positions."""


def oracle_params(texts: Any, hit_rate: float, seed: int = 0) -> OracleParams:
  """What an oracle is to say.

  Args:
    texts: [B, S] token ids, prompts included; -1 or anything else past the end
      of a row.
    hit_rate: the share of positions that it gets right, 0 to 1.
    seed: picks them.

  Raises:
    ValueError: for texts of another shape or a rate that is none.
  """
  tokens = np.asarray(texts)
  if tokens.ndim != 2 or not tokens.size:
    raise ValueError(f"texts have shape {tokens.shape}; give [B, S]")
  if not 0 <= hit_rate <= 1:
    raise ValueError(f"hit_rate is {hit_rate}; give 0 to 1")
  return OracleParams(
    jnp.asarray(tokens, jnp.int32),
    jnp.float32(hit_rate),
    jnp.uint32(seed % 2**32),
  )


def oracle(size: int) -> decoding.DraftFn:
  """A chain of a known text's next tokens, some of them made wrong.

  Whether position s of row b is right is a hash of (b, s, seed), so that a
  draft is a pure function and each position is met once: the acceptance a
  token is `hit_rate`, and a round brings 1 + a + ... + a^(size - 1) tokens in
  the mean. With it a ceiling that was computed can be measured.

  Args:
    size: T, the root included.

  Returns:
    A draft whose weights are `oracle_params(...)`.

  Raises:
    ValueError: for a size below 1.

  Example:
    >>> import jax.numpy as jnp
    >>> from ldjax import decoding, sampling
    >>> context = decoding.DraftContext(
    ...   jnp.array([[5, 6, 0, 0]]), jnp.array([2]), sampling.make_sampling(1))
    >>> said, _ = oracle(3).propose(
    ...   oracle_params([[5, 6, 7, 8]], 1.0), (), context)
    >>> said.tokens.tolist()
    [[-1, 7, 8]]
  """
  if size < 1:
    raise ValueError(f"size is {size}; a tree has at least its root, so 1")
  return _oracle(size)


def _mix(x: Array) -> Array:
  """A hash of 32 bits (the finaliser of MurmurHash3)."""
  x = x ^ (x >> 16)
  x = x * jnp.uint32(0x85EBCA6B)
  x = x ^ (x >> 13)
  x = x * jnp.uint32(0xC2B2AE35)
  return x ^ (x >> 16)


def _hits(rows: Array, positions: Array, hit_rate: Array, seed: Array) -> Array:
  """Whether the oracle is right, for each of `rows` and `positions` [...]."""
  mixed = _mix(positions.astype(jnp.uint32) ^ _mix(seed + jnp.uint32(1)))
  mixed = _mix(mixed + rows.astype(jnp.uint32) * jnp.uint32(0x9E3779B9))
  # 24 bits, which float32 holds; a rate of 1 is above all of them.
  share = (mixed >> 8).astype(jnp.float32) * jnp.float32(2**-24)
  return share < hit_rate


@functools.lru_cache(maxsize=32)
def _oracle(size: int) -> decoding.DraftFn:
  depth = size - 1

  def propose(params, state, context):
    batch, capacity = params.texts.shape
    ahead = context.length[:, None] + jnp.arange(depth, dtype=jnp.int32)[None]
    known = jnp.take_along_axis(
      params.texts, jnp.minimum(ahead, capacity - 1), axis=1
    )
    rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
    right = _hits(rows, ahead, params.hit_rate, params.seed)
    # A neighbour of the right token: another one, and never an unknown id.
    wrong = jnp.where(known > 0, known - 1, 1)
    drafted = jnp.where(
      (ahead < capacity) & (known >= 0), jnp.where(right, known, wrong), -1
    )
    root = jnp.full((batch, 1), -1, jnp.int32)
    parents = jnp.arange(-1, depth, dtype=jnp.int32)
    return decoding.Candidates(
      jnp.concatenate([root, drafted], axis=1),
      jnp.broadcast_to(parents[None], (batch, size)),
    ), state

  plain = decoding.root_only()
  return plain._replace(propose=propose, size=size, depth=depth)
