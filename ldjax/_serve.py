"""Requests that come at any time, served in the rows of one batch."""

import asyncio
import dataclasses
import functools
import threading
import time
from collections import deque
from collections.abc import (
  AsyncIterator,
  Callable,
  Iterable,
  Iterator,
  Sequence,
)
from typing import Any, Self

from ldjax import (
  _engine,
  _generation,
  _pages,
  _request,
  _row,
  _settings,
  _ticket,
  assemble,
)

_END = object()


@dataclasses.dataclass
class _Sums:
  """Over all finished requests."""

  finished: int = 0
  cancelled: int = 0
  tokens: int = 0
  busy_s: float = 0.0
  waited_s: float = 0.0
  longest_wait_s: float = 0.0

  def add(self, generation: _generation.Generation) -> None:
    self.finished += 1
    self.cancelled += generation.finish_reason == "cancelled"
    self.tokens += len(generation.tokens)
    self.waited_s += generation.waited_s
    self.longest_wait_s = max(self.longest_wait_s, generation.waited_s)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerStats:
  """How a server is doing."""

  waiting: int
  """Requests in the queue."""
  running: int
  """Rows in use."""
  rows: int
  """Rows that there are."""
  finished: int
  """Requests that came to their end, the cancelled ones included."""
  cancelled: int
  """Those of them that were cancelled."""
  tokens: int
  """Tokens of finished requests."""
  busy_s: float
  """Seconds in which there was something to do, compiling included."""
  tokens_per_second: float
  """`tokens` over `busy_s`."""
  mean_wait_s: float
  """Seconds that a finished request waited for a row, on average."""
  max_wait_s: float
  """The most that one waited."""
  memory: _pages.MemoryCounts
  """What was done about memory."""
  mean_rows_in_use: float
  """Rows that ran in a round, on average."""


