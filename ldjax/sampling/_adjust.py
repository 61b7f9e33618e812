"""What a sequence's own past does to its next token's logits."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from ldjax import typing
from ldjax.sampling import _params

Array = typing.Array


class History(NamedTuple):
  """The tokens that stand before the one that is drawn."""

  tokens: Array
  """[B, S] int32; anything past `length`."""
  prompt_length: Array
  """[B] int32, how many of them are the prompt."""
  length: Array
  """[B] int32, how many there are: the position of the next token."""


def _penalize(
  logits: Array, sampling: _params.Sampling, history: History
) -> Array:
  batch, vocab = logits.shape
  row = jnp.arange(batch, dtype=jnp.int32)[:, None]
  column = jnp.arange(history.tokens.shape[1], dtype=jnp.int32)[None]
  there = column < history.length[:, None]
  emitted = there & (column >= history.prompt_length[:, None])
  # An id past the vocabulary is dropped.
  seen = jnp.zeros((batch, vocab), bool)
  seen = seen.at[row, jnp.where(there, history.tokens, vocab)].set(
    True, mode="drop"
  )
  count = jnp.zeros((batch, vocab), jnp.int32)
  count = count.at[row, jnp.where(emitted, history.tokens, vocab)].add(
    1, mode="drop"
  )
  repetition = sampling.repetition_penalty[:, None]
  logits = jnp.where(
    seen,
    jnp.where(logits > 0, logits / repetition, logits * repetition),
    logits,
  )
  times = count.astype(jnp.float32)
  return (
    logits
    - times * sampling.frequency_penalty[:, None]
    - jnp.where(count > 0, sampling.presence_penalty[:, None], 0.0)
  )


def adjust(
  logits: Array,
  sampling: _params.Sampling,
  history: History,
  stop_ids: Array,
) -> Array:
  """Applies penalties, then bans, to the logits of the next token.

  The repetition penalty looks at prompt and emitted tokens: a positive logit
  is divided by it, a negative one multiplied. Frequency and presence
  penalties look at emitted tokens: they take their value off the logit once
  for each occurrence, and once in all. Banned ids can't be drawn, nor stop
  ids before `min_new_tokens` were emitted. Greedy draws are affected too.

  Args:
    logits: [B, V] float32.
    sampling: of B rows.
    history: of B rows; at a tree's node, with the node's own path.
    stop_ids: [B, X] int32, -1 where there is none.

  Returns:
    [B, V] float32, -inf where a token is banned.

  Example:
    >>> import jax.numpy as jnp
    >>> from ldjax import sampling
    >>> history = sampling.History(
    ...   jnp.array([[0, 1, 1, 9]]), jnp.array([1]), jnp.array([3]))
    >>> adjust(
    ...   jnp.array([[4., 4., 4.]]),
    ...   sampling.make_sampling(
    ...     1, repetition_penalty=2.0, frequency_penalty=0.25, banned_ids=[2]),
    ...   history, jnp.array([[-1]])).tolist()
    [[2.0, 1.5, -inf]]

  Source: Keskar et al. 2019 (CTRL) for the repetition penalty; OpenAI's API
  reference for the other two.
  """
  emitted = history.length - history.prompt_length
  early = emitted < sampling.min_new_tokens
  banned = jnp.concatenate(
    [sampling.banned_ids, jnp.where(early[:, None], stop_ids, -1)], axis=1
  )
  penalized = jnp.any(
    (sampling.repetition_penalty != 1.0)
    | (sampling.presence_penalty != 0.0)
    | (sampling.frequency_penalty != 0.0)
  )

  def apply(logits):
    logits = lax.cond(
      penalized,
      lambda x: _penalize(x, sampling, history),
      lambda x: x,
      logits,
    )
    row = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    ids = jnp.where(banned < 0, logits.shape[1], banned)
    return logits.at[row, ids].set(-jnp.inf, mode="drop")

  # One branch where nobody asks for anything, which is nearly always.
  return lax.cond(penalized | jnp.any(banned >= 0), apply, lambda x: x, logits)
