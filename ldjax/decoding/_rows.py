"""Rows come and go while the others run on."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ldjax import _base, typing
from ldjax import sampling as sampling_lib
from ldjax.decoding import _state

Array = typing.Array
DecodeState = _state.DecodeState
Status = _base.Status


def admit(
  state: DecodeState,
  row: Array,
  prompt: Array,
  prompt_length: Array,
  sampling: sampling_lib.Sampling,
  max_new_tokens: Array,
  stop_ids: Array,
) -> DecodeState:
  """Puts a prompt into a row that is free, to be read by `prefill`."""
  capacity = state.tokens.shape[1]
  width = min(prompt.shape[0], capacity)
  # A length that cannot be read ends the row at once, with nothing emitted.
  readable = (prompt_length >= 1) & (prompt_length <= width)
  prompt_length = jnp.where(readable, prompt_length, 0).astype(jnp.int32)
  # Not prompt_length + max_new_tokens, which can overflow.
  room = jnp.clip(max_new_tokens, 0, capacity - prompt_length)
  limit = prompt_length + jnp.where(readable, room, 0)
  at = jnp.arange(capacity, dtype=jnp.int32) < prompt_length
  tokens = jnp.zeros((capacity,), jnp.int32)
  tokens = jnp.where(at, tokens.at[:width].set(prompt[:width]), 0)
  status = jnp.where(
    limit > prompt_length, Status.PREFILLING, Status.LENGTH
  ).astype(jnp.int32)

  def put(field, value):
    return field.at[row].set(value)

  return dataclasses.replace(
    state,
    tokens=put(state.tokens, tokens),
    length=put(state.length, prompt_length),
    prompt_length=put(state.prompt_length, prompt_length),
    limit=put(state.limit, limit),
    stop_ids=put(state.stop_ids, stop_ids),
    sampling=jax.tree.map(put, state.sampling, sampling),
    status=put(state.status, status),
    finite=put(state.finite, True),
    needs_pages=put(state.needs_pages, False),
    rounds=put(state.rounds, 0),
  )


def preempt(
  draft: _base.DraftFn, state: DecodeState, mask: Array
) -> DecodeState:
  """Gives pages back; the rows will read all their known tokens again."""
  mask = mask & (
    (state.status == Status.RUNNING) | (state.status == Status.PREFILLING)
  )
  return dataclasses.replace(
    state,
    cache=state.cache.release(mask),
    draft=draft.release(state.draft, mask),
    status=jnp.where(mask, Status.PREFILLING, state.status),
    needs_pages=state.needs_pages & ~mask,
  )


def park(state: DecodeState, mask: Array) -> DecodeState:
  """Sets running rows aside and gives their pages back; see `resume`.

  What their pages hold must have been taken before (`PagedKVCache.take`). Their
  draft's state stays.

  Args:
    state: of B rows.
    mask: [B] bool; rows that do not run are left alone.
  """
  mask = mask & (state.status == Status.RUNNING)
  return dataclasses.replace(
    state,
    cache=state.cache.release(mask),
    status=jnp.where(mask, Status.PARKED, state.status),
    needs_pages=state.needs_pages & ~mask,
  )


def resume(
  state: DecodeState, row: Array, contents: Any, length: Array
) -> tuple[DecodeState, Array]:
  """Lets a parked row go on where it was.

  Args:
    state: of B rows.
    row: [] int32.
    contents: what `PagedKVCache.take` gave of it.
    length: [] int32, committed positions that it had.

  Returns:
    The state, and ok []; where not ok, pages were lacking and the row stays
    parked.
  """
  cache, ok = state.cache.put(row, contents, length)
  status = jnp.where(ok, Status.RUNNING, state.status[row]).astype(jnp.int32)
  return dataclasses.replace(
    state, cache=cache, status=state.status.at[row].set(status)
  ), ok


def release(
  draft: _base.DraftFn, state: DecodeState, mask: Array
) -> DecodeState:
  """Frees rows, whatever they were doing."""
  return dataclasses.replace(
    state,
    cache=state.cache.release(mask),
    draft=draft.release(state.draft, mask),
    length=jnp.where(mask, 0, state.length),
    prompt_length=jnp.where(mask, 0, state.prompt_length),
    limit=jnp.where(mask, 0, state.limit),
    status=jnp.where(mask, Status.FREE, state.status),
    finite=state.finite | mask,
    needs_pages=state.needs_pages & ~mask,
  )


def empty(
  draft: _base.DraftFn,
  init_cache: Callable[[int], Any],
  max_len: int,
  params: _base.DecoderParams,
  batch: int,
  other_cache: Callable[[int], Any] | None = None,
) -> DecodeState:
  """A state without sequences; `other_cache` stands for `init_cache`."""
  return DecodeState(
    cache=(other_cache or init_cache)(batch),
    draft=draft.init(params.draft, batch),
    tokens=jnp.zeros((batch, max_len), jnp.int32),
    length=jnp.zeros((batch,), jnp.int32),
    prompt_length=jnp.zeros((batch,), jnp.int32),
    limit=jnp.zeros((batch,), jnp.int32),
    stop_ids=jnp.full((batch, _state.MAX_STOP_IDS), -1, jnp.int32),
    sampling=sampling_lib.make_sampling(batch),
    status=jnp.full((batch,), Status.FREE, jnp.int32),
    finite=jnp.ones((batch,), bool),
    needs_pages=jnp.zeros((batch,), bool),
    rounds=jnp.zeros((batch,), jnp.int32),
  )
