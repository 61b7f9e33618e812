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


def _median_seconds(calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
  """Medians of calls that take turns."""
  times: dict[str, list[float]] = {name: [] for name in calls}
  for call in calls.values():
    jax.block_until_ready(call())
  for _ in range(9):
    for name, call in calls.items():
      began = time.perf_counter()
      jax.block_until_ready(call())
      times[name].append(time.perf_counter() - began)
  return {name: statistics.median(each) for name, each in times.items()}


@jax.jit
def _products(x: Array, weights: Sequence[Any]) -> Array:
  total = jnp.zeros((), jnp.float32)
  for weight in weights:
    total = total + models.linear(x, weight, out_dtype=jnp.float32).sum()
  return total


_COLD_BYTES = 64 * 2**20
"""Weights that a measurement reads in turn: more than a cache holds."""


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
  count = min(64, max(1, _COLD_BYTES // size))
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
