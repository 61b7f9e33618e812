"""Attention over a paged prefix as a Pallas kernel for TPU.

A grid step brings several pages of some key/value heads into fast memory, all
heads of a page in one copy, and takes one step of a running softmax. Query
heads of one group and all nodes are the rows of one matrix. The grid is as
long as the longest live row needs.

What lies in dead slots can't be seen: the index map stays on a row's live
pages (a dead step fetches nothing new), scores are masked, and dead rows are
made zero before the product, for 0 x NaN is NaN.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ldjax import _base, typing
from ldjax.pallas_kernels import _blocks

Array = typing.Array

_LANES = 128


def _stretch(length, low, page_size, num_columns):
  """First and last column of a row's table that a query may see."""
  # `lax.div`: nothing is negative, and rounding down would ask which TPU it is.
  size = jnp.int32(page_size)
  last = lax.div(length + (page_size - 1), size)
  last = jnp.clip(last, 1, num_columns) - 1
  return jnp.minimum(lax.div(low, size), last), last


def _kernel(
  table_ref: Any,
  length_ref: Any,
  low_ref: Any,
  query_ref: Any,
  *refs: Any,
  scale: float,
  soft_cap: float | None,
  head_dim: int,
  page_size: int,
  num_columns: int,
  step_pages: int,
  ragged_start: bool,
  quantized: bool,
) -> None:
  """One step of rows [QT] of KB heads over `step_pages` pages.

  `refs`: pages, one [1, KB, Z, 2H] each; start [1, QT, 1] if `ragged_start`;
  scales [1, 1, KB, 2, S] if `quantized`; then output [1, KB, QT, W],
  log-sum-exp [1, KB, QT, 1], and scratch: top and total [KB, QT, 128],
  sums [KB, QT, W].
  """
  del table_ref  # read by the index maps
  page_refs, rest = refs[:step_pages], list(refs[step_pages:])
  start_ref = rest.pop(0) if ragged_start else None
  scales_ref = rest.pop(0) if quantized else None
  out_ref, lse_ref, top_ref, total_ref, sum_ref = rest
  row, step = pl.program_id(0), pl.program_id(3)
  length, low = length_ref[row], low_ref[row]
  first, _ = _stretch(length, low, page_size, num_columns)
  span = step_pages * page_size
  base = (first + step * step_pages) * page_size
  dtype = query_ref.dtype
  precision = (
    lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
  )
  # A head narrower than a vector register is not cut out of the fused rows:
  # queries have zeros against the values, and half of the sums is dropped.
  fused = query_ref.shape[-1] != head_dim

  @pl.when(step == 0)
  def begin():
    # Finite, so that `top - new_top` is never NaN.
    top_ref[...] = jnp.full(top_ref.shape, -1e30, jnp.float32)
    total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)
    sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)

  def live(shape, axis):
    position = base + lax.broadcasted_iota(jnp.int32, shape, axis)
    return position, (position >= low) & (position < length)

  @pl.when((base < length) & (low < length))
  def advance():
    position, seen = live((1, span), 1)
    if start_ref is not None:
      seen = seen & (position >= start_ref[0])
    whole = (base >= low) & (base + span <= length)
    for head in range(query_ref.shape[1]):
      rows = [ref[0, head].astype(dtype) for ref in page_refs]
      keyvalue = rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis=0)

      def clean(x):
        _, there = live((span, 1), 0)
        return jnp.where(there, x.astype(jnp.float32), 0.0).astype(x.dtype)

      keyvalue = lax.cond(whole, lambda x: x, clean, keyvalue)
      key, value = keyvalue, keyvalue
      if not fused:
        key, value = keyvalue[:, :head_dim], keyvalue[:, head_dim:]
      scores = scale * lax.dot_general(
        query_ref[0, head],
        key,
        (((1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
      )
      if scales_ref is not None:
        scores = scores * scales_ref[0, 0, head, 0:1]
      if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
      scores = jnp.where(seen, scores, -jnp.inf)
      top = top_ref[head][:, :1]
      new_top = jnp.maximum(top, jnp.max(scores, axis=1, keepdims=True))
      weights = jnp.exp(scores - new_top)
      shrink = jnp.exp(top - new_top)
      total = total_ref[head][:, :1] * shrink
      total = total + jnp.sum(weights, axis=1, keepdims=True)
      if scales_ref is not None:
        weights = weights * scales_ref[0, 0, head, 1:2]
      sums = lax.dot_general(
        weights.astype(dtype),
        value,
        (((1,), (0,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
      )
      sum_ref[head] = sum_ref[head] * shrink + sums
      top_ref[head] = jnp.broadcast_to(new_top, top_ref.shape[1:])
      total_ref[head] = jnp.broadcast_to(total, total_ref.shape[1:])

  @pl.when(step == pl.num_programs(3) - 1)
  def finish():
    for head in range(query_ref.shape[1]):
      total = total_ref[head][:, :1]
      some = total > 0
      safe = jnp.where(some, total, 1.0)
      out_ref[0, head] = sum_ref[head] / safe
      lse_ref[0, head] = jnp.where(
        some, top_ref[head][:, :1] + jnp.log(safe), -jnp.inf
      )


def _lay_out(
  scales: Array,
  block_table: Array,
  length: Array,
  low: Array,
  first: Array,
  last: Array,
  step_pages: int,
) -> Array:
  """The scales of each step, positions on the last axis: [R, J, K, 2, S].

  As they lie in the pool, two to a position, a tile of fast memory would hold
  two of 128 lanes. All of a table's are a few percent of the pages' bytes.
  Those of dead slots are zero.
  """
  num_pages, kv_heads, page_size, _ = scales.shape
  num_rows, num_columns = block_table.shape
  steps = -(-num_columns // step_pages)
  more = jnp.arange(steps * step_pages, dtype=jnp.int32)
  column = first[:, None] + more[None]
  pages = jnp.take_along_axis(
    block_table, jnp.minimum(column, last[:, None]), axis=1
  )
  found = scales[jnp.clip(pages, 0, num_pages - 1)]  # [R, J U, K, Z, 2]
  slot = jnp.arange(page_size, dtype=jnp.int32)
  position = column[..., None] * page_size + slot[None, None]
  live = (position >= low[:, None, None]) & (position < length[:, None, None])
  found = jnp.where(live[:, :, None, :, None], found, 0.0)
  found = found.reshape(num_rows, steps, step_pages, kv_heads, page_size, 2)
  return jnp.transpose(found, (0, 1, 3, 5, 2, 4)).reshape(
    num_rows, steps, kv_heads, 2, step_pages * page_size
  )


def prefix_attention(
  query: Array,
  pages: _base.KV,
  block_table: Array,
  length: Array,
  *,
  scale: float,
  start: Array | None = None,
  soft_cap: float | None = None,
  blocks: _blocks.PrefixBlocks,
  interpret: Any = False,
) -> tuple[Array, Array]:
  """See `ldjax.pallas_kernels.prefix_attention`.

  Args:
    query: [R, T, N, H].
    pages: [P, K, Z, 2H], or such with scales in eight bits.
    block_table: [R, M].
    length: [R].
    scale: of the scores.
    start: [R, T], or None.
    soft_cap: of the scores, or None.
    blocks: how much a grid step works on.
    interpret: as `pl.pallas_call` takes it, for tests without a TPU.
  """
  num_rows, num_query, heads, head_dim = query.shape
  scales = None
  if isinstance(pages, _base.QuantizedKV):
    pages, scales = pages
  num_pages, kv_heads, page_size, fused_dim = pages.shape
  num_columns = block_table.shape[1]
  groups = heads // kv_heads
  step_pages = min(blocks.step_pages, num_columns)
  span = step_pages * page_size
  head_block = blocks.head_block(kv_heads)
  sublanes = 32 // query.dtype.itemsize
  tile = blocks.query_tile(num_query * groups, sublanes)
  padded = -(-num_query * groups // tile) * tile
  fused = bool(head_dim % _LANES)
  width = fused_dim if fused else head_dim

  def fold(x):
    """[R, T, K, G, X] -> [R, K, rows, X], nodes and group heads as rows."""
    x = jnp.moveaxis(x, 2, 1)
    x = x.reshape(*x.shape[:2], num_query * groups, x.shape[-1])
    more = padded - num_query * groups
    return jnp.pad(x, ((0, 0), (0, 0), (0, more), (0, 0)))

  folded = fold(query.reshape(num_rows, num_query, kv_heads, groups, head_dim))
  folded = jnp.pad(folded, ((0, 0), (0, 0), (0, 0), (0, width - head_dim)))
  low = jnp.zeros_like(length) if start is None else start.min(1)
  low = jnp.maximum(low, 0)
  first, last = _stretch(length, low, page_size, num_columns)
  steps = jnp.max((last - first) // step_pages) + 1

  def page_map(u, r, k, q, j, table, length, low):
    del q
    first, last = _stretch(length[r], low[r], page_size, num_columns)
    column = jnp.minimum(first + j * step_pages + u, last)
    page = jnp.clip(table[r * num_columns + column], 0, num_pages - 1)
    return page, k, 0, 0

  def rows_map(r, k, q, j, *_):
    del j
    return r, k, q, 0

  operands: list[Array] = [folded]
  in_specs = [pl.BlockSpec((1, head_block, tile, width), rows_map)]
  for u in range(step_pages):
    in_specs.append(
      pl.BlockSpec(
        (1, head_block, page_size, fused_dim), functools.partial(page_map, u)
      )
    )
    operands.append(pages)
  if start is not None:
    starts = jnp.repeat(start, groups, axis=1)
    starts = jnp.pad(starts, ((0, 0), (0, padded - starts.shape[1])))
    operands.append(starts[..., None])
    in_specs.append(
      pl.BlockSpec((1, tile, 1), lambda r, k, q, j, *_: (r, q, 0))
    )
  if scales is not None:
    operands.append(
      _lay_out(scales, block_table, length, low, first, last, step_pages)
    )
    in_specs.append(
      pl.BlockSpec(
        (1, 1, head_block, 2, span), lambda r, k, q, j, *_: (r, j, k, 0, 0)
      )
    )
  # At most, as if every row were as long as its table: what a compiler that
  # can't look inside is told.
  positions = num_rows * num_columns * page_size
  tiles = padded // tile
  moved = positions * kv_heads * fused_dim * pages.dtype.itemsize * tiles
  moved += folded.size * (query.dtype.itemsize + 4)
  cost = pl.CostEstimate(
    flops=4 * positions * kv_heads * padded * width,
    transcendentals=positions * kv_heads * padded,
    bytes_accessed=moved,
  )
  call = pl.pallas_call(
    functools.partial(
      _kernel,
      scale=scale,
      soft_cap=soft_cap,
      head_dim=head_dim,
      page_size=page_size,
      num_columns=num_columns,
      step_pages=step_pages,
      ragged_start=start is not None,
      quantized=scales is not None,
    ),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=3,
      grid=(num_rows, kv_heads // head_block, padded // tile, steps),
      in_specs=in_specs,
      out_specs=[
        pl.BlockSpec((1, head_block, tile, width), rows_map),
        pl.BlockSpec((1, head_block, tile, 1), rows_map),
      ],
      scratch_shapes=[
        pltpu.VMEM((head_block, tile, _LANES), jnp.float32),
        pltpu.VMEM((head_block, tile, _LANES), jnp.float32),
        pltpu.VMEM((head_block, tile, width), jnp.float32),
      ],
    ),
    out_shape=[
      jax.ShapeDtypeStruct((num_rows, kv_heads, padded, width), jnp.float32),
      jax.ShapeDtypeStruct((num_rows, kv_heads, padded, 1), jnp.float32),
    ],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
    ),
    cost_estimate=cost,
    interpret=interpret,
    name="prefix_attention",
  )
  out, lse = call(block_table.reshape(-1), length, low, *operands)

  def unfold(x):
    x = x[:, :, : num_query * groups]
    x = x.reshape(num_rows, kv_heads, num_query, groups, x.shape[-1])
    return jnp.moveaxis(x, 1, 2).reshape(num_rows, num_query, heads, -1)

  return unfold(out[..., width - head_dim :]), unfold(lse)[..., 0]
