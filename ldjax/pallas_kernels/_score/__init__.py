"""Scoring hidden states against an output matrix without all logits."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import lax

from ldjax import sampling as sampling_lib
from ldjax import typing
from ldjax.pallas_kernels import _blocks, _limits, _named, _prefix_attention
from ldjax.pallas_kernels._score import _mosaic_tpu, _reference, _xla

__all__ = ["Scored", "score"]

Array = typing.Array


class Scored(NamedTuple):
  """What is left of R rows of logits."""

  ids: Array
  """[R, k] int32, token ids of the largest logits, descending."""
  logits: Array
  """[R, k] float32, the logits of `ids`."""
  lse: Array
  """[R] float32, log-sum-exp of all logits; `logits` less it are
  log-probabilities."""
  token: Array | None
  """[R] int32, the drawn token; None without `sampling`."""
  logprob: Array | None
  """[R] float32, its log-probability by the logits themselves."""
  exact: Array | None
  """[R] bool, whether `token` is what `sampling.draw` takes from all logits.
  False for penalties, banned ids, `min_new_tokens`, top-p and min-p, and for a
  top-k that the list or a tie at its end hides: draw from all logits there."""


_TPU = jax.jit(
  _mosaic_tpu.summarize, static_argnames=("k", "soft_cap", "blocks")
)


def _token(
  summary: _reference.Summary,
  noise: _reference.Noise,
  sampling: sampling_lib.Sampling,
  ids: Array,
  listed: Array,
  vocab: int,
) -> tuple[Array, Array, Array]:
  """The drawn entry of each row [R], its logit [R] and whether it is exact."""
  k = summary.logits.shape[1]
  size = sampling_lib.deciding(sampling, vocab)
  scaled = summary.logits / noise.temperature[:, None]
  last = jnp.clip(sampling.top_k, 1, k)[:, None] - 1
  cut = jnp.take_along_axis(scaled, last, axis=1)
  drawn = sampling_lib.gumbel_at(noise.key, noise.position, ids)
  perturbed = jnp.where(scaled >= cut, scaled + drawn, -jnp.inf)
  best = jnp.max(perturbed, axis=1, keepdims=True)
  # Of equal ones the lowest entry, as `argmax` of all would take.
  entry = jnp.min(jnp.where(perturbed == best, summary.entry, vocab), axis=1)
  logit = jnp.max(
    jnp.where(summary.entry == entry[:, None], summary.logits, -jnp.inf), axis=1
  )
  assert summary.noisy is not None and summary.noisy_logit is not None
  greedy = sampling.temperature <= 0
  entry = jnp.where(size == 1, summary.noisy, entry)
  entry = jnp.where(greedy, summary.entry[:, 0], entry)
  logit = jnp.where(size == 1, summary.noisy_logit, logit)
  logit = jnp.where(greedy, summary.logits[:, 0], logit)
  # Ties at the cut stay, so the list must show where they end.
  end = lax.dynamic_index_in_dim(scaled, listed - 1, 1, keepdims=False)
  ends = (end < cut[:, 0]) | (listed >= vocab)
  return entry, logit, (size == 1) | ((size <= listed) & ends)


def score(
  hidden: Array,
  weight: Array,
  *,
  k: int = 1,
  listed: Array | None = None,
  soft_cap: float | None = None,
  token_ids: Array | None = None,
  sampling: sampling_lib.Sampling | None = None,
  position: Array | None = None,
  implementation: str | None = None,
  blocks: _blocks.ScoreBlocks | None = None,
) -> Scored:
  """The best logits of each row, their log-sum-exp, and the drawn token.

  The logits [R, V] are made tile by tile and never written. Noise is a function
  of the token id, so it is made with each tile: the token is the one that
  `sampling.draw` takes from all logits, wherever `exact` says so.

  Args:
    hidden: [R, E].
    weight: [V, E] of the same dtype. On TPU an E that is no multiple of 128
      costs a copy of the matrix a call; pad both with zeros beforehand.
    k: how many of the largest logits to return, 1 to V.
    listed: [] int32, how many of these to look for, 1 to k; the kernel's time
      grows with it, not with k. Past them `logits` are -inf. None for all.
    soft_cap: logits x become soft_cap * tanh(x / soft_cap).
    token_ids: [V] int32, the id of each row of a trimmed vocabulary's matrix;
      None where a row's number is its id.
    sampling: of R rows, to draw a token by.
    position: [R] int32, the absolute position that the token will take; with
      `sampling`.
    implementation: None for the best that the device it is compiled for has; or
      "xla", "mosaic_tpu". See `LIMITS`.
    blocks: sizes of a step; None for measured ones or a guess.

  Returns:
    `Scored`.

  Raises:
    ValueError: for a k out of range, `sampling` without `position`, and a named
      implementation that can't do this.

  Example:
    >>> import jax.numpy as jnp
    >>> weight = jnp.array([[1., 0.], [2., 5.], [3., 4.]])
    >>> scored = score(jnp.eye(2), weight, k=2)
    >>> scored.ids.tolist(), scored.logits.tolist()
    ([[2, 1], [1, 2]], [[3.0, 2.0], [5.0, 4.0]])

  Source: Milakov and Gimelshein 2018, "Online normalizer calculation for
  softmax"; see `sampling.draw` for the noise.
  """
  rows, width = hidden.shape
  vocab = weight.shape[0]
  chex.assert_shape(weight, (None, width))
  if not 1 <= k <= vocab:
    raise ValueError(f"k is {k}; it must be 1 to the {vocab} rows of weight")
  if (sampling is None) != (position is None):
    raise ValueError(
      "give sampling and position both, or neither to draw no token"
    )
  if token_ids is not None:
    chex.assert_shape(token_ids, (vocab,))
  noise = None
  if sampling is not None:
    assert position is not None
    chex.assert_shape(position, (rows,))
    hot = sampling.temperature > 0
    noise = _reference.Noise(
      sampling.key,
      position,
      jnp.where(hot, sampling.temperature, jnp.float32(1.0)),
      token_ids,
    )
  summary = _summary(
    (hidden, weight, noise, listed),
    {"k": k, "soft_cap": soft_cap},
    implementation,
    blocks,
  )

  def ids_of(entry):
    return entry if token_ids is None else token_ids[entry]

  ids = ids_of(summary.entry)
  token = logprob = exact = None
  if noise is not None:
    assert sampling is not None
    if listed is None:
      listed = jnp.int32(k)
    entry, logit, exact = _token(summary, noise, sampling, ids, listed, vocab)
    token, logprob = ids_of(entry), logit - summary.lse
  return Scored(ids, summary.logits, summary.lse, token, logprob, exact)


def _summary(
  arrays: tuple[Array, Array, _reference.Noise | None, Array | None],
  settings: dict[str, Any],
  implementation: str | None,
  blocks: _blocks.ScoreBlocks | None,
) -> _reference.Summary:
  (rows, width), dtype = arrays[0].shape, arrays[0].dtype.name
  problem = _blocks.ScoreProblem(width=width, rows=rows, dtype=dtype)
  plain: Callable[..., _reference.Summary] = functools.partial(
    _xla.summarize,
    blocks=_blocks.choose_score(problem, "cpu", blocks),
    **settings,
  )
  named = None
  if implementation is not None:
    named = _limits.limits("score", implementation)
    _limits.check(named, dtype=dtype)
  if implementation == "xla":
    return plain(*arrays)
  kernel = jax.custom_batching.sequential_vmap(
    functools.partial(
      _TPU, blocks=_blocks.choose_score(problem, "tpu", blocks), **settings
    )
  )
  if named is not None:
    return _named.only_there(named, kernel)(*arrays)
  entry = _limits.limits("score", "mosaic_tpu")
  if (
    _limits.refusals(entry, dtype=dtype)
    or not _prefix_attention.kernels_wanted()
  ):
    return plain(*arrays)
  return lax.platform_dependent(*arrays, default=plain, tpu=kernel)
