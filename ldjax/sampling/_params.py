"""How tokens are drawn, as arrays: settings never cause a compile."""

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ldjax import typing
from ldjax.sampling import _noise

Array = typing.Array
_T = TypeVar("_T")


@struct.dataclass(kw_only=True)
class Sampling:
  """Settings and keys of B rows."""

  temperature: Array
  """[B] float32; 0 is greedy."""
  top_k: Array
  """[B] int32; 0 keeps every token."""
  top_p: Array
  """[B] float32 in (0, 1]; 1 keeps every token."""
  key: Array
  """[B, 2] uint32, see `sequence_key`."""


def _spread(name: str, value: _T | Sequence[_T], batch: int) -> list[_T]:
  if isinstance(value, jax.Array | np.ndarray) and value.ndim:
    value = list(value)
  if isinstance(value, list | tuple):
    if len(value) != batch:
      raise ValueError(
        f"{name} has {len(value)} entries for {batch} rows; give one value"
        " for all rows or one for each"
      )
    return list(value)
  return [value] * batch  # type: ignore[list-item]


def _temperature(value: float | None) -> float:
  value = 0.0 if value is None else float(value)
  if not (math.isfinite(value) and value >= 0):
    raise ValueError(
      f"temperature is {value}; it must be finite and at least 0 (0 is greedy)"
    )
  # So small that only ties remain random; smaller still, and logits divided by
  # it would overflow to inf and tie.
  return max(value, 1e-30) if value else 0.0


def _top_k(value: int | None) -> int:
  value = 0 if value is None else value
  if not (value >= 0 and value == value // 1):
    raise ValueError(
      f"top_k is {value}; it must be a whole number of at least 1, or 0 or"
      " None to keep every token"
    )
  return min(int(value), 2**31 - 1)


def _top_p(value: float | None) -> float:
  value = 1.0 if value is None else float(value)
  if not 0 < value <= 1:
    raise ValueError(
      f"top_p is {value}; it must be above 0 and at most 1 (1 or None keeps"
      " every token)"
    )
  return value


def make_sampling(
  batch: int,
  *,
  temperature: float | Sequence[float | None] | None = None,
  top_k: int | Sequence[int | None] | None = None,
  top_p: float | Sequence[float | None] | None = None,
  seed: int | Array | Sequence[int | Array] = 0,
) -> Sampling:
  """Checks settings and lays them out for B rows.

  Args:
    batch: B.
    temperature: 0 or None is greedy.
    top_k: how many of the most likely tokens may be drawn; 0 or None: all.
    top_p: the share of probability to draw from; 1 or None: all.
    seed: an integer or `jax.random.key`; one value means the same for a
      prompt in whatever row it stands.

  Each of them may be one value for all rows or a list of one a row.

  Returns:
    `Sampling` over B rows.

  Raises:
    ValueError: names the setting, its value and its limits.

  Example:
    >>> make_sampling(2, temperature=0.7, seed=[1, 2]).key.shape
    (2, 2)
  """
  temperatures = [
    _temperature(x) for x in _spread("temperature", temperature, batch)
  ]
  top_ks = [_top_k(x) for x in _spread("top_k", top_k, batch)]
  top_ps = [_top_p(x) for x in _spread("top_p", top_p, batch)]
  seeds: Any = _spread("seed", seed, batch)
  return Sampling(
    temperature=jnp.asarray(np.array(temperatures, np.float32)),
    top_k=jnp.asarray(np.array(top_ks, np.int32)),
    top_p=jnp.asarray(np.array(top_ps, np.float32)),
    key=_noise.sequence_keys(seeds),
  )
