"""Attention over a paged prefix: the definition, in plain jnp."""

import jax
import jax.numpy as jnp

from ldjax import _base, typing

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
  """Gathers the whole block table, masks, and takes one softmax.

  See `ldjax.pallas_kernels.prefix_attention` for shapes.
  """
  rows, num_query, heads, head_dim = query.shape
  _, kv_heads, page_size, _ = pages.shape
  capacity = block_table.shape[1] * page_size

  def gather(x):
    found = x.at[block_table].get(mode="clip")  # [R, M, K, Z, ...]
    found = jnp.moveaxis(found, 2, 1).astype(jnp.float32)
    return found.reshape(rows, kv_heads, capacity, -1)

  if isinstance(pages, _base.QuantizedKV):
    gathered = gather(pages.values) * jnp.repeat(
      gather(pages.scales), head_dim, axis=-1
    )
  else:
    gathered = gather(pages)
  key, value = jnp.split(gathered, 2, axis=-1)
  position = jnp.arange(capacity)
  begin = jnp.zeros((rows, num_query), jnp.int32) if start is None else start
  seen = (position[None, None] >= begin[..., None]) & (
    position[None, None] < length[:, None, None]
  )  # [R, T, S]
  value = jnp.where(seen.any(1)[:, None, :, None], value, 0.0)
  grouped = query.astype(jnp.float32).reshape(
    rows, num_query, kv_heads, heads // kv_heads, head_dim
  )
  scores = scale * jnp.einsum(
    "rtkgh,rksh->rtkgs",
    grouped,
    key,
    precision=jax.lax.Precision.HIGHEST,
  )
  if soft_cap is not None:
    scores = soft_cap * jnp.tanh(scores / soft_cap)
  scores = jnp.where(seen[:, :, None, None], scores, -jnp.inf)
  lse = jax.nn.logsumexp(scores, axis=-1)
  weights = jnp.exp(scores - jnp.maximum(lse, -1e30)[..., None])
  out = jnp.einsum(
    "rtkgs,rksh->rtkgh",
    weights,
    value,
    precision=jax.lax.Precision.HIGHEST,
  )
  return out.reshape(query.shape), lse.reshape(rows, num_query, heads)
