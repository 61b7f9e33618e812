"""Cuts on the logits as thresholds, found by bisection.

`k` and `p` are traced, so one compiled program serves every setting, and no
row is sorted. Bisecting over the floats' order-preserving integers makes the
result exact in 32 halvings.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from ldjax import typing

Array = typing.Array


def _ordered(x: Array) -> Array:
  """float32 -> int32 such that a < b iff ordered(a) < ordered(b)."""
  # A difference of integers, so that -0.0 and 0.0 are both 0: XLA drops the
  # `+ 0.0` of `x + 0.0`, and under jit the two zeros would be no tie.
  bits = lax.bitcast_convert_type(x, jnp.int32)
  return jnp.where(bits < 0, jnp.int32(-(2**31)) - bits, bits)


def _bisect(low: Array, high: Array, is_low: Callable[[Array], Array]) -> Array:
  """The largest c in [low, high) with is_low(c), given is_low(low)."""

  def halve(_, bounds):
    low, high = bounds
    middle = (low & high) + ((low ^ high) >> 1)
    below = is_low(middle) & (middle > low)
    return jnp.where(below, middle, low), jnp.where(below, high, middle)

  # Once high == low + 1, `middle == low`: high would collapse onto low, which
  # changes nothing for the result.
  low, _ = lax.fori_loop(0, 33, halve, (low, high))
  return low


def top_k_mask(logits: Array, k: Array) -> Array:
  """Marks the k largest logits of each row; ties with the k-th stay.

  Args:
    logits: [B, V] float32.
    k: [B] int32; below 1 or above V keeps the whole row.

  Returns:
    [B, V] bool.

  Example:
    >>> import jax.numpy as jnp
    >>> logits = jnp.array([[1., 3., 2., 2.]])
    >>> top_k_mask(logits, jnp.array([2])).tolist()
    [[False, True, True, True]]
  """
  vocab = logits.shape[-1]
  k = jnp.where((k < 1) | (k > vocab), vocab, k)
  value = _ordered(logits)

  def enough(cut):
    return jnp.sum(value >= cut[:, None], axis=-1, dtype=jnp.int32) >= k

  cut = _bisect(value.min(-1), value.max(-1) + 1, enough)
  return value >= cut[:, None]


def top_p_mask(logits: Array, p: Array) -> Array:
  """Marks the nucleus: tokens whose strictly larger ones sum to less than p.

  Args:
    logits: [B, V] float32; -inf marks tokens that are already cut.
    p: [B] float32; at or above 1 keeps the whole row.

  Returns:
    [B, V] bool, with at least the largest of each row.

  Example:
    >>> import jax.numpy as jnp
    >>> logits = jnp.log(jnp.array([[.5, .3, .2]]))
    >>> top_p_mask(logits, jnp.array([.6])).tolist()
    [[True, True, False]]

  Source: Holtzman et al. 2020, "The curious case of neural text
  degeneration".
  """
  weight = jnp.exp(logits - logits.max(-1, keepdims=True))
  budget = p * weight.sum(-1)
  value = _ordered(logits)

  def outside(cut):
    larger = jnp.where(value > cut[:, None], weight, 0.0).sum(-1)
    return larger >= budget

  lowest = value.min(-1) - 1
  cut = _bisect(lowest, value.max(-1), outside)
  # `cut` is the largest value that is outside, if any is.
  keep = value > jnp.where(outside(cut), cut, lowest)[:, None]
  return keep | (p >= 1.0)[:, None]


def min_p_mask(logits: Array, p: Array) -> Array:
  """Marks tokens at least `p` times as likely as the likeliest of their row.

  Args:
    logits: [B, V] float32; -inf marks tokens that are already cut.
    p: [B] float32; 0 keeps every token that is not cut, 1 the best alone.

  Returns:
    [B, V] bool.

  Example:
    >>> import jax.numpy as jnp
    >>> logits = jnp.log(jnp.array([[.6, .3, .1]]))
    >>> min_p_mask(logits, jnp.array([.4])).tolist()
    [[True, True, False]]

  Source: Nguyen et al. 2024, "Turning up the heat: min-p sampling".
  """
  cut = logits.max(-1) + jnp.log(p)
  return (logits >= cut[:, None]) & (logits > -jnp.inf)
