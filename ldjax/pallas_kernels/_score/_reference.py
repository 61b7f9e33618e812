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
  """[R, k] float32, descending; of equal ones the lower entry is first."""
  entry: Array
  """[R, k] int32, rows of the matrix."""
  lse: Array
  """[R] float32, log-sum-exp of all logits."""
  noisy: Array | None
  """[R] int32, the entry with the largest logit / temperature + noise."""


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


def summarize(
  hidden: Array,
  weight: Array,
  noise: Noise | None,
  *,
  k: int,
  soft_cap: float | None,
) -> Summary:
  """See `ldjax.pallas_kernels.score`."""
  logits = logits_of(hidden, weight, soft_cap)
  best, entry = lax.top_k(logits, k)
  noisy = None
  if noise is not None:
    ids = noise.token_ids
    if ids is None:
      ids = jnp.arange(weight.shape[0], dtype=jnp.int32)
    ids = jnp.broadcast_to(ids[None], logits.shape)
    drawn = sampling_lib.gumbel_at(noise.key, noise.position, ids)
    perturbed = logits / noise.temperature[:, None] + drawn
    noisy = jnp.argmax(perturbed, axis=-1).astype(jnp.int32)
  return Summary(
    best, entry.astype(jnp.int32), jax.nn.logsumexp(logits, axis=-1), noisy
  )
