"""Real generations, round by round."""

import collections
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from ldjax import _engine, _generation, _request, assemble, memory


class Round(NamedTuple):
  """A round between two readings of the host, with no prefill among them."""

  size: int
  """T, nodes of its tree."""
  seconds: float
  """Since the reading before."""
  tokens: tuple[int, ...]
  """That it brought to each row that ran."""
  ended: tuple[bool, ...]
  """Whether it was the last one of the row, which may have cut it."""


class Run(NamedTuple):
  """What some prompts came to."""

  rounds: list[Round]
  generations: list[_generation.Generation]
  seconds: float
  """All of it, prefills included."""


def observe(
  model: assemble.LanguageModel,
  requests: Sequence[_request.Request],
  batch: int,
  before_round: Callable[[_engine.Engine], None] | None = None,
) -> Run:
  """Generates, and takes note of each round.

  Args:
    model: what decodes.
    requests: all of them, in order.
    batch: B.
    before_round: called before the host goes on.

  Returns:
    `Run`.
  """
  engine = _engine.Engine(model, batch, share=len(requests) > 1)
  rounds: list[Round] = []
  ended: dict[int, _generation.Generation] = {}
  began = last = time.perf_counter()
  try:
    for request in requests:
      engine.submit(request)
    while not engine.idle:
      if before_round is not None:
        before_round(engine)
      had = {
        id(row): len(row.round_sizes) for row in engine.rows if row is not None
      }
      rows = [row for row in engine.rows if row is not None]
      for event in engine.advance():
        if event.generation is not None:
          ended[event.request] = event.generation
      now = time.perf_counter()
      # Those that came and did not end at once.
      rows += [
        row for row in engine.rows if row is not None and id(row) not in had
      ]
      fresh = [row.round_sizes[had.get(id(row), 0) :] for row in rows]
      found = _as_round(rows, fresh, had, engine.rows, now - last)
      if found is not None:
        rounds.append(found)
      last = now
  finally:
    engine.close()
  generations = [ended[number] for number in range(len(requests))]
  return Run(rounds, generations, last - began)


def _as_round(
  rows: list[Any],
  fresh: list[list[int]],
  had: dict[int, int],
  running: list[Any],
  seconds: float,
) -> Round | None:
  """What was read as one round; None for none, several, or a prefill."""
  read = [(row, sizes) for row, sizes in zip(rows, fresh, strict=True) if sizes]
  if not read or any(
    len(sizes) > 1 or not had.get(id(row), 0) for row, sizes in read
  ):
    return None
  sizes = {sizes[0] for _, sizes in read}
  if len(sizes) > 1:
    return None
  return Round(
    size=sizes.pop(),
    seconds=seconds,
    tokens=tuple(row.round_tokens[-1] for row, _ in read),
    ended=tuple(all(row is not other for other in running) for row, _ in read),
  )


class Tally(NamedTuple):
  """Rounds added up."""

  rounds: int
  row_rounds: int
  """Each row that ran counted."""
  tokens: int
  seconds: float

  @property
  def tokens_a_round(self) -> float:
    """Of a row; 0 without rounds."""
    return self.tokens / self.row_rounds if self.row_rounds else 0.0

  @property
  def seconds_a_round(self) -> float:
    """0 without rounds."""
    return self.seconds / self.rounds if self.rounds else 0.0

  @property
  def rate(self) -> float:
    """Tokens a second, all rows together; 0 without rounds."""
    return self.tokens / self.seconds if self.seconds else 0.0


def tally(rounds: Iterable[Round]) -> Tally:
  """Adds rounds up.

  Args:
    rounds: of any sizes.

  Example:
    >>> tally([Round(4, 0.5, (2, 1), (False, False))]).tokens_a_round
    1.5
  """
  each = list(rounds)
  return Tally(
    len(each),
    sum(len(one.tokens) for one in each),
    sum(sum(one.tokens) for one in each),
    sum(one.seconds for one in each),
  )


def acceptance_by_depth(
  rounds: Iterable[Round], depths: dict[int, int]
) -> list[dict[str, Any]]:
  """How often a walk that came to a depth went one deeper.

  The last round of a text is left out: its end may have cut it.

  Args:
    rounds: observed.
    depths: D of each size of tree.

  Returns:
    For each depth from 1 on that was tried: `depth`, `tried` (walks that came
    to the depth before, in trees that go on there), `accepted`, `rate`.

  Example:
    >>> rounds = [Round(4, 1.0, (n,), (False,)) for n in (1, 2, 4, 4)]
    >>> [(x["tried"], x["accepted"])
    ...  for x in acceptance_by_depth(rounds, {4: 3})]
    [(4, 3), (3, 2), (2, 2)]
  """
  tried: collections.Counter[int] = collections.Counter()
  accepted: collections.Counter[int] = collections.Counter()
  for each in rounds:
    for tokens, ended in zip(each.tokens, each.ended, strict=True):
      if ended:
        continue
      for depth in range(1, min(tokens, depths.get(each.size, 0)) + 1):
        tried[depth] += 1
        accepted[depth] += tokens > depth
  return [
    {
      "depth": depth,
      "tried": tried[depth],
      "accepted": accepted[depth],
      "rate": accepted[depth] / tried[depth],
    }
    for depth in sorted(tried)
  ]


class Watch:
  """Times the host and looks at the cache, round by round.

  It waits for the device before each round, so that what `advance` then takes
  is the host's own work: enqueueing the next round, reading one that is ready,
  and turning tokens into text. Never for rounds whose time counts.
  """

  def __init__(self) -> None:
    self.stats: list[memory.CacheStats] = []
    """Of the pool, before each round."""
    self.host: list[float] = []
    """Seconds of the host, each round without the first two."""
    self._began: float | None = None
    self._calls = 0

  def __call__(self, engine: _engine.Engine) -> None:
    """Notes the time since the last call and waits.

    Args:
      engine: about to go on.
    """
    if self._began is not None and self._calls > 2:
      self.host.append(time.perf_counter() - self._began)
    self._calls += 1
    cache = engine.cache
    pool = cache.full if isinstance(cache, memory.GroupedKVCache) else cache
    if pool is not None:
      found = memory.cache_stats(pool)
      if found.free < found.pages:
        self.stats.append(found)
    if cache is not None:
      jax.block_until_ready(jax.tree.leaves(cache))
    self._began = time.perf_counter()
