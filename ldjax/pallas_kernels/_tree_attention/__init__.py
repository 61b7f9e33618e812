"""Attention of tree nodes over their prefix and their ancestors."""

import chex
import jax
import jax.numpy as jnp
from jax import lax

from ldjax import _base, typing
from ldjax.pallas_kernels import _prefix_attention

__all__ = ["ancestor_mask", "tree_attention", "window_mask"]

Array = typing.Array


def ancestor_mask(parents: Array) -> Array:
  """Which nodes each node sees: its ancestors and itself.

  Args:
    parents: [R, T] int32; -1 for a root, else an earlier node.

  Returns:
    [R, T, T] bool, entry (i, j) true iff j is i or above it.

  Example:
    >>> import jax.numpy as jnp
    >>> ancestor_mask(jnp.array([[-1, 0, 0, 1]]))[0].astype(int).tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
  """

  def one(parents):
    num_nodes = parents.shape[0]
    # Pointer doubling: after k rounds a node knows 2**k levels above it.
    # Node `num_nodes` stands for "above the root" and sees nothing.
    mask = jnp.eye(num_nodes + 1, num_nodes, dtype=bool)
    jump = jnp.append(jnp.where(parents < 0, num_nodes, parents), num_nodes)
    for _ in range(max(num_nodes - 1, 0).bit_length()):
      mask = mask | mask[jump]
      jump = jump[jump]
    return mask[:num_nodes]

  return jax.vmap(one)(parents)


def window_mask(
  mask: Array, positions: Array, window: int
) -> tuple[Array, Array]:
  """Narrows what nodes see to the last `window` positions.

  A node at position p sees position s iff p - window < s <= p: itself and the
  window - 1 positions before it.

  Args:
    mask: [R, T, T] bool, see `ancestor_mask`.
    positions: [R, T] int32, absolute.
    window: in positions, at least 1.

  Returns:
    The mask of the nodes among themselves [R, T, T], and the first position
    that each of them sees [R, T] int32; both as `tree_attention` takes them.

  Raises:
    ValueError: for a window below 1.

  Example:
    >>> import jax.numpy as jnp
    >>> chain = ancestor_mask(jnp.array([[-1, 0, 1]]))
    >>> mask, start = window_mask(chain, jnp.array([[5, 6, 7]]), 2)
    >>> mask[0].astype(int).tolist(), start.tolist()
    ([[1, 0, 0], [1, 1, 0], [0, 1, 1]], [[4, 5, 6]])

  Source: Beltagy et al. 2020 (Longformer); Jiang et al. 2023 (Mistral 7B).
  """
  if window < 1:
    raise ValueError(f"window is {window}; a node sees at least itself, so 1")
  start = jnp.maximum(positions - (window - 1), 0)
  return mask & (positions[:, None, :] >= start[:, :, None]), start


def tree_attention(
  query: Array,
  block_kv: _base.KV,
  pages: _base.KV,
  block_table: Array,
  length: Array,
  mask: Array,
  *,
  scale: float,
  start: Array | None = None,
  soft_cap: float | None = None,
  implementation: str | None = None,
) -> Array:
  """Attends each tree node to the committed prefix and to its ancestors.

  Args:
    query: [R, T, N, H].
    block_kv: [R, T, K, 2H], keys and values of the nodes themselves, in the
      cache's dtype, see `memory.cast_kv`; an array or `QuantizedKV`.
    pages: [P, K, Z, 2H], see `prefix_attention`.
    block_table: [R, M] int32.
    length: [R] int32.
    mask: [R, T, T] bool, see `ancestor_mask`; every node sees itself.
    scale: multiplies the scores.
    start: [R, T] int32, the first position of the prefix that each node sees,
      see `window_mask`; None for position 0.
    soft_cap: of the scaled scores, see `prefix_attention`.
    implementation: of the part over the prefix, see `prefix_attention`.

  Returns:
    [R, T, N, H] in the query's dtype.

  Example:
    >>> import jax.numpy as jnp
    >>> tree_attention(
    ...   jnp.ones((1, 2, 2, 4)), jnp.ones((1, 2, 1, 8)),
    ...   jnp.ones((3, 1, 2, 8)), jnp.array([[2, 0]]), jnp.array([3]),
    ...   ancestor_mask(jnp.array([[-1, 0]])), scale=0.5).shape
    (1, 2, 2, 4)
  """
  rows, num_nodes, heads, head_dim = query.shape
  kv_heads = block_kv.shape[2]
  if isinstance(block_kv, _base.QuantizedKV):
    block, scales = block_kv
    chex.assert_shape(scales, (rows, num_nodes, kv_heads, 2))
    # [R, K, 1, 1, T] of keys and of values.
    key_scale, value_scale = jnp.moveaxis(scales, (3, 2), (0, 2))[
      :, :, :, None, None
    ]
  else:
    block, key_scale, value_scale = block_kv, None, None
  chex.assert_shape(block, (rows, num_nodes, kv_heads, 2 * head_dim))
  chex.assert_shape(mask, (rows, num_nodes, num_nodes))
  prefix_out, prefix_lse = _prefix_attention.prefix_attention(
    query,
    pages,
    block_table,
    length,
    scale=scale,
    start=start,
    soft_cap=soft_cap,
    implementation=implementation,
  )
  dtype = query.dtype
  precision = (
    lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
  )
  grouped = (query * jnp.asarray(scale, dtype)).reshape(
    rows, num_nodes, kv_heads, heads // kv_heads, head_dim
  )
  scores = jnp.einsum(
    "rtkgh,rskh->rktgs",
    grouped,
    block[..., :head_dim].astype(dtype),
    precision=precision,
    preferred_element_type=jnp.float32,
  )
  if key_scale is not None:
    scores = scores * key_scale
  if soft_cap is not None:
    scores = soft_cap * jnp.tanh(scores / soft_cap)
  scores = jnp.where(mask[:, None, :, None], scores, -jnp.inf)
  lse = jax.nn.logsumexp(scores, axis=-1)
  # Weights relative to the merged log-sum-exp: both parts then just add up.
  prefix_lse = jnp.swapaxes(
    prefix_lse.reshape(rows, num_nodes, kv_heads, -1), 1, 2
  )
  merged = jnp.logaddexp(lse, prefix_lse)
  weights = jnp.exp(scores - merged[..., None])
  # A node that is not finite must reach only those that see it, but 0 x NaN
  # is NaN: take it out of the product and mark its descendants instead.
  value = block[..., head_dim:].astype(dtype)
  sound = jnp.isfinite(value)
  broken = ~jnp.all(sound, axis=(2, 3))
  if value_scale is not None:
    sound_scale = jnp.isfinite(value_scale)
    broken = broken | ~jnp.all(sound_scale, axis=(1, 2, 3))
    weights = weights * jnp.where(sound_scale, value_scale, 0.0)
  poisoned = jnp.any(mask & broken[:, None, :], axis=-1)
  block_out = jnp.einsum(
    "rktgs,rskh->rtkgh",
    weights.astype(dtype),
    jnp.where(sound, value, 0),
    precision=precision,
    preferred_element_type=jnp.float32,
  ).reshape(query.shape)
  share = jnp.swapaxes(jnp.exp(prefix_lse - merged), 1, 2)
  share = share.reshape(rows, num_nodes, heads, 1)
  out = jnp.where(
    poisoned[:, :, None, None], jnp.nan, block_out + share * prefix_out
  )
  return out.astype(dtype)
