"""Attention over a paged prefix as a Pallas kernel for NVIDIA Hopper.

A block is one warpgroup: 64 rows of queries (nodes times the heads that share
a key) against a part of a row's live pages, which stream through two slots of
shared memory. Parts are merged by their log-sum-exps, so that one long row
keeps the whole device busy.

What lies in dead slots can't be seen: pages of dead columns are those of the
last live one, scores are masked, and dead values are made zero in shared
memory before the product, for 0 x NaN is NaN.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ldjax import typing

Array = typing.Array

_ROWS = 64
"""Rows of a warpgroup's matrix product."""
_SLOTS = 2
_TILE = 64
"""16-bit numbers in a swizzled line of 128 bytes."""
_WANTED_BLOCKS = 128
"""About as many as the device has multiprocessors."""

_STATE = plgpu.Layout.WGMMA.reduce(1)


def _load(ref: Any, layout: Any) -> Array:
  """A whole reference; jax 0.11.2, the least with this kernel, and later."""
  load: Any = plgpu.load  # before that it wanted an index
  return load(ref, layout=layout, optimized=False)


def _kernel(
  query_ref: Any,
  pages_ref: Any,
  ids_ref: Any,
  bounds_ref: Any,
  *refs: Any,
  scale: float,
  soft_cap: float | None,
  head_dim: int,
  page_size: int,
  step_pages: int,
  part_steps: int,
  ragged_start: bool,
) -> None:
  """Rows `tile` of key/value head `head` of row `row`, part `part`.

  `refs`: start [R, rows] if `ragged_start`; output [C, R, K, rows, H] and
  log-sum-exp [C, R, K, rows]; then scratch.
  """
  rest = list(refs)
  start_ref = rest.pop(0) if ragged_start else None
  out_ref, lse_ref, query_smem, page_smem, weight_smem, query_bar, bars = rest
  row, head = lax.axis_index("row"), lax.axis_index("head")
  tile, part = lax.axis_index("tile"), lax.axis_index("part")
  span = step_pages * page_size
  low, length = bounds_ref[row, 0], bounds_ref[row, 1]
  here = pl.ds(tile * _ROWS, _ROWS)
  begin = part * part_steps
  steps = jnp.where(low < length, lax.div(length + (span - 1), span), 0)
  end = jnp.minimum(begin + part_steps, steps)

  def fetch(step):
    slot = lax.rem(step, _SLOTS)
    for u in range(step_pages):
      page = ids_ref[row, step * step_pages + u]
      plgpu.copy_gmem_to_smem(
        pages_ref.at[page, head],
        page_smem.at[slot, pl.ds(u * page_size, page_size)],
        bars.at[slot],
      )

  plgpu.copy_gmem_to_smem(query_ref.at[row, head, here], query_smem, query_bar)
  for ahead in range(_SLOTS):
    pl.when(begin + ahead < end)(functools.partial(fetch, begin + ahead))
  plgpu.barrier_wait(query_bar)
  if start_ref is not None:
    start = _load(start_ref.at[row, here], _STATE)
    start = lax.broadcast_in_dim(start, (_ROWS, span), [0])

  def spread(x, width):
    return lax.broadcast_in_dim(x, (_ROWS, width), [0])

  def advance(step, carry):
    top, total, sums = carry
    slot = lax.rem(step, _SLOTS)
    base = step * span
    plgpu.barrier_wait(bars.at[slot])
    key = page_smem.at[slot, :, pl.ds(0, head_dim)]
    value = page_smem.at[slot, :, pl.ds(head_dim, head_dim)]

    @pl.when((base < low) | (base + span > length))
    def clean():
      for column in range(head_dim // _TILE):
        piece = page_smem.at[slot, :, pl.ds(head_dim + column * _TILE, _TILE)]
        position = base + plgpu.broadcasted_iota(
          jnp.int32, (span, _TILE), 0, layout=plgpu.Layout.WGMMA
        )
        there = (position >= low) & (position < length)
        found = _load(piece, plgpu.Layout.WGMMA)
        zero = jnp.zeros_like(found)
        piece[...] = jnp.where(there, found, zero)
      plgpu.commit_smem()

    def product(acc_ref):
      plgpu.wgmma(acc_ref, query_smem, key.transpose((1, 0)))
      return acc_ref[...]

    scores = scale * pl.run_scoped(
      product, plgpu.ACC((_ROWS, span), jnp.float32)
    )
    if soft_cap is not None:
      scores = soft_cap * jnp.tanh(scores / soft_cap)
    position = base + plgpu.broadcasted_iota(
      jnp.int32, (_ROWS, span), 1, layout=plgpu.Layout.WGMMA
    )
    seen = (position >= low) & (position < length)
    if start_ref is not None:
      seen = seen & (position >= start)
    scores = jnp.where(seen, scores, -jnp.inf)
    new_top = jnp.maximum(top, scores.max(axis=1))
    weights = jnp.exp(scores - spread(new_top, span))
    shrink = jnp.exp(top - new_top)
    total = total * shrink + weights.sum(axis=1)
    weight_smem[...] = weights.astype(weight_smem.dtype)
    plgpu.commit_smem()

    def weigh(acc_ref):
      plgpu.wgmma(acc_ref, weight_smem, value)
      return acc_ref[...]

    fresh = pl.run_scoped(weigh, plgpu.ACC((_ROWS, head_dim), jnp.float32))
    sums = sums * spread(shrink, head_dim) + fresh
    pl.when(step + _SLOTS < end)(functools.partial(fetch, step + _SLOTS))
    return new_top, total, sums

  def state(value):
    return plgpu.layout_cast(jnp.full((_ROWS,), value, jnp.float32), _STATE)

  sums = plgpu.layout_cast(
    jnp.zeros((_ROWS, head_dim), jnp.float32), plgpu.Layout.WGMMA
  )
  # Finite, so that `top - new_top` is never NaN.
  top, total, sums = lax.fori_loop(
    begin, end, advance, (state(-1e30), state(0.0), sums)
  )
  some = total > 0
  safe = jnp.where(some, total, 1.0)
  out_ref.at[part, row, head, here][...] = sums / spread(safe, head_dim)
  lse_ref.at[part, row, head, here][...] = jnp.where(
    some, top + jnp.log(safe), -jnp.inf
  )


def prefix_attention(
  query: Array,
  pages: Array,
  block_table: Array,
  length: Array,
  *,
  scale: float,
  start: Array | None = None,
  soft_cap: float | None = None,
  interpret: Any = None,
) -> tuple[Array, Array]:
  """See `ldjax.pallas_kernels.prefix_attention`.

  Args:
    query: [R, T, N, H].
    pages: [P, K, Z, 2H] of the same dtype.
    block_table: [R, M].
    length: [R].
    scale: of the scores.
    start: [R, T], or None.
    soft_cap: of the scores, or None.
    interpret: as `plgpu.kernel` takes it, for tests without a GPU.
  """
  num_rows, num_query, heads, head_dim = query.shape
  num_pages, kv_heads, page_size, fused_dim = pages.shape
  num_columns = block_table.shape[1]
  groups = heads // kv_heads
  # A step is 64 positions: with wide heads no more fit in shared memory.
  span = max(_TILE, page_size)
  step_pages = span // page_size
  rows = num_query * groups
  tiles = -(-rows // _ROWS)
  more = tiles * _ROWS - rows

  folded = query.reshape(num_rows, num_query, kv_heads, groups, head_dim)
  folded = jnp.moveaxis(folded, 2, 1).reshape(
    num_rows, kv_heads, rows, head_dim
  )
  folded = jnp.pad(folded, ((0, 0), (0, 0), (0, more), (0, 0)))
  low = jnp.zeros_like(length) if start is None else start.min(1)
  low = jnp.maximum(low, 0)
  last = jnp.clip(-(-length // page_size), 1, num_columns) - 1
  first = jnp.minimum(low // page_size, last)
  base = first * page_size
  steps = -(-num_columns // step_pages)
  column = (
    first[:, None] + jnp.arange(steps * step_pages, dtype=jnp.int32)[None]
  )
  ids = jnp.take_along_axis(
    block_table, jnp.minimum(column, last[:, None]), axis=1
  )
  ids = jnp.clip(ids, 0, num_pages - 1)
  bounds = jnp.stack([low - base, length - base], axis=1)
  parts = max(1, min(steps, _WANTED_BLOCKS // (num_rows * kv_heads * tiles)))
  part_steps = -(-steps // parts)
  parts = -(-steps // part_steps)
  operands = [folded, pages, ids, bounds]
  if start is not None:
    starts = jnp.repeat(start - base[:, None], groups, axis=1)
    operands.append(jnp.pad(starts, ((0, 0), (0, more))))

  tiling = plgpu.TilingTransform((8, _TILE))
  swizzle = plgpu.SwizzleTransform(128)

  def shared(*shape):
    return plgpu.SMEM(shape, query.dtype, transforms=(tiling, swizzle))

  shape = (parts, num_rows, kv_heads, tiles * _ROWS)
  out, lse = plgpu.kernel(
    functools.partial(
      _kernel,
      scale=scale,
      soft_cap=soft_cap,
      head_dim=head_dim,
      page_size=page_size,
      step_pages=step_pages,
      part_steps=part_steps,
      ragged_start=start is not None,
    ),
    out_type=(
      jax.ShapeDtypeStruct((*shape, head_dim), jnp.float32),
      jax.ShapeDtypeStruct(shape, jnp.float32),
    ),
    scratch_types=(
      shared(_ROWS, head_dim),
      shared(_SLOTS, span, fused_dim),
      shared(_ROWS, span),
      plgpu.Barrier(num_barriers=1),
      plgpu.Barrier(num_arrivals=step_pages, num_barriers=_SLOTS),
    ),
    grid=(num_rows, kv_heads, tiles, parts),
    grid_names=("row", "head", "tile", "part"),
    compiler_params=plgpu.CompilerParams(approx_math=False),
    interpret=interpret,
  )(*operands)

  # Weights relative to the merged log-sum-exp; nothing where nothing was seen.
  merged = jax.nn.logsumexp(lse, axis=0)
  share = jnp.exp(lse - jnp.maximum(merged, -1e30)[None])
  out = jnp.sum(out * share[..., None], axis=0)

  def unfold(x):
    x = x[:, :, :rows].reshape(num_rows, kv_heads, num_query, groups, -1)
    return jnp.moveaxis(x, 1, 2).reshape(num_rows, num_query, heads, -1)

  return unfold(out), unfold(merged[..., None])[..., 0]


# Traced once a shape, not once a layer.
compiled = jax.jit(
  prefix_attention, static_argnames=("scale", "soft_cap", "interpret")
)
