"""The largest logits and where they stand."""

import jax.numpy as jnp
from jax import lax

from ldjax import typing

Array = typing.Array

# A sort of a vocabulary goes over it some hundred times.
_MOST_ROUNDS = 16


def largest(logits: Array, k: int) -> tuple[Array, Array]:
  """`lax.top_k`, in another form where it is compiled for a TPU.

  There `top_k` sorts whole rows, however few are wanted; a few are found by as
  many maxima.

  Args:
    logits: [..., W] float32.
    k: how many, at most W.

  Returns:
    Values and places [..., k], descending; of equal ones the lower place.

  Example:
    >>> import jax.numpy as jnp
    >>> [x.tolist() for x in largest(jnp.array([1., 3., 2., 3.]), 3)]
    [[3.0, 3.0, 2.0], [1, 3, 2]]
  """

  def sort(logits):
    return tuple(lax.top_k(logits, k))

  if k > _MOST_ROUNDS:
    return sort(logits)
  return lax.platform_dependent(
    logits, default=sort, tpu=lambda logits: rounds(logits, k)
  )


def rounds(logits: Array, k: int) -> tuple[Array, Array]:
  """`lax.top_k` by k maxima."""
  column = jnp.arange(logits.shape[-1], dtype=jnp.int32)
  column = jnp.broadcast_to(column, logits.shape)
  taken = jnp.zeros(logits.shape, bool)
  values, places = [], []
  for _ in range(k):
    left = jnp.where(taken, -jnp.inf, logits)
    value = jnp.max(left, axis=-1, keepdims=True)
    # Where only -inf is left, what was taken ties with it.
    place = jnp.where(
      value == -jnp.inf,
      jnp.argmin(taken, axis=-1, keepdims=True),
      jnp.argmax(left, axis=-1, keepdims=True),
    ).astype(jnp.int32)
    taken = taken | (column == place)
    values.append(value)
    places.append(place)
  return jnp.concatenate(values, axis=-1), jnp.concatenate(places, axis=-1)
