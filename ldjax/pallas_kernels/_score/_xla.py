"""Scoring for XLA: tile by tile of the vocabulary, never all logits."""

import jax.numpy as jnp
from jax import lax

from ldjax import sampling as sampling_lib
from ldjax import typing
from ldjax.pallas_kernels import _blocks
from ldjax.pallas_kernels._score import _reference

Array = typing.Array


def summarize(
  hidden: Array,
  weight: Array,
  noise: _reference.Noise | None,
  listed: Array | None = None,
  *,
  k: int,
  soft_cap: float | None,
  blocks: _blocks.ScoreBlocks,
) -> _reference.Summary:
  """See `ldjax.pallas_kernels.score`."""
  rows, vocab = hidden.shape[0], weight.shape[0]
  tile = min(max(blocks.vocab_tile, k), vocab)
  column = jnp.arange(tile, dtype=jnp.int32)[None]

  def advance(i, carry):
    best, entry, top, total, noisy = carry
    # The last tile begins early; what it has twice counts once.
    begin = jnp.minimum(i * tile, vocab - tile)
    logits = _reference.logits_of(
      hidden, lax.dynamic_slice_in_dim(weight, begin, tile), soft_cap
    )
    here = jnp.broadcast_to(begin + column, logits.shape)
    fresh = here >= i * tile
    logits = jnp.where(fresh, logits, -jnp.inf)
    # Of equal ones `top_k` takes the first, hence the lower entry.
    best, place = lax.top_k(jnp.concatenate([best, logits], axis=1), k)
    entry = jnp.take_along_axis(
      jnp.concatenate([entry, here], axis=1), place, axis=1
    )
    new_top = jnp.maximum(top, logits.max(-1))
    total = total * jnp.exp(top - new_top) + jnp.sum(
      jnp.exp(logits - new_top[:, None]), axis=-1
    )
    if noise is not None:
      ids = here
      if noise.token_ids is not None:
        ids = lax.dynamic_slice_in_dim(noise.token_ids, begin, tile)[None]
        ids = jnp.broadcast_to(ids, here.shape)
      drawn = sampling_lib.gumbel_at(noise.key, noise.position, ids)
      perturbed = logits / noise.temperature[:, None] + drawn
      place = jnp.argmax(perturbed, axis=-1)[:, None]
      value = jnp.take_along_axis(perturbed, place, axis=1)[:, 0]
      at = jnp.take_along_axis(here, place, axis=1)[:, 0]
      logit = jnp.take_along_axis(logits, place, axis=1)[:, 0]
      larger = value > noisy[0]
      noisy = tuple(
        jnp.where(larger, new, old)
        for new, old in zip((value, at, logit), noisy, strict=True)
      )
    return best, entry, new_top, total, noisy

  carry = (
    jnp.full((rows, k), -jnp.inf, jnp.float32),
    jnp.zeros((rows, k), jnp.int32),
    # Finite, so that `top - new_top` is never NaN.
    jnp.full((rows,), -1e30, jnp.float32),
    jnp.zeros((rows,), jnp.float32),
    (
      jnp.full((rows,), -jnp.inf, jnp.float32),
      jnp.zeros((rows,), jnp.int32),
      jnp.full((rows,), -jnp.inf, jnp.float32),
    ),
  )
  best, entry, top, total, noisy = lax.fori_loop(
    0, -(-vocab // tile), advance, carry
  )
  return _reference.Summary(
    _reference.shorten(best, listed),
    entry,
    top + jnp.log(total),
    *((None, None) if noise is None else noisy[1:]),
  )
