"""The host's side of decoding: rows come and go, rounds are read late.

The next round is enqueued before the last one is read, so that the device
does not wait for the host. All memory decisions are made here, between steps.
"""

import dataclasses
import functools
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from ldjax import _request, assemble, decoding, typing

Array = typing.Array
Status = decoding.Status

_REASONS = {Status.STOPPED: "stop", Status.LENGTH: "length"}


class Outcome(NamedTuple):
  """How a request ended."""

  tokens: tuple[int, ...]
  prompt_tokens: int
  finish_reason: str
  rounds: int
  tokens_per_second: float
  time_to_first_token_s: float
  peak_cache_bytes: int


class Event(NamedTuple):
  """Tokens of one request, as a round was read."""

  request: int
  """Which one, counted from 0."""
  tokens: tuple[int, ...]
  outcome: Outcome | None
  """Set with the last tokens."""


@dataclasses.dataclass(kw_only=True)
class _Row:
  """A request while it is in a row of the state."""

  index: int
  request: _request.Request
  started: float
  tokens: list[int] = dataclasses.field(default_factory=list)
  rounds: int = 0
  first: float = 0.0
  last: float = 0.0
  enqueued: int = 0
  """Rounds that will bring it tokens and were not read yet."""
  waiting: bool = False
  """Preempted: its pages are given back, its tokens are kept."""

  @property
  def known(self) -> int:
    return self.request.prompt_length + len(self.tokens)

  @property
  def remaining(self) -> int:
    """Tokens to emit if every enqueued round brings only one."""
    return self.request.max_new_tokens - len(self.tokens) - self.enqueued


class _Compiled(NamedTuple):
  empty: Any
  admit: Any
  prefill: Any
  step: Any
  preempt: Any
  release: Any
  announced: set[tuple[str, int]]
  """What progress lines were shown for."""


def _runs(row: "_Row | None") -> TypeGuard["_Row"]:
  return row is not None and not row.waiting


@functools.lru_cache(maxsize=64)
def _compiled(decoder: decoding.Decoder) -> _Compiled:
  return _Compiled(
    empty=jax.jit(decoder.empty, static_argnums=1),
    admit=jax.jit(decoder.admit, donate_argnums=0),
    prefill=jax.jit(decoder.prefill, static_argnums=3, donate_argnums=1),
    step=jax.jit(decoder.step, donate_argnums=1),
    preempt=jax.jit(decoder.preempt, donate_argnums=0),
    release=jax.jit(decoder.release, donate_argnums=0),
    announced=set(),
  )