class Server(Iterator[_ticket.Ticket], AsyncIterator[_ticket.Ticket]):
  """Serves requests; iterating over it does the work.

  Iteration gives each ticket as it finishes, and ends when nothing is left to
  do; with `keep_open` it waits for more until `close` is called. Every other
  method may be called from any thread at any time. On leaving a `with` block
  what is left is cancelled. Ctrl-C in the middle loses nothing: iterating
  again goes on, with the same texts.
  """

  def __init__(
    self,
    model: assemble.LanguageModel,
    requests: Iterable[Any],
    batch_size: int,
    keep_open: bool,
    progress: assemble.Progress | None,
  ):
    self._model = model
    self._make_engine = functools.partial(
      _engine.Engine, model, batch_size, progress
    )
    self._engine = self._make_engine()
    self._requests = iter(requests)
    self._keep_open = keep_open
    self._turn = threading.Lock()  # held by the thread that does the work
    self._changed = threading.Condition()  # guards the next four
    self._incoming: deque[_ticket.Ticket] = deque()
    self._unwanted: list[_ticket.Ticket] = []
    self._closed = False
    self._count = 0
    # All below belongs to the thread whose turn it is.
    # Ticket and sample of each number of the engine's.
    self._samples: dict[int, tuple[_ticket.Ticket, int]] = {}
    self._finished: deque[_ticket.Ticket] = deque()
    self._sum = _Sums()

  @_settings.takes_settings
  def submit(
    self,
    prompt: _request.Prompt,
    settings: _settings.Settings | None = None,
    *,
    on_text: Callable[[str], None] | None = None,
    **changes: Any,
  ) -> _ticket.Ticket:
    """Puts a request at the end of the queue.

    Args:
      prompt: text, token ids, or a conversation.
      settings: see `Settings`.
      on_text: called with each piece of text (a str) as it comes, in the
        thread that iterates; not for several samples.
      **changes: settings by name, as for `generate`.

    Returns:
      Its ticket.

    Raises:
      RuntimeError: after `close`.
      TypeError: for a setting that does not exist.
      ValueError: for a prompt or settings that `generate` would refuse.
    """
    settled = _settings.settle(settings, changes)
    if on_text is not None and settled.num_samples > 1:
      raise ValueError(
        f"num_samples is {settled.num_samples}; on_text takes the pieces of"
        " one text"
      )
    requests = _request.make_requests(self._model, prompt, settled)
    with self._changed:
      if self._closed:
        raise RuntimeError("the server is closed; make another one")
      number = self._count
      self._count += 1
      requests = [r._replace(name=f"request {number}") for r in requests]
      ticket = _ticket.Ticket(
        number, prompt, settled, requests, on_text, self._do_not_want
      )
      self._incoming.append(ticket)
      self._changed.notify()
    return ticket

  def close(self) -> None:
    """Takes no more requests; those that are there are served."""
    with self._changed:
      self._closed = True
      self._changed.notify()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()
    with self._turn:
      self._requests = iter(())
      self._take_in()
      for number in list(self._samples):
        self._engine.cancel(number)
      while not self._engine.idle:
        self._deliver(self._engine.advance())
      self._engine.close()

  def __next__(self) -> _ticket.Ticket:
    with self._turn:
      while not self._finished:
        self._pull()
        with self._changed:
          while not (self._incoming or self._unwanted) and self._engine.idle:
            if self._closed or not self._keep_open:
              raise StopIteration
            self._changed.wait()
        self._take_in()
        self._work()
      return self._finished.popleft()

  async def __anext__(self) -> _ticket.Ticket:
    ticket: Any = await asyncio.to_thread(next, self, _END)
    if ticket is _END:
      raise StopAsyncIteration
    return ticket

  @property
  def stats(self) -> ServerStats:
    """How it is doing, a fresh picture each time."""
    engine, total = self._engine, self._sum
    with self._changed:
      waiting = len(engine.queue) + sum(
        len(ticket._left()) for ticket in self._incoming
      )
    return ServerStats(
      waiting=waiting,
      running=engine.running,
      rows=len(engine.rows),
      finished=total.finished,
      cancelled=total.cancelled,
      tokens=total.tokens,
      busy_s=total.busy_s,
      tokens_per_second=total.tokens / total.busy_s if total.busy_s else 0.0,
      mean_wait_s=total.waited_s / total.finished if total.finished else 0.0,
      max_wait_s=total.longest_wait_s,
      memory=dataclasses.replace(engine.memory_counts),
      mean_rows_in_use=(
        engine.row_steps / engine.steps if engine.steps else 0.0
      ),
    )

  def _do_not_want(self, ticket: _ticket.Ticket) -> None:
    with self._changed:
      self._unwanted.append(ticket)
      self._changed.notify()

  def _pull(self) -> None:
    """Draws from the iterable while fewer wait than there are rows."""
    rows = len(self._engine.rows)
    while (
      not self._closed and len(self._engine.queue) + len(self._incoming) < rows
    ):
      entry: Any = next(self._requests, _END)
      if entry is _END:
        return
      match entry:
        case (prompt, _settings.Settings() as settings):
          self.submit(prompt, settings)
        case prompt:
          self.submit(prompt)

  def _take_in(self) -> None:
    """Hands what other threads left to the engine."""
    with self._changed:
      while self._incoming:
        self._hand_over(self._incoming.popleft())
      unwanted, self._unwanted = self._unwanted, []
    for number, (ticket, _) in list(self._samples.items()):
      if ticket in unwanted:
        self._engine.cancel(number)

  def _hand_over(self, ticket: _ticket.Ticket) -> None:
    for sample, request in ticket._left():
      self._samples[self._engine.submit(request)] = ticket, sample

  def _work(self) -> None:
    began = time.perf_counter()
    try:
      self._deliver(self._engine.advance())
    except KeyboardInterrupt:
      self._begin_again()
      raise
    except BaseException as error:
      self.close()
      for ticket, _ in self._samples.values():
        ticket._fail(error)
      self._samples.clear()
      self._engine.close()
      raise
    finally:
      self._sum.busy_s += time.perf_counter() - began

  def _begin_again(self) -> None:
    """Puts all that is unfinished into an engine of its own.

    A round that was read by half can't be told from one that was not; from
    its seed a request comes to the same text again.
    """
    left = dict.fromkeys(ticket for ticket, _ in self._samples.values())
    self._samples.clear()
    self._engine.close()
    self._engine = self._make_engine()
    for ticket in sorted(left, key=lambda ticket: ticket.number):
      ticket._begin_again()
      self._hand_over(ticket)

  def _deliver(self, events: Sequence[_row.Event]) -> None:
    for event in events:
      ticket, sample = self._samples[event.request]
      try:
        ticket._say(event.text)
      except Exception as error:  # its own affair; the others go on
        ticket._fail(error)
        self._do_not_want(ticket)
      if event.generation is not None:
        del self._samples[event.request]
        self._sum.add(event.generation)
        if ticket._end(sample, event.generation):
          self._finished.append(ticket)


def serve(
  model: assemble.LanguageModel,
  requests: Iterable[_request.Prompt | tuple[Any, _settings.Settings]] = (),
  *,
  batch_size: int = 8,
  keep_open: bool = False,
  progress: assemble.Progress | None = None,
) -> Server:
  """Serves requests as they come, in rows that are given on as they end.

  Rows are given in the order of arrival. Each request has settings and a seed
  of its own, and its text is what `generate` gives for them, whatever runs
  beside it.

  Args:
    model: from `load`.
    requests: prompts, or pairs of a prompt and `Settings`; any iterable, drawn
      from as rows come free. `Server.submit` takes more at any time.
    batch_size: rows that run together. A round costs as much with one row in
      use as with all of them.
    keep_open: whether iteration waits for more when nothing is left.
    progress: called with a line of text before a long compilation.

  Returns:
    `Server`: iterate over it.

  Raises:
    ValueError: for a batch size below 1; on iterating, for a prompt or
      settings that `generate` would refuse (iterating again goes on with the
      next one).

  Example:
    with ldjax.serve(model, ["Name a river.", "Name a lake."]) as server:
      for ticket in server:
        print(ticket.prompt, ticket.result().text)
  """
  return Server(model, requests, batch_size, keep_open, progress)
