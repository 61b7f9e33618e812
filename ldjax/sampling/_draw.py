"""The draw: one token a position, greedy or by Gumbel-max."""

import jax.numpy as jnp
from jax import lax

from ldjax import typing
from ldjax.sampling import _noise, _params, _thresholds

Array = typing.Array


def warp(logits: Array, sampling: _params.Sampling) -> Array:
  """Applies temperature, top-k, top-p (of what top-k left), then min-p.

  Args:
    logits: [B, V] float32.
    sampling: of B rows; a temperature of 0 counts as 1.

  Returns:
    [B, V] float32, -inf where a token may not be drawn.

  Example:
    >>> import jax.numpy as jnp
    >>> from ldjax.sampling import make_sampling
    >>> warp(jnp.array([[1., 2., 4.]]),
    ...      make_sampling(1, temperature=2., top_k=2)).tolist()
    [[-inf, 1.0, 2.0]]
  """
  temperature = jnp.where(
    sampling.temperature > 0, sampling.temperature, jnp.float32(1.0)
  )
  logits = logits / temperature[:, None]

  def cut(mask_fn, setting, used):
    def apply(x):
      return jnp.where(mask_fn(x, setting), x, -jnp.inf)

    return lambda x: lax.cond(jnp.any(used), apply, lambda x: x, x)

  by_k = cut(_thresholds.top_k_mask, sampling.top_k, sampling.top_k > 0)
  by_p = cut(_thresholds.top_p_mask, sampling.top_p, sampling.top_p < 1.0)
  by_min = cut(_thresholds.min_p_mask, sampling.min_p, sampling.min_p > 0)
  return by_min(by_p(by_k(logits)))


def draw(logits: Array, sampling: _params.Sampling, position: Array) -> Array:
  """Draws the token that each row takes at `position`.

  The result is the maximum of warped logits plus noise; the noise is a
  function of (key, position, token id), so the same logits at the same
  position of the same sequence always give the same token, whoever asks.

  Args:
    logits: [B, V] float32, after `adjust` where penalties or bans apply.
    sampling: of B rows.
    position: [B] int32, the absolute position that the token will take.

  Returns:
    [B] int32.

  Example:
    >>> import jax.numpy as jnp
    >>> from ldjax.sampling import make_sampling
    >>> draw(jnp.array([[0., 2., 1.]]), make_sampling(1), jnp.array([5]))
    Array([1], dtype=int32)

  Source: Daliri, Musco, Suresh 2024, "Coupling without communication and
  drafter-invariant speculative decoding".
  """
  greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

  def sampled():
    noise = _noise.gumbel(sampling.key, position, logits.shape[-1])
    drawn = jnp.argmax(warp(logits, sampling) + noise, axis=-1)
    return jnp.where(sampling.temperature > 0, drawn.astype(jnp.int32), greedy)

  return lax.cond(jnp.any(sampling.temperature > 0), sampled, lambda: greedy)


ALL_LOGITS = 2**31 - 1
"""What `deciding` says where no list of the largest logits is enough."""


def deciding(sampling: _params.Sampling, vocab_size: int) -> Array:
  """How many of a row's largest logits decide its draw.

  Args:
    sampling: of B rows; `min_new_tokens` counts from here on.
    vocab_size: V.

  Returns:
    [B] int32: 1 where the largest logit, or the largest sum of a scaled logit
    and its noise over the whole vocabulary, is the token; k + 1 under a top-k
    (more where logits tie with the k-th); `ALL_LOGITS` for penalties, banned
    ids, a minimum of new tokens, top-p and min-p.

  Example:
    >>> from ldjax.sampling import make_sampling
    >>> deciding(make_sampling(
    ...   3, temperature=1., top_k=[None, 5, 5], top_p=[1., 1., .9]), 99
    ... ).tolist()
    [1, 6, 2147483647]
  """
  changed = (
    (sampling.repetition_penalty != 1)
    | (sampling.presence_penalty != 0)
    | (sampling.frequency_penalty != 0)
    | (sampling.min_new_tokens > 0)
    | jnp.any(sampling.banned_ids >= 0, axis=1)
  )
  hot = sampling.temperature > 0
  cut = hot & (sampling.top_k > 0) & (sampling.top_k < vocab_size)
  uncounted = hot & ((sampling.top_p < 1) | (sampling.min_p > 0))
  size = jnp.where(cut, sampling.top_k + 1, 1)
  return jnp.where(changed | uncounted, ALL_LOGITS, size).astype(jnp.int32)
