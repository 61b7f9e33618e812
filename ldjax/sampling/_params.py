"""How tokens are drawn, as arrays: settings never cause a compile."""

import math
import numbers
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

MAX_BANNED_IDS = 64
"""Banned ids a row can have; a capacity, so that the ids are data."""


@struct.dataclass(kw_only=True)
class Sampling:
  """Settings and keys of B rows."""

  temperature: Array
  """[B] float32; 0 is greedy."""
  top_k: Array
  """[B] int32; 0 keeps every token."""
  top_p: Array
  """[B] float32 in (0, 1]; 1 keeps every token."""
  min_p: Array
  """[B] float32 in [0, 1]; 0 keeps every token."""
  repetition_penalty: Array
  """[B] float32 above 0; 1 changes nothing."""
  presence_penalty: Array
  """[B] float32; 0 changes nothing."""
  frequency_penalty: Array
  """[B] float32; 0 changes nothing."""
  banned_ids: Array
  """[B, MAX_BANNED_IDS] int32; -1 where unused."""
  min_new_tokens: Array
  """[B] int32, tokens to emit before a stop id can be drawn."""
  logprobs: Array
  """[B] bool, whether a round tells the log-probability of what it drew."""
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


def _temperature(name: str, value: float | None) -> float:
  value = 0.0 if value is None else float(value)
  if not (math.isfinite(value) and value >= 0):
    raise ValueError(
      f"{name} is {value}; it must be finite and at least 0 (0 is greedy)"
    )
  # So small that only ties remain random; smaller still, and logits divided by
  # it would overflow to inf and tie.
  return max(value, 1e-30) if value else 0.0


