"""Many prompts decoded together, with the target's features of every token."""

import functools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ldjax import decoding, sampling, typing

Array = typing.Array

_STEPS = 8
"""Rounds between two looks at which rows have ended."""
_CHUNK = 16
"""Prompts are read in whole multiples of this many tokens."""


class Job(NamedTuple):
  """One prompt to go on from."""

  name: int
  """What the caller knows it by."""
  prompt: list[int]
  """Token ids."""
  settings: dict[str, Any]
  """Of the draw, see `sampling.make_sampling`."""


class Sequence(NamedTuple):
  """A text and what the target thought of it."""

  name: int
  """Of its job."""
  tokens: np.ndarray
  """[S] int32, prompt and answer."""
  start: int
  """Where the answer begins."""
  features: np.ndarray
  """[S - 1, X] float16: of every token but the last, which was never read."""


def recorder(max_len: int, feature_size: int) -> decoding.DraftFn:
  """A draft that proposes nothing and keeps every feature.

  Its state is [B, S, X] float16: entry (b, s) is the target's feature of
  position s of row b, once that is committed.

  Args:
    max_len: S.
    feature_size: X.
  """
  return _recorder(max_len, feature_size)


@functools.lru_cache(maxsize=8)
def _recorder(max_len: int, feature_size: int) -> decoding.DraftFn:
  plain = decoding.root_only()

  def init(draft_params, batch):
    del draft_params
    return jnp.zeros((batch, max_len, feature_size), jnp.float16)

  def observe(draft_params, draft_state, observation):
    del draft_params
    column = jnp.arange(observation.positions.shape[1], dtype=jnp.int32)
    place = jnp.where(
      column[None] < observation.count[:, None], observation.positions, max_len
    )
    return draft_state.at[observation.rows[:, None], place].set(
      observation.features.astype(jnp.float16), mode="drop"
    )

  return decoding.DraftFn(
    init, plain.propose, observe, lambda state, mask: state, 1, 0
  )


class _Compiled(NamedTuple):
  empty: Any
  admit: Any
  prefill: Any
  steps: Any
  release: Any


@functools.lru_cache(maxsize=8)
def _compiled(decoder: decoding.Decoder) -> _Compiled:
  def steps(params, state):
    return decoding.trace(decoder, params, state, _STEPS)[0]

  return _Compiled(
    jax.jit(decoder.empty, static_argnums=1),
    jax.jit(decoder.admit, donate_argnums=0),
    jax.jit(decoder.prefill, static_argnums=3, donate_argnums=1),
    jax.jit(steps, donate_argnums=1),
    jax.jit(decoder.release, donate_argnums=0),
  )


def rollout(
  target: decoding.TargetFn,
  target_params: Any,
  init_cache: Callable[[int], Any],
  jobs: Iterator[Job],
  *,
  max_len: int,
  feature_size: int,
  max_new_tokens: int,
  stop_ids: tuple[int, ...],
  batch: int = 32,
) -> Iterator[Sequence]:
  """Decodes jobs in rows that are filled again as they fall free.

  What a job gives depends on its prompt and settings alone, not on the batch
  nor on what ran beside it.

  Args:
    target: the model.
    target_params: its weights.
    init_cache: batch -> empty cache of `max_len` positions.
    jobs: taken one at a time, when a row is free.
    max_len: S, tokens of a row at most.
    feature_size: X.
    max_new_tokens: tokens to emit for a job at most.
    stop_ids: that end a text; the one that did is its last token.
    batch: B, rows that run together.

  Yields:
    `Sequence`s in the order in which they end. Texts whose logits were not
    finite are left out.

  Raises:
    ValueError: for a prompt that is empty or leaves no room for an answer.
  """
  draft = recorder(max_len, feature_size)
  decoder = decoding.speculative(target, draft, init_cache, max_len=max_len)
  fns = _compiled(decoder)
  params = decoding.DecoderParams(target_params)
  state = fns.empty(params, batch)
  stop = decoding.stop_ids_row(stop_ids)
  free = deque(range(batch))
  names: dict[int, int] = {}
  while True:
    while free and (job := next(jobs, None)) is not None:
      row, length = free.popleft(), len(job.prompt)
      if not 1 <= length < max_len:
        raise ValueError(
          f"prompt {job.name} is {length} tokens long; it needs 1 to"
          f" {max_len - 1}"
        )
      prompt = np.zeros((max_len,), np.int32)
      prompt[:length] = job.prompt
      drawn = sampling.host_sampling(1, **job.settings)
      state = fns.admit(
        state,
        np.int32(row),
        prompt,
        np.int32(length),
        jax.tree.map(lambda x: x[0], drawn),
        np.int32(max_new_tokens),
        stop,
      )
      chunk = min(-(-length // _CHUNK) * _CHUNK, max_len)
      rows = jnp.full((1,), row, jnp.int32)
      state = fns.prefill(params, state, rows, chunk)[0]
      names[row] = job.name
    if not names:
      return
    state = fns.steps(params, state)
    status, length, finite = jax.device_get(
      (state.status, state.length, state.finite)
    )
    ended = [
      row
      for row in names
      if status[row] >= decoding.Status.STOPPED or not finite[row]
    ]
    for row in ended:
      size = int(length[row])
      if finite[row]:
        yield Sequence(
          names[row],
          np.asarray(state.tokens[row])[:size],
          int(state.prompt_length[row]),
          np.asarray(state.draft[row])[: size - 1],
        )
      del names[row]
      free.append(row)
    if ended:
      mask = np.isin(np.arange(batch), ended)
      state = fns.release(state, mask)
