"""The host's side of decoding: rows come and go, rounds are read late.

The next round is enqueued before the last one is read, so that the device
does not wait for the host. All memory decisions are made here, between steps.
"""

import itertools
import time
import warnings
from collections import deque
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ldjax import (
  _generation,
  _ladder,
  _pages,
  _request,
  _row,
  assemble,
  decoding,
  memory,
  typing,
)

Array = typing.Array
Status = decoding.Status

_REASONS = {Status.STOPPED: "stop", Status.LENGTH: "length"}


class Engine:
  """Requests on their way through the rows of one state.

  Rows are given in the order of arrival; nobody overtakes. It is not for
  several threads at once.

  Args:
    model: what decodes.
    batch: B, rows that run together.
    progress: called with a line of text before a long compilation.
    share: whether a prompt may begin with pages that another one filled.

  Raises:
    ValueError: for a batch below 1.
  """

  def __init__(
    self,
    model: assemble.LanguageModel,
    batch: int,
    progress: assemble.Progress | None = None,
    share: bool = True,
  ):
    if batch < 1:
      raise ValueError(f"batch_size is {batch}; it must be at least 1")
    self.model = model
    self.rows: list[_row.Row | None] = [None] * batch
    self.queue: deque[tuple[int, _request.Request, float]] = deque()
    self.steps = 0
    """Rounds enqueued on all rows."""
    self.row_steps = 0
    """Rows that ran in them, added up."""
    # All but the step is the same for every rung.
    self._fns = _ladder.programs(model.fallback)
    self._ladder = _ladder.Ladder(model, batch, progress)
    self._pages = _pages.Pages(model, batch, share, progress)
    self._progress = progress
    self._numbers = itertools.count()
    self._state: Any = None
    self._ready: list[_row.Event] = []  # to hand out with the next advance
    self._order: list[int] = []  # rows, longest running first
    self._unread: deque[_row.Unread] = deque()
    self._room = True  # some row may be given to somebody now
    self._lacking = 0  # rows that the round read last did not help
    self._broken: list[tuple[int, _row.Row]] = []  # not finite in that round

  @property
  def idle(self) -> bool:
    """Whether there is nothing to do."""
    return not (self._ready or self.queue or any(self.rows))

  @property
  def memory_counts(self) -> _pages.MemoryCounts:
    """What was done about memory so far."""
    return self._pages.counts

  @property
  def cache(self) -> memory.PagedKVCache | None:
    """The pool until the next `advance`; None before the first."""
    return None if self._state is None else self._state.cache

  @property
  def running(self) -> int:
    """Rows in use."""
    return sum(row is not None for row in self.rows)

  @property
  def holding(self) -> int:
    """Rows in use that have their pages."""
    return sum(map(_row.runs, self.rows))

  def submit(self, request: _request.Request) -> int:
    """Puts a request at the end of the queue.

    Returns:
      Its number, from 0 on.
    """
    number = next(self._numbers)
    if request.max_new_tokens:
      self.queue.append((number, request, time.perf_counter()))
      self._room = True
    else:
      self._ready.append(_row.unstarted(number, request, "length", 0.0))
    return number

  def cancel(self, number: int) -> None:
    """Ends a request, with what it has, at the next `advance`.

    Args:
      number: of the request; one that has ended is left alone.
    """
    for entry in self.queue:
      if entry[0] == number:
        self.queue.remove(entry)
        waited = time.perf_counter() - entry[2]
        ended = _row.unstarted(number, entry[1], "cancelled", waited)
        self._ready.append(ended)
        return
    for at, row in enumerate(self.rows):
      if row is not None and row.index == number:
        rest = row.transcript.finish()
        result = self._finish(at, row, "cancelled")
        self._ready.append(_row.Event(number, rest, result))
        return

  def advance(self) -> list[_row.Event]:
    """Goes on until a round was read, or as far as it can.

    Returns:
      What came of it, one event a row at most for each round read.
    """
    events, self._ready = self._ready, []
    self._room = self._room and self._admit()
    enqueued = self._enqueue_step()
    # One round stays unread while the next one runs, unless there is trouble
    # to decide about: then everything is read first.
    while self._unread and (
      len(self._unread) > 1 or not enqueued or self._lacking or self._broken
    ):
      events += self._read()
    if self._broken:
      self._room = True
      events += self._retry_plainly()
      self._broken = []
    elif self._lacking and not self._room:
      self._relieve()
    self._lacking = 0
    return events

  def compile_ladder(self) -> None:
    """Compiles the step of every rung beforehand, before any request."""
    self._begin()
    for rung in range(len(self._ladder.sizes)):
      step = self._ladder.step(rung)
      self._state, _ = step(self.model.params, self._state)

  def close(self) -> None:
    """Gives up what is left and waits for the device."""
    state, self._state = self._state, None
    self.rows = [None] * len(self.rows)
    self.queue.clear()
    self._unread.clear()
    for leaf in jax.tree.leaves(state):
      # Deleted if a step that was to take its place was interrupted.
      if not leaf.is_deleted():
        jax.block_until_ready(leaf)

  def _begin(self) -> None:
    if self._state is None:
      self._state = self._fns.empty(
        self.model.params, len(self.rows), self._pages.other_cache
      )

  def _mask(self, row: int) -> Array:
    return jnp.asarray(np.arange(len(self.rows)) == row)

  def _has_pages(self, tokens: list[int], shares: bool = True) -> bool:
    self._state, ok = self._pages.has_room(
      self._state, tokens, self.holding, shares
    )
    return ok

  def _read_prompt(self, at: int, row: _row.Row) -> None:
    """Enqueues the prefill of what is known of a row and not shared."""
    self._state, shared = self._pages.begin(self._state, at, row.known_tokens)
    left = row.known - shared
    chunks = self.model.prefill_chunks
    chunk = next((c for c in chunks if c >= left), chunks[-1])
    what = f"the prefill of {chunk} tokens"
    self._fns.announce(self._progress, what, len(self.rows))
    rows = jnp.full((1,), at, jnp.int32)
    for _ in range(0, left, chunk):
      self._state, emitted = self._fns.prefill(
        self.model.params, self._state, rows, chunk
      )
    row.waiting = False
    row.enqueued += 1
    table = self._table(at) if self._pages.sharing else None
    self._unread.append(_row.Unread(emitted, [row], 1, None, table))

  def _table(self, at: int) -> Array:
    return self._state.cache.block_table[at]

  def _admit(self) -> bool:
    """Gives rows to those that wait, in their order, as far as pages go.

    Returns:
      Whether somebody waits for a prefill to be read, whose pages it can use.
    """
    if self._state is None and not self.queue:
      return False
    self._begin()
    for at in list(self._order):
      row = self.rows[at]
      if row is not None and row.waiting:
        if not self._has_pages(row.known_tokens, row.parked is None):
          return False  # nobody newer may take the pages that it waits for
        self._bring_back(at, row)
    for at, holder in enumerate(self.rows):
      if holder is not None:
        continue
      if not self.queue:
        return False
      tokens = self.queue[0][1].tokens
      read = [each.holders[0] for each in self._unread if each.is_prefill]
      if self._pages.is_filled_by(tokens, read):
        return True
      if not self._has_pages(tokens):
        return False
      index, request, submitted = self.queue.popleft()
      now = time.perf_counter()
      row = _row.make_row(index, request, now - submitted, now)
      self._state = self._fns.admit(
        self._state,
        np.int32(at),
        request.prompt,
        np.int32(request.prompt_length),
        request.sampling,
        np.int32(request.max_new_tokens),
        request.stop_ids,
      )
      self.rows[at] = row
      self._order.append(at)
      self._ladder.renew(self.running)
      self._read_prompt(at, row)
    return False

  def _enqueue_step(self) -> bool:
    """Enqueues a round if some row is sure to gain by it."""
    if not any(row.remaining > 0 for row in self.rows if _row.runs(row)):
      return False
    rung = self._ladder.choose()
    step = self._ladder.step(rung)
    self._state, emitted = step(self.model.params, self._state)
    self.steps += 1
    self.row_steps += self.holding
    self._expect(emitted, self._ladder.sizes[rung], rung)
    return True

  def _expect(
    self, emitted: decoding.Round, size: int, rung: int | None
  ) -> None:
    """Notes a round on all rows, to be read later."""
    running = [row if _row.runs(row) else None for row in self.rows]
    for row in running:
      if row is not None:
        row.enqueued += 1
    self._unread.append(_row.Unread(emitted, running, size, rung))

  def _finish(
    self, at: int, row: _row.Row, reason: str
  ) -> _generation.Generation:
    if self._pages.sharing and not row.waiting and reason in _REASONS.values():
      self._state = self._pages.note(
        self._state, row.known_tokens[:-1], self._table(at)
      )
    used = self._pages.used_bytes(
      [each.known for each in self.rows if _row.runs(each)]
    )
    self._state = self._fns.release(self._state, self._mask(at))
    self.rows[at] = None
    self._order.remove(at)
    self._room = True
    return row.result(reason, used, bool(self.memory_counts.compressed))

  def _give_up(self, at: int, row: _row.Row) -> _row.Event:
    warnings.warn(
      f"{row.request.name}: the logits after {row.known} tokens are not finite;"
      " generation ends there (are there NaNs in the weights, or does the"
      " dtype overflow?)",
      stacklevel=2,
    )
    rest = row.transcript.finish()
    return _row.Event(row.index, rest, self._finish(at, row, "non_finite"))

  def _read(self) -> list[_row.Event]:
    """Reads the oldest round and notes which rows it could not help."""
    emitted, holders, size, rung, table = self._unread.popleft()
    tokens, logprobs, count, status, finite, lacking, rows = jax.device_get(
      (
        emitted.tokens,
        emitted.logprobs,
        emitted.count,
        emitted.status,
        emitted.finite,
        emitted.needs_pages,
        emitted.rows,
      )
    )
    now = time.perf_counter()
    self._lacking = int(lacking.sum())
    self._broken = []
    events = []
    whole = []  # tokens of the rows that this round did not bring to an end
    for i, row in enumerate(holders):
      at = int(rows[i])
      if row is None or self.rows[at] is not row:
        continue  # ended or preempted since this round was enqueued
      row.enqueued -= 1
      if table is not None and count[i]:
        self._state = self._pages.note(self._state, row.known_tokens, table)
      if count[i]:
        fresh = tokens[i, : count[i]].tolist()
        certain = row.push(fresh, logprobs[i, : count[i]].tolist(), now, size)
        reason = _REASONS.get(int(status[i]))
        if reason or row.transcript.stopped:
          certain += row.transcript.finish()
          if row.transcript.stopped:
            reason = "stop"
        ended = self._finish(at, row, reason) if reason else None
        if not reason:
          whole.append(len(fresh))
        events.append(_row.Event(row.index, certain, ended))
      elif not finite[i]:
        self._broken.append((at, row))
    if rung is not None:
      self._ladder.observe(rung, whole)
    return events

  def _retry_plainly(self) -> list[_row.Event]:
    """Repeats a round root-only: nothing wrong was ever committed."""
    lost = [(at, row) for at, row in self._broken if not row.emitted]
    again = [(at, row) for at, row in self._broken if row.emitted]
    if again:
      self._fns.announce(
        self._progress, "the plain decode step", len(self.rows)
      )
      self._state, emitted = self._fns.step(self.model.params, self._state)
      self._expect(emitted, 1, None)
      finite = np.asarray(emitted.finite)
      lost += [(at, row) for at, row in again if not finite[at]]
    # Where not even the prompt's end was finite there is nothing plainer.
    return [self._give_up(at, row) for at, row in lost]

  def _relieve(self) -> None:
    """Some running rows lack pages: finds them some, or makes one give way."""
    # No row commits more in a round than a tree is deep.
    depth = max(rung.draft.depth for rung in self.model.ladder)
    needed = self._lacking * (1 + depth // self.model.page_size)
    self._state, helped = self._pages.relieve(self._state, needed)
    if not helped:
      self._give_way()
      # If nobody runs now, no row will end and make room: it is there.
      self._room = not any(map(_row.runs, self.rows))

  def _give_way(self) -> None:
    """The newest row gives its pages back, or what else `load` was told."""
    newest = next(
      at
      for at in reversed(self._order)
      if (row := self.rows[at]) is not None and not row.waiting
    )
    row = self.rows[newest]
    assert row is not None
    self._state = self._pages.give_way(
      self._state, newest, row, self._mask(newest), self._fns.preempt
    )

  def _bring_back(self, at: int, row: _row.Row) -> None:
    """Lets a row that gave its pages back go on."""
    if row.parked is None:
      self._read_prompt(at, row)
    else:
      self._state = self._pages.unpark(self._state, at, row.parked)
      row.parked, row.waiting = None, False
