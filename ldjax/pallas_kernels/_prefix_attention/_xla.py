"""Attention over a paged prefix for XLA: a running softmax over live pages.

The number of blocks follows the longest live row, not the capacity of the
block table, so a long `max_len` costs nothing while sequences are short. Under
a window each row begins at the first page that one of its queries sees, so the
number follows the window.
"""

import jax.numpy as jnp
from jax import lax

from ldjax import _base, typing

Array = typing.Array

_BLOCK = (64, 256)
"""Positions a block, at least and at most; all rows together read about the
most. Measured on a CPU: one row wants 256, from four rows on less is faster."""


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
  """See `ldjax.pallas_kernels.prefix_attention`."""
  rows, num_query, heads, head_dim = query.shape
  _, kv_heads, page_size, _ = pages.shape
  groups = heads // kv_heads
  smallest, largest = _BLOCK
  block_pages = max(largest // rows, smallest) // page_size
  block_pages = min(max(block_pages, 1), block_table.shape[1])
  block = block_pages * page_size
  # A whole number of blocks, so that no slice clamps its start.
  table = jnp.pad(
    block_table, ((0, 0), (0, -block_table.shape[1] % block_pages))
  )
  if start is not None:
    # From here on positions count from the first page that a row needs.
    first_page = start.min(1) // page_size  # [R]
    start = start - (first_page * page_size)[:, None]
    length = length - first_page * page_size
  dtype = query.dtype
  precision = (
    lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
  )
  grouped = (query * jnp.asarray(scale, dtype)).reshape(
    rows, num_query, kv_heads, groups, head_dim
  )
  grouped = jnp.swapaxes(grouped, 1, 2)  # [R, K, T, G, H]
  kv_head = jnp.arange(kv_heads, dtype=jnp.int32)[:, None]

  quantized = isinstance(pages, _base.QuantizedKV)
  values, scales = pages if quantized else (pages, None)

  def fetch(source, ids, half):
    """One half of the pages [R, n], gathered into the layout of the product:
    [R, K, S, H] of values or [R, K, S, 1] of scales, without a transpose or a
    slice of what was gathered."""
    width = source.shape[-1] // 2
    index = jnp.broadcast_arrays(ids[:, None], kv_head, jnp.int32(half * width))
    found = lax.gather(
      source,
      jnp.stack(index, axis=-1),
      lax.GatherDimensionNumbers(
        offset_dims=(3, 4),
        collapsed_slice_dims=(0, 1),
        start_index_map=(0, 1, 3),
      ),
      slice_sizes=(1, 1, page_size, width),
      mode=lax.GatherScatterMode.CLIP,
    )
    return found.reshape(rows, kv_heads, block, width)

  def fetch_scale(ids, half):
    """The scales [R, K, 1, 1, S] of one half."""
    return fetch(scales, ids, half)[:, :, None, None, :, 0]

  def accumulate(i, carry):
    top, total, out = carry
    if start is None:
      ids = lax.dynamic_slice_in_dim(
        table, i * block_pages, block_pages, axis=1
      )
    else:
      column = i * block_pages + jnp.arange(block_pages, dtype=jnp.int32)
      # Past the table's end is past the length, where any page will do.
      ids = jnp.take_along_axis(
        table, first_page[:, None] + column[None], axis=1, mode="clip"
      )
    position = i * block + jnp.arange(block, dtype=jnp.int32)
    live = position[None] < length[:, None]
    seen = live[:, None, None, None]
    if start is not None:
      near = position[None, None] >= start[..., None]  # [R, T, S]
      seen = (live[:, None] & near)[:, None, :, None]
      live = live & near.any(1)
    # A masked key may hold anything; a masked value must be zero, for
    # 0 x NaN is NaN.
    value = fetch(values, ids, 1)
    value = jnp.where(live[:, None, :, None], value, jnp.zeros((), value.dtype))
    scores = jnp.einsum(
      "rktgh,rksh->rktgs",
      grouped,
      fetch(values, ids, 0).astype(dtype),
      precision=precision,
      preferred_element_type=jnp.float32,
    )
    if quantized:
      scores = scores * fetch_scale(ids, 0)
    if soft_cap is not None:
      scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(seen, scores, -jnp.inf)
    new_top = jnp.maximum(top, scores.max(-1))
    weights = jnp.exp(scores - new_top[..., None])
    shrink = jnp.exp(top - new_top)
    total = total * shrink + weights.sum(-1)
    if quantized:
      weights = weights * jnp.where(
        live[:, None, None, None], fetch_scale(ids, 1), 0.0
      )
    out = out * shrink[..., None] + jnp.einsum(
      "rktgs,rksh->rktgh",
      weights.astype(dtype),
      value.astype(dtype),
      precision=precision,
      preferred_element_type=jnp.float32,
    )
    return new_top, total, out

  shape = (rows, kv_heads, num_query, groups)
  carry = (
    # Finite, so that the first block's `top - new_top` is never NaN.
    jnp.full(shape, -1e30, jnp.float32),
    jnp.zeros(shape, jnp.float32),
    jnp.zeros((*shape, head_dim), jnp.float32),
  )
  blocks = (length.max() + (block - 1)) // block
  top, total, out = lax.fori_loop(0, blocks, accumulate, carry)
  lse = jnp.where(total > 0, top + jnp.log(total), -jnp.inf)
  out = out / jnp.where(total > 0, total, 1.0)[..., None]
  return (
    jnp.swapaxes(out, 1, 2).reshape(query.shape),
    jnp.swapaxes(lse, 1, 2).reshape(rows, num_query, heads),
  )