class _Run:
  """The requests of one call on their way through one state."""

  def __init__(
    self,
    model: assemble.LanguageModel,
    requests: Sequence[_request.Request],
    batch: int,
    progress: assemble.Progress | None,
  ):
    self.model = model
    self.fns = _compiled(model.decoder)
    self.progress = progress
    self.state = self.fns.empty(model.params, batch)
    self.queue = deque(enumerate(requests))
    self.rows: list[_Row | None] = [None] * batch
    self.order: list[int] = []  # rows, longest running first
    self.unread: deque[tuple[Any, list[_Row | None]]] = deque()
    self.stalled = False  # the round read last helped no row
    self.broken: list[tuple[int, _Row]] = []  # not finite in that round
    cache = self.state.cache
    self.page_bytes = cache.page_bytes
    # With pages for every row at full length none can ever lack one.
    self.scarce = cache.pool.num_pages < cache.block_table.size

  def _announce(self, what: str) -> None:
    key = (what, len(self.rows))
    if self.progress is not None and key not in self.fns.announced:
      self.progress(f"Compiling {what} for {len(self.rows)} rows (seconds)")
    self.fns.announced.add(key)

  def _mask(self, row: int) -> Array:
    return jnp.asarray(np.arange(len(self.rows)) == row)

  def _has_pages(self, positions: int) -> bool:
    if not self.scarce:
      return True
    needed = -(-positions // self.model.page_size)
    return needed <= int(self.state.cache.pool.num_free)

  def _read_prompt(self, at: int, row: _Row) -> None:
    """Enqueues the prefill of everything that is known of a row."""
    chunks = self.model.prefill_chunks
    chunk = next((c for c in chunks if c >= row.known), chunks[-1])
    self._announce(f"the prefill of {chunk} tokens")
    rows = jnp.full((1,), at, jnp.int32)
    for _ in range(0, row.known, chunk):
      self.state, emitted = self.fns.prefill(
        self.model.params, self.state, rows, chunk
      )
    row.waiting = False
    row.enqueued += 1
    self.unread.append((emitted, [row]))

  def admit(self) -> None:
    """Gives free rows to what waits, as far as there are pages."""
    for at in list(self.order):
      row = self.rows[at]
      if row is not None and row.waiting and self._has_pages(row.known):
        self._read_prompt(at, row)
    for at, holder in enumerate(self.rows):
      if holder is not None or not self.queue:
        continue
      if not self._has_pages(self.queue[0][1].prompt_length):
        return
      index, request = self.queue.popleft()
      row = _Row(index=index, request=request, started=time.perf_counter())
      self.state = self.fns.admit(
        self.state,
        jnp.int32(at),
        request.prompt,
        jnp.int32(request.prompt_length),
        request.sampling,
        jnp.int32(request.max_new_tokens),
        request.stop_ids,
      )
      self.rows[at] = row
      self.order.append(at)
      self._read_prompt(at, row)

  def enqueue_step(self) -> bool:
    """Enqueues a round if some row is sure to gain by it."""
    if not any(row.remaining > 0 for row in self.rows if _runs(row)):
      return False
    self._announce("the decode step")
    self.state, emitted = self.fns.step(self.model.params, self.state)
    self._expect(emitted)
    return True

  def _expect(self, emitted: decoding.Round) -> None:
    """Notes a round on all rows, to be read later."""
    running = [row if _runs(row) else None for row in self.rows]
    for row in running:
      if row is not None:
        row.enqueued += 1
    self.unread.append((emitted, running))

  def _finish(self, at: int, row: _Row, reason: str) -> Outcome:
    used = sum(
      -(-(each.known - 1) // self.model.page_size)
      for each in self.rows
      if _runs(each)
    )
    self.state = self.fns.release(self.state, self._mask(at))
    self.rows[at] = None
    self.order.remove(at)
    seconds = row.last - row.first
    return Outcome(
      tokens=tuple(row.tokens),
      prompt_tokens=row.request.prompt_length,
      finish_reason=reason,
      rounds=row.rounds,
      tokens_per_second=(
        (len(row.tokens) - 1) / seconds if len(row.tokens) > 1 else 0.0
      ),
      time_to_first_token_s=row.first - row.started,
      peak_cache_bytes=used * self.page_bytes,
    )

  def _give_up(self, at: int, row: _Row) -> Event:
    warnings.warn(
      f"{row.request.name}: the logits after {row.known} tokens are not finite;"
      " generation ends there (are there NaNs in the weights, or does the"
      " dtype overflow?)",
      stacklevel=2,
    )
    if not row.first:
      row.first = row.last = time.perf_counter()
    return Event(row.index, (), self._finish(at, row, "non_finite"))

  def _read(self) -> Iterator[Event]:
    """Reads the oldest round and notes which rows it could not help."""
    emitted, holders = self.unread.popleft()
    tokens, count, status, finite, lacking, rows = jax.device_get(
      (
        emitted.tokens,
        emitted.count,
        emitted.status,
        emitted.finite,
        emitted.needs_pages,
        emitted.rows,
      )
    )
    now = time.perf_counter()
    self.stalled = bool(lacking.any() and not count.any())
    self.broken = []
    for i, row in enumerate(holders):
      at = int(rows[i])
      if row is None or self.rows[at] is not row:
        continue  # ended or preempted since this round was enqueued
      row.enqueued -= 1
      if count[i]:
        fresh = tuple(int(token) for token in tokens[i, : count[i]])
        row.tokens.extend(fresh)
        row.rounds += 1
        row.first = row.first or now
        row.last = now
        reason = _REASONS.get(int(status[i]))
        outcome = self._finish(at, row, reason) if reason else None
        yield Event(row.index, fresh, outcome)
      elif not finite[i]:
        self.broken.append((at, row))

  def _retry_plainly(self) -> Iterator[Event]:
    """Repeats a round root-only: nothing wrong was ever committed."""
    lost = [(at, row) for at, row in self.broken if not row.tokens]
    again = [(at, row) for at, row in self.broken if row.tokens]
    if again:
      plain = _compiled(self.model.fallback)
      self._announce("the plain decode step")
      self.state, emitted = plain.step(self.model.params, self.state)
      self._expect(emitted)
      finite = np.asarray(emitted.finite)
      lost += [(at, row) for at, row in again if not finite[at]]
    # Where not even the prompt's end was finite there is nothing plainer.
    for at, row in lost:
      yield self._give_up(at, row)

  def _preempt(self) -> None:
    """All running rows lack pages: the newest gives its own back."""
    newest = next(
      at
      for at in reversed(self.order)
      if (row := self.rows[at]) is not None and not row.waiting
    )
    row = self.rows[newest]
    assert row is not None
    row.waiting = True
    self.state = self.fns.preempt(self.state, self._mask(newest))

  def events(self) -> Iterator[Event]:
    """Runs everything to its end."""
    room = True
    while self.queue or any(self.rows):
      if room:
        self.admit()
      enqueued = self.enqueue_step()
      room = False
      # One round stays unread while the next one runs, unless there is
      # trouble to decide about: then everything is read first.
      while self.unread and (
        len(self.unread) > 1 or not enqueued or self.stalled or self.broken
      ):
        for event in self._read():
          room = room or event.outcome is not None
          yield event
      if self.broken:
        for event in self._retry_plainly():
          room = True
          yield event
        self.broken = []
      elif self.stalled and not room:
        self._preempt()
        # If nobody runs now, no row will end and make room: it is there.
        room = not any(map(_runs, self.rows))
      self.stalled = False


def run(
  model: assemble.LanguageModel,
  requests: Sequence[_request.Request],
  batch_size: int,
  progress: assemble.Progress | None = None,
) -> Iterator[Event]:
  """Decodes requests in up to `batch_size` rows at a time.

  Args:
    model: what decodes.
    requests: in the order in which they are admitted.
    batch_size: rows at most; the compiled batch is the next power of two, so
      that lists of various lengths share programs.
    progress: called before a long compilation.

  Yields:
    `Event`, one a round and request, in the order of reading.

  Raises:
    ValueError: for a batch size below 1.
  """
  if batch_size < 1:
    raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
  working = []
  for index, request in enumerate(requests):
    if request.max_new_tokens:
      working.append((index, request))
      continue
    nothing = Outcome((), request.prompt_length, "length", 0, 0.0, 0.0, 0)
    yield Event(index, (), nothing)
  if not working:
    return
  rows = min(batch_size, len(working))
  batch = min(batch_size, 1 << (rows - 1).bit_length())
  indices = [index for index, _ in working]
  on_the_way = _Run(model, [request for _, request in working], batch, progress)
  for event in on_the_way.events():
    yield event._replace(request=indices[event.request])
