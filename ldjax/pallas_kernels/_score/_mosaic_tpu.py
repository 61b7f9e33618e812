"""Scoring as a Pallas kernel for TPU.

A grid step multiplies a tile of rows with one of the output matrix. Winners so
far, the log-sum-exp so far and the best after noise so far stay in fast memory
from tile to tile of the matrix.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ldjax import sampling as sampling_lib
from ldjax import typing
from ldjax.pallas_kernels import _blocks
from ldjax.pallas_kernels._score import _reference

Array = typing.Array

_LANES = 128


def _first_of_largest(x: Array, column: Array) -> tuple[Array, Array]:
  """The maximum of each row and the lowest column that has it, [R, 1] each."""
  top = jnp.max(x, axis=1, keepdims=True)
  past = jnp.int32(x.shape[1])
  place = jnp.min(jnp.where(x == top, column, past), axis=1, keepdims=True)
  return top, place


def _kernel(
  listed_ref: Any,
  hidden_ref: Any,
  weight_ref: Any,
  *refs: Any,
  vocab: int,
  soft_cap: float | None,
  noisy: bool,
  mapped: bool,
) -> None:
  """Scores [R, tile].

  `refs`: key0, key1, position, temperature [R, 1] if `noisy`; token ids
  [1, tile] if `mapped`; results: logits and entries [R, k], largest logit and
  sum [R, 1], and if `noisy` the best after noise, its entry and its logit
  [R, 1]; scratch: logits and entries [R, k + tile].
  """
  rest = list(refs)
  noise = [rest.pop(0)[...] for _ in range(4 if noisy else 0)]
  ids_ref = rest.pop(0) if mapped else None
  work_ref, who_ref = rest.pop(-2), rest.pop(-1)
  values_ref, entries_ref, top_ref, total_ref, *best_refs = rest
  rows, tile = hidden_ref.shape[0], weight_ref.shape[0]
  k = values_ref.shape[1]

  @pl.when(pl.program_id(1) == 0)
  def _():
    values_ref[...] = jnp.full_like(values_ref, -jnp.inf)
    entries_ref[...] = jnp.zeros_like(entries_ref)
    # Finite, so that a difference of two is never NaN.
    top_ref[...] = jnp.full_like(top_ref, -1e30)
    total_ref[...] = jnp.zeros_like(total_ref)
    if noisy:
      best_refs[0][...] = jnp.full_like(best_refs[0], -jnp.inf)

  column = lax.broadcasted_iota(jnp.int32, (rows, tile), 1)
  begin = pl.program_id(1) * tile
  logits = _reference.logits_of(hidden_ref[...], weight_ref[...], soft_cap)
  # The last tile may reach past the matrix, where anything may lie.
  logits = jnp.where(column < vocab - begin, logits, -jnp.inf)

  top = jnp.maximum(top_ref[...], jnp.max(logits, axis=1, keepdims=True))
  total_ref[...] = total_ref[...] * jnp.exp(top_ref[...] - top) + jnp.sum(
    jnp.exp(logits - top), axis=1, keepdims=True
  )
  top_ref[...] = top

  if noisy:
    ids = begin + column
    if ids_ref is not None:
      ids = jnp.broadcast_to(ids_ref[...], ids.shape)
    key0, key1, position, temperature = noise
    drawn = sampling_lib.gumbel_tile(key0, key1, position, ids)
    best, place = _first_of_largest(logits / temperature + drawn, column)
    chosen = jnp.where(column == place, logits, -jnp.inf)
    found = (best, begin + place, jnp.max(chosen, axis=1, keepdims=True))
    # Of equal ones the earlier stays: its entry is lower.
    larger = best > best_refs[0][...]
    for ref, new in zip(best_refs, found, strict=True):
      ref[...] = jnp.where(larger, new, ref[...])

  work_ref[:, :k] = values_ref[...]
  work_ref[:, k:] = logits
  who_ref[:, :k] = entries_ref[...]
  who_ref[:, k:] = begin + column
  values_ref[...] = jnp.full_like(values_ref, -jnp.inf)
  slot = lax.broadcasted_iota(jnp.int32, (rows, k), 1)
  place_of = lax.broadcasted_iota(jnp.int32, (rows, k + tile), 1)

  def take_next(i, _):
    # Winners so far stand first, in order: of equal ones the lower entry.
    work = work_ref[...]
    top, place = _first_of_largest(work, place_of)
    here = place_of == place
    entry = jnp.max(jnp.where(here, who_ref[...], 0), axis=1, keepdims=True)
    values_ref[...] = jnp.where(slot == i, top, values_ref[...])
    entries_ref[...] = jnp.where(slot == i, entry, entries_ref[...])
    work_ref[...] = jnp.where(here, -jnp.inf, work)
    return 0

  lax.fori_loop(0, listed_ref[0], take_next, 0)


def summarize(
  hidden: Array,
  weight: Array,
  noise: _reference.Noise | None,
  listed: Array | None = None,
  *,
  k: int,
  soft_cap: float | None,
  blocks: _blocks.ScoreBlocks,
  interpret: Any = False,
) -> _reference.Summary:
  """See `ldjax.pallas_kernels.score`."""
  num_rows, width = hidden.shape
  vocab = weight.shape[0]
  row_tile = blocks.row_tile(num_rows, 32 // hidden.dtype.itemsize)
  row_tiles = -(-num_rows // row_tile)
  rows = row_tiles * row_tile
  tile = -(-blocks.vocab_tile // _LANES) * _LANES
  room = -(-k // _LANES) * _LANES
  if listed is None:
    listed = jnp.int32(k)

  def padded(x, value=0):
    widths = ((0, rows - num_rows), (0, 0))
    return jnp.pad(x, widths, constant_values=value)

  def by_rows(columns):
    return pl.BlockSpec((row_tile, columns), lambda r, i, _: (r, 0))

  operands = [padded(hidden), weight]
  in_specs = [
    by_rows(width),
    pl.BlockSpec((tile, width), lambda r, i, _: (i, 0)),
  ]
  mapped = noise is not None and noise.token_ids is not None
  if noise is not None:
    operands += [
      padded(noise.key[:, :1]),
      padded(noise.key[:, 1:]),
      padded(noise.position.astype(jnp.uint32)[:, None]),
      padded(noise.temperature[:, None], 1.0),
    ]
    in_specs += [by_rows(1)] * 4
    if noise.token_ids is not None:
      operands.append(noise.token_ids[None])
      in_specs.append(pl.BlockSpec((1, tile), lambda r, i, _: (0, i)))
  results = [
    (room, jnp.float32),
    (room, jnp.int32),
    (1, jnp.float32),
    (1, jnp.float32),
  ]
  if noise is not None:
    results += [(1, jnp.float32), (1, jnp.int32), (1, jnp.float32)]
  found = pl.pallas_call(
    functools.partial(
      _kernel,
      vocab=vocab,
      soft_cap=soft_cap,
      noisy=noise is not None,
      mapped=mapped,
    ),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(row_tiles, -(-vocab // tile)),
      in_specs=in_specs,
      out_specs=[by_rows(columns) for columns, _ in results],
      scratch_shapes=[
        pltpu.VMEM((row_tile, room + tile), jnp.float32),
        pltpu.VMEM((row_tile, room + tile), jnp.int32),
      ],
    ),
    out_shape=[
      jax.ShapeDtypeStruct((rows, columns), dtype) for columns, dtype in results
    ],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "arbitrary")
    ),
    cost_estimate=pl.CostEstimate(
      flops=2 * rows * width * vocab,
      transcendentals=rows * vocab * (1 if noise is None else 4),
      bytes_accessed=(row_tiles * weight.size + rows * width)
      * weight.dtype.itemsize
      + rows * room * 8,
    ),
    interpret=interpret,
    name="score",
  )(listed.astype(jnp.int32)[None], *operands)
  values, entries, top, total, *best = (x[:num_rows] for x in found)
  return _reference.Summary(
    values[:, :k],
    entries[:, :k],
    (top + jnp.log(total))[:, 0],
    *((x[:, 0] for x in best[1:]) if best else (None, None)),
  )