def _top_k(name: str, value: int | None) -> int:
  value = 0 if value is None else value
  if not (value >= 0 and value == value // 1):
    raise ValueError(
      f"{name} is {value}; it must be a whole number of at least 1, or 0 or"
      " None to keep every token"
    )
  return min(int(value), 2**31 - 1)


def _top_p(name: str, value: float | None) -> float:
  value = 1.0 if value is None else float(value)
  if not 0 < value <= 1:
    raise ValueError(
      f"{name} is {value}; it must be above 0 and at most 1 (1 or None keeps"
      " every token)"
    )
  return value


def _min_p(name: str, value: float | None) -> float:
  value = 0.0 if value is None else float(value)
  if not 0 <= value <= 1:
    raise ValueError(
      f"{name} is {value}; it must be from 0 to 1 (0 or None keeps every token)"
    )
  return value


def _repetition(name: str, value: float | None) -> float:
  value = 1.0 if value is None else float(value)
  if not 1e-3 <= value <= 1e3:
    raise ValueError(
      f"{name} is {value}; it must be from 0.001 to 1000 (1 or None changes"
      " nothing, above 1 discourages what was there)"
    )
  return value


def _penalty(name: str, value: float | None) -> float:
  value = 0.0 if value is None else float(value)
  if not abs(value) <= 1e3:
    raise ValueError(
      f"{name} is {value}; it must be from -1000 to 1000 (0 or None changes"
      " nothing, above 0 discourages what was emitted)"
    )
  return value


def _min_new_tokens(name: str, value: int | None) -> int:
  value = 0 if value is None else value
  if not (value >= 0 and value == value // 1):
    raise ValueError(
      f"{name} is {value}; it must be a whole number of at least 0"
    )
  return min(int(value), 2**31 - 1)


def _flag(name: str, value: bool | None) -> bool:
  if value not in (True, False, None):
    raise ValueError(f"{name} is {value!r}; it must be True or False")
  return bool(value)


# What each setting must be, and how a row of it is held.
_SETTINGS: dict[str, tuple[Any, Any]] = {
  "temperature": (_temperature, np.float32),
  "top_k": (_top_k, np.int32),
  "top_p": (_top_p, np.float32),
  "min_p": (_min_p, np.float32),
  "repetition_penalty": (_repetition, np.float32),
  "presence_penalty": (_penalty, np.float32),
  "frequency_penalty": (_penalty, np.float32),
  "min_new_tokens": (_min_new_tokens, np.int32),
  "logprobs": (_flag, np.bool_),
}


def id_row(ids: Sequence[int], capacity: int, kind: str) -> np.ndarray:
  """Lays out a set of token ids in a row of fixed size.

  Args:
    ids: token ids, in any order.
    capacity: how many fit.
    kind: what to call one in messages.

  Returns:
    [capacity] int32, distinct ids ascending, then -1.

  Raises:
    ValueError: for a negative id or more ids than fit.

  Example:
    >>> id_row([7, 2, 7], 4, "stop id").tolist()
    [2, 7, -1, -1]
  """
  distinct = sorted({int(token) for token in ids})
  if distinct and distinct[0] < 0:
    raise ValueError(f"{kind} {distinct[0]} is negative")
  if len(distinct) > capacity:
    raise ValueError(
      f"{len(distinct)} {kind}s; a row can have at most {capacity}"
    )
  row = np.full((capacity,), -1, np.int32)
  row[: len(distinct)] = distinct
  return row


def _banned_row(ids: Sequence[int]) -> np.ndarray:
  return id_row(ids, MAX_BANNED_IDS, "banned id")


def _banned(value: Sequence[Any], batch: int) -> Any:
  entries = list(value)
  if entries and not isinstance(entries[0], numbers.Integral):
    rows = [_banned_row(ids) for ids in _spread("banned_ids", entries, batch)]
  else:
    rows = [_banned_row(entries)] * batch
  return np.array(rows, np.int32).reshape(batch, MAX_BANNED_IDS)


def host_sampling(batch: int, *, sample: int = 0, **settings: Any) -> Sampling:
  """`make_sampling` with leaves of NumPy, so that no device is asked.

  Args:
    batch: B.
    sample: the index among several samples of one prompt.
    **settings: see `make_sampling`.
  """
  seeds = _spread("seed", settings.pop("seed", 0), batch)
  banned = settings.pop("banned_ids", ())
  fields: dict[str, Any] = {
    name: np.array(
      [
        parse(name, value)
        for value in _spread(name, settings.pop(name, None), batch)
      ],
      dtype,
    )
    for name, (parse, dtype) in _SETTINGS.items()
  }
  if settings:
    raise TypeError(f"no setting is called {next(iter(settings))!r}")
  return Sampling(
    **fields,
    banned_ids=_banned(banned, batch),
    key=_noise.sequence_keys(seeds, sample),
  )


def make_sampling(
  batch: int,
  *,
  temperature: float | Sequence[float | None] | None = None,
  top_k: int | Sequence[int | None] | None = None,
  top_p: float | Sequence[float | None] | None = None,
  min_p: float | Sequence[float | None] | None = None,
  repetition_penalty: float | Sequence[float | None] | None = None,
  presence_penalty: float | Sequence[float | None] | None = None,
  frequency_penalty: float | Sequence[float | None] | None = None,
  banned_ids: Sequence[int] | Sequence[Sequence[int]] = (),
  min_new_tokens: int | Sequence[int | None] | None = None,
  logprobs: bool | Sequence[bool] = False,
  seed: int | Array | Sequence[int | Array] = 0,
  sample: int = 0,
) -> Sampling:
  """Checks settings and lays them out for B rows.

  Args:
    batch: B.
    temperature: 0 or None is greedy.
    top_k: how many of the most likely tokens may be drawn; 0 or None: all.
    top_p: the share of probability to draw from; 1 or None: all.
    min_p: how likely a token must be, as a share of the likeliest one's
      probability; 0 or None: any.
    repetition_penalty: divides (or, below 0, multiplies) the logits of tokens
      of the prompt or the text so far; 1 or None: none.
    presence_penalty: comes off the logits of tokens emitted so far.
    frequency_penalty: comes off once for each time they were emitted.
    banned_ids: token ids that are never drawn, at most `MAX_BANNED_IDS`.
    min_new_tokens: tokens to emit before a stop id can be drawn.
    logprobs: whether `Round.logprobs` is wanted.
    seed: an integer or `jax.random.key`; one value means the same for a
      prompt in whatever row it stands.
    sample: the index among several samples of one prompt.

  Each of them, `sample` aside, may be one value for all rows or a list of one
  a row.

  Returns:
    `Sampling` over B rows.

  Raises:
    ValueError: names the setting, its value and its limits.

  Example:
    >>> make_sampling(2, temperature=0.7, seed=[1, 2]).key.shape
    (2, 2)
  """
  return jax.tree.map(
    jnp.asarray,
    host_sampling(
      batch,
      sample=sample,
      temperature=temperature,
      top_k=top_k,
      top_p=top_p,
      min_p=min_p,
      repetition_penalty=repetition_penalty,
      presence_penalty=presence_penalty,
      frequency_penalty=frequency_penalty,
      banned_ids=banned_ids,
      min_new_tokens=min_new_tokens,
      logprobs=logprobs,
      seed=seed,
    ),
  )
