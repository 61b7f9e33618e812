"""Attention of query rows over a paged prefix."""

import chex
import jax

from ldjax import _base, typing
from ldjax.pallas_kernels._prefix_attention import _xla

__all__ = ["prefix_attention"]

Array = typing.Array


def prefix_attention(
  query: Array,
  pages: _base.KV,
  block_table: Array,
  length: Array,
  *,
  scale: float,
  start: Array | None = None,
  soft_cap: float | None = None,
) -> tuple[Array, Array]:
  """Attends T queries of each row to the row's committed prefix.

  All T tree nodes of a row see the same prefix, so no tree mask is needed
  here; `tree_attention` merges the result with the block of nodes.

  Args:
    query: [R, T, N, H].
    pages: [P, K, Z, 2H], keys then values on the last axis; or `QuantizedKV`
      of these, whose scales are multiplied into scores and weights, so that no
      float copy of the pool is made.
    block_table: [R, M] int32, page of each stretch of Z positions.
    length: [R] int32, live positions; whatever lies past them, NaN included,
      changes nothing.
    scale: multiplies the scores.
    start: [R, T] int32, the first position that each query sees, as a sliding
      window sets it; None for position 0. What no query of a row sees changes
      nothing for that row, NaN included, and costs nothing beyond its page.
    soft_cap: scaled scores s become soft_cap * tanh(s / soft_cap); None for no
      cap.

  Returns:
    Output [R, T, N, H] and log-sum-exp of the scores [R, T, N], both float32.
    A query that sees nothing (a row of length 0, a start at or past the
    length) gives output 0 and log-sum-exp -inf.

  Example:
    >>> import jax.numpy as jnp
    >>> out, lse = prefix_attention(
    ...   jnp.ones((1, 1, 2, 4)), jnp.full((3, 1, 2, 8), 5.),
    ...   jnp.array([[2, 0]]), jnp.array([3]), scale=0.5)
    >>> out.shape, lse.shape, float(out[0, 0, 0, 0])
    ((1, 1, 2, 4), (1, 1, 2), 5.0)

  Source: Kwon et al. 2023, "Efficient memory management for large language
  model serving with PagedAttention"; Milakov and Gimelshein 2018 for the
  running softmax; the Gemma team 2024 (Gemma 2) for the cap.
  """
  rows, _, heads, head_dim = query.shape
  kv_heads = pages.shape[1]
  if isinstance(pages, _base.QuantizedKV):
    chex.assert_shape(pages.scales, (*pages.shape[:3], 2))
  chex.assert_shape(
    jax.tree.leaves(pages)[0], (None, kv_heads, None, 2 * head_dim)
  )
  chex.assert_shape(block_table, (rows, None))
  chex.assert_shape(length, (rows,))
  if start is not None:
    chex.assert_shape(start, query.shape[:2])
  if heads % kv_heads:
    raise ValueError(
      f"{heads} query heads are no multiple of {kv_heads} key/value heads"
    )
  return _xla.prefix_attention(
    query,
    pages,
    block_table,
    length,
    scale=scale,
    start=start,
    soft_cap=soft_cap,
  )
