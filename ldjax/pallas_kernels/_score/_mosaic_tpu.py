"""Scoring as a Pallas kernel for TPU.

A grid step multiplies all rows with one tile of the output matrix and leaves of
its logits k winners, a log-sum-exp and the best after noise; XLA then picks
among the tiles' winners.
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


def _first_of_largest(x: Array, column: Array) -> tuple[Array, Array]:
  """The maximum of each row and the lowest column that has it, [R, 1] each."""
  top = jnp.max(x, axis=1, keepdims=True)
  past = jnp.int32(x.shape[1])
  place = jnp.min(jnp.where(x == top, column, past), axis=1, keepdims=True)
  return top, place


def _kernel(
  hidden_ref: Any,
  weight_ref: Any,
  *refs: Any,
  k: int,
  vocab: int,
  soft_cap: float | None,
  noisy: bool,
  mapped: bool,
) -> None:
  """Scores [R, tile]. `refs`: key0, key1, position, temperature [R, 1] if
  `noisy`; token ids [1, tile] if `mapped`; then logits and entries [1, R, k],
  lse [1, R, 1], and the best after noise with its entry [1, R, 1]."""
  rest = list(refs)
  noise = [rest.pop(0)[...] for _ in range(4 if noisy else 0)]
  ids_ref = rest.pop(0) if mapped else None
  logits_ref, entry_ref, lse_ref = rest[:3]
  rows, tile = hidden_ref.shape[0], weight_ref.shape[0]
  column = lax.broadcasted_iota(jnp.int32, (rows, tile), 1)
  begin = pl.program_id(0) * tile
  logits = _reference.logits_of(hidden_ref[...], weight_ref[...], soft_cap)
  # The last tile may reach past the matrix, where anything may lie.
  logits = jnp.where(column < vocab - begin, logits, -jnp.inf)

  top = jnp.max(logits, axis=1, keepdims=True)
  safe = jnp.maximum(top, -1e30)
  total = jnp.sum(jnp.exp(logits - safe), axis=1, keepdims=True)
  lse_ref[0] = safe + jnp.log(total)

  if noisy:
    ids = begin + column
    if ids_ref is not None:
      ids = jnp.broadcast_to(ids_ref[...], ids.shape)
    key0, key1, position, temperature = noise
    drawn = sampling_lib.gumbel_tile(key0, key1, position, ids)
    best_ref, best_entry_ref = rest[3:]
    best, place = _first_of_largest(logits / temperature + drawn, column)
    best_ref[0] = best
    best_entry_ref[0] = begin + place

  slot = lax.broadcasted_iota(jnp.int32, (rows, k), 1)
  values = jnp.full((rows, k), -jnp.inf, jnp.float32)
  entries = jnp.zeros((rows, k), jnp.int32)
  for i in range(k):
    top, place = _first_of_largest(logits, column)
    values = jnp.where(slot == i, top, values)
    entries = jnp.where(slot == i, begin + place, entries)
    logits = jnp.where(column == place, -jnp.inf, logits)
  logits_ref[0] = values
  entry_ref[0] = entries


def summarize(
  hidden: Array,
  weight: Array,
  noise: _reference.Noise | None,
  *,
  k: int,
  soft_cap: float | None,
  blocks: _blocks.ScoreBlocks,
  interpret: Any = False,
) -> _reference.Summary:
  """See `ldjax.pallas_kernels.score`."""
  num_rows, width = hidden.shape
  vocab = weight.shape[0]
  sublanes = 32 // hidden.dtype.itemsize
  more = -num_rows % sublanes
  rows = num_rows + more
  tile = max(blocks.vocab_tile, -(-k // 128) * 128)
  tiles = -(-vocab // tile)

  def padded(x, value=0):
    widths = ((0, more), (0, 0))
    return jnp.pad(x, widths, constant_values=value)

  whole = lambda i: (0, 0)  # noqa: E731
  operands = [padded(hidden), weight]
  in_specs = [
    pl.BlockSpec((rows, width), whole),
    pl.BlockSpec((tile, width), lambda i: (i, 0)),
  ]
  mapped = noise is not None and noise.token_ids is not None
  if noise is not None:
    operands += [
      padded(noise.key[:, :1]),
      padded(noise.key[:, 1:]),
      padded(noise.position.astype(jnp.uint32)[:, None]),
      padded(noise.temperature[:, None], 1.0),
    ]
    in_specs += [pl.BlockSpec((rows, 1), whole)] * 4
    if noise.token_ids is not None:
      operands.append(noise.token_ids[None])
      in_specs.append(pl.BlockSpec((1, tile), lambda i: (0, i)))

  def result(columns, dtype):
    return (
      pl.BlockSpec((1, rows, columns), lambda i: (i, 0, 0)),
      jax.ShapeDtypeStruct((tiles, rows, columns), dtype),
    )

  results = [
    result(k, jnp.float32),
    result(k, jnp.int32),
    result(1, jnp.float32),
  ]
  if noise is not None:
    results += [result(1, jnp.float32), result(1, jnp.int32)]
  found = pl.pallas_call(
    functools.partial(
      _kernel,
      k=k,
      vocab=vocab,
      soft_cap=soft_cap,
      noisy=noise is not None,
      mapped=mapped,
    ),
    grid=(tiles,),
    in_specs=in_specs,
    out_specs=[spec for spec, _ in results],
    out_shape=[shape for _, shape in results],
    compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
    cost_estimate=pl.CostEstimate(
      flops=2 * rows * width * vocab,
      transcendentals=rows * vocab * (1 if noise is None else 4),
      bytes_accessed=(weight.size + rows * width) * weight.dtype.itemsize
      + tiles * rows * k * 8,
    ),
    interpret=interpret,
    name="score",
  )(*operands)
  values, entries, lse = found[:3]

  def by_row(x):
    """[tiles, rows, n] -> [R, tiles n], tiles in order."""
    return jnp.swapaxes(x, 0, 1).reshape(rows, -1)[:num_rows]

  # Tiles are in order and winners of one too: of equal ones the lower entry
  # comes first.
  best, place = lax.top_k(by_row(values), k)
  entry = jnp.take_along_axis(by_row(entries), place, axis=1)
  noisy = None
  if noise is not None:
    place = jnp.argmax(by_row(found[3]), axis=1)[:, None]
    noisy = jnp.take_along_axis(by_row(found[4]), place, axis=1)[:, 0]
  return _reference.Summary(
    best, entry, jax.nn.logsumexp(by_row(lse), axis=-1), noisy
  )
