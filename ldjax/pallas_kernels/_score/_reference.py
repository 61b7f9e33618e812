"""Scoring: the definition, in plain jnp, with all logits."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ldjax import sampling as sampling_lib
from ldjax import typing

Array = typing.Array


class Noise(NamedTuple):
  """What noise and temperature depend on."""

  key: Array
  """[R, 2] uint32."""
  position: Array
  """[R] int32."""
  temperature: Array
  """[R] float32, above 0."""
  token_ids: Array | None
  """[W] int32, None where entries are ids."""


class Summary(NamedTuple):
  """What a pass over the output matrix leaves."""

  logits: Array
  """[R, k] float32, descending; of equal ones the lower entry is first. From
  the `listed`-th on, -inf."""
  entry: Array
  """[R, k] int32, rows of the matrix; any where `logits` is -inf."""
  lse: Array
  """[R] float32, log-sum-exp of all logits; NaN or -inf where one is NaN or
  +inf or all are -inf."""
  noisy: Array | None
  """[R] int32, the entry with the largest logit / temperature + noise."""
  noisy_logit: Array | None
  """[R] float32, its logit."""


def logits_of(hidden: Array, weight: Array, soft_cap: float | None) -> Array:
  """[R, n] float32 of [R, E] and [n, E]."""
  precision = (
    lax.Precision.HIGHEST
    if hidden.dtype == jnp.float32
    else lax.Precision.DEFAULT
  )
  logits = lax.dot_general(
    hidden,
    weight,
    (((1,), (1,)), ((), ())),
    precision=precision,
    preferred_element_type=jnp.float32,
  )
  return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)


def shorten(logits: Array, listed: Array | None) -> Array:
  """Logits [R, k] with -inf from the `listed`-th on."""
  if listed is None:
    return logits
  place = jnp.arange(logits.shape[1], dtype=jnp.int32)
  return jnp.where((place < listed)[None], logits, -jnp.inf)


def summarize(
  hidden: Array,
  weight: Array,
  noise: Noise | None,
  listed: Array | None = None,
  *,
  k: int,
  soft_cap: float | None,
) -> Summary:
  """See `ldjax.pallas_kernels.score`."""
  logits = logits_of(hidden, weight, soft_cap)
  best, entry = lax.top_k(logits, k)
  noisy = noisy_logit = None
  if noise is not None:
    ids = noise.token_ids
    if ids is None:
      ids = jnp.arange(weight.shape[0], dtype=jnp.int32)
    ids = jnp.broadcast_to(ids[None], logits.shape)
    drawn = sampling_lib.gumbel_at(noise.key, noise.position, ids)
    perturbed = logits / noise.temperature[:, None] + drawn
    noisy = jnp.argmax(perturbed, axis=-1).astype(jnp.int32)
    noisy_logit = jnp.take_along_axis(logits, noisy[:, None], axis=1)[:, 0]
  return Summary(
    shorten(best, listed),
    entry.astype(jnp.int32),
    jax.nn.logsumexp(logits, axis=-1),
    noisy,
    noisy_logit,
  )
