"""Which products this device computes faster in fewer bits."""

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ldjax import models, typing
from ldjax.optimize import _matrices

Array = typing.Array

_GAIN = 1.05
"""How much faster a product must be in fewer bits to be worth it."""


_HOPELESS = 3.0
"""How much slower than the fastest a product is that is not timed again."""


def _median_seconds(calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
  """Medians of calls that take turns; of those far behind one call each.

  The first call is the one that others are compared with.
  """

  def timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - began

  for call in calls.values():
    jax.block_until_ready(call())
  first = {name: timed(call) for name, call in calls.items()}
  least = min(first.values())
  times = {
    name: [seconds]
    for name, seconds in first.items()
    if seconds <= _HOPELESS * least
  }
  for _ in range(14):
    for name, each in times.items():
      each.append(timed(calls[name]))
  return {**first, **{n: statistics.median(each) for n, each in times.items()}}


@jax.jit
def _products(x: Array, weights: Sequence[Any]) -> Array:
  total = jnp.zeros((), jnp.float32)
  for weight in weights:
    total = total + models.linear(x, weight, out_dtype=jnp.float32).sum()
  return total


_COLD_BYTES = 64 * 2**20
"""Weights that a measurement reads in turn, more than a cache holds; fewer
where that would be more than 16 products."""


def product_seconds(
  shape: tuple[int, int], dtype: Any, rows: int, precisions: Sequence[str]
) -> dict[str, float]:
  """Seconds of a product on this device, in each precision.

  Args:
    shape: [out, in] of the weight.
    dtype: of the model.
    rows: that are multiplied at once.
    precisions: of `models.PRECISIONS`.

  Returns:
    By precision; the one of the model's dtype as "same".
  """
  size = shape[0] * shape[1] * jnp.dtype(dtype).itemsize
  count = min(16, max(1, _COLD_BYTES // size))
  keys = jax.random.split(jax.random.key(0), count)
  exact = [jax.random.normal(key, shape, dtype) for key in keys]
  x = jax.random.normal(jax.random.key(1), (rows, shape[1]), dtype)
  calls = {"same": functools.partial(_products, x, exact)}
  for precision in precisions:
    small = [models.narrow(weight, precision) for weight in exact]
    calls[precision] = functools.partial(_products, x, small)
  found = _median_seconds(calls)
  return {name: seconds / count for name, seconds in found.items()}


def what_gains(
  params: Any,
  config: models.TransformerConfig,
  rows: Sequence[int],
  precisions: Sequence[str] = models.PRECISIONS,
) -> dict[str, dict[str, Any]]:
  """The matrices that this device multiplies faster in fewer bits.

  Args:
    params: of a target.
    config: of it.
    rows: numbers of rows that steps will have, batch times nodes.
    precisions: to try.

  Returns:
    By full name: `precision`, and `gain`, seconds saved a step over the
    numbers of rows; matrices that nothing is faster for are left out.
  """
  dtype = params["embed_tokens"]["weight"].dtype
  by_shape: dict[tuple[int, int], tuple[str, float] | None] = {}
  found = {}
  for group in _matrices.groups(config):
    for name, weight in _matrices.matrices(params, group).items():
      shape = tuple(weight.shape)
      if shape not in by_shape:
        by_shape[shape] = _best(shape, dtype, rows, precisions)
      best = by_shape[shape]
      if best is not None:
        found[name] = {"precision": best[0], "gain": best[1]}
  return found


def _best(
  shape: tuple[int, int],
  dtype: Any,
  rows: Sequence[int],
  precisions: Sequence[str],
) -> tuple[str, float] | None:
  each = [product_seconds(shape, dtype, count, precisions) for count in rows]
  total = {name: sum(one[name] for one in each) for name in each[0]}
  best = min(precisions, key=total.__getitem__, default=None)
  if best is None or total["same"] < _GAIN * total[best]:
    return None
  return best, (total["same"] - total[best]) / len(rows)
