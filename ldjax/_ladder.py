"""The compiled programs of a model, and which of its steps comes next."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from ldjax import assemble, decoding, optimize


class Programs(NamedTuple):
  """A decoder's functions under `jit`, compiled when first called."""

  empty: Any
  admit: Any
  prefill: Any
  step: Any
  preempt: Any
  release: Any
  announced: set[tuple[str, int]]
  """What progress lines were shown for, with the rows."""
  missed: dict[int, float]
  """By rows, for a step that was never called with them: what it would have
  saved by now, in rounds of one node; infinite from the first call on."""

  def announce(
    self, progress: assemble.Progress | None, what: str, rows: int
  ) -> None:
    """Says that something is about to be compiled, once.

    Args:
      progress: called with a line of text, unless None.
      what: is compiled.
      rows: B, that it is compiled for.
    """
    if progress is not None and (what, rows) not in self.announced:
      progress(f"Compiling {what} for {rows} rows (seconds)")
    self.announced.add((what, rows))


@functools.lru_cache(maxsize=64)
def programs(decoder: decoding.Decoder) -> Programs:
  """The programs of a decoder; the same ones each time.

  Args:
    decoder: of a model.
  """
  return Programs(
    empty=jax.jit(decoder.empty, static_argnums=(1, 2)),
    admit=jax.jit(decoder.admit, donate_argnums=0),
    prefill=jax.jit(decoder.prefill, static_argnums=3, donate_argnums=1),
    step=jax.jit(decoder.step, donate_argnums=1),
    preempt=jax.jit(decoder.preempt, donate_argnums=0),
    release=jax.jit(decoder.release, donate_argnums=0),
    announced=set(),
    missed={},
  )


_COMPILATION = 200.0
"""How many rounds of one node compiling a step takes the time of."""


class Ladder:
  """The steps of a model, one of which is chosen for each round.

  With one rung it is that one; with several it is chosen by how drafts fared
  in the rounds that were read. A step is compiled once what it would have saved
  so far comes to what compiling it takes, so that together they cost at most
  twice what foresight would.

  Args:
    model: what decodes.
    batch: B, rows that run together.
    progress: called with a line of text before a long compilation.
  """

  def __init__(
    self,
    model: assemble.LanguageModel,
    batch: int,
    progress: assemble.Progress | None,
  ):
    self.sizes = [rung.draft.size for rung in model.ladder]
    """T of each rung's tree."""
    self._programs = [programs(rung.decoder) for rung in model.ladder]
    self._batch = batch
    self._progress = progress
    self._plan: optimize.LadderPlan | None = None
    if len(self.sizes) > 1:
      self._plan = optimize.plan_ladder(model, batch)
      self._track = self._plan.begin()

  def choose(self) -> int:
    """The rung of the next round."""
    if self._plan is None:
      return 0
    rung, self._track = self._plan.choose(self._track)
    missed = self._programs[rung].missed
    before = missed.get(self._batch, 0.0)
    if before >= _COMPILATION:
      return rung
    ready = [i for i in range(len(self.sizes)) if self._is_compiled(i)]
    if not ready:
      return rung
    other, saving = self._plan.instead(self._track, rung, ready)
    missed[self._batch] = before + saving
    return other

  def _is_compiled(self, rung: int) -> bool:
    return self._programs[rung].missed.get(self._batch, 0.0) == math.inf

  def step(self, rung: int) -> Any:
    """The compiled step of a rung.

    Args:
      rung: one of the model's ladder.
    """
    what = "the decode step"
    if self._plan is not None:
      what += f" of {self.sizes[rung]} nodes"
    self._programs[rung].announce(self._progress, what, self._batch)
    self._programs[rung].missed[self._batch] = math.inf
    return self._programs[rung].step

  def observe(self, rung: int, tokens: Sequence[int]) -> None:
    """Takes note of a round.

    Args:
      rung: that made it.
      tokens: that it brought to each of the rows that go on.
    """
    if self._plan is not None:
      self._track = self._plan.observe(self._track, rung, tokens)

  def renew(self, running: int) -> None:
    """Takes note that one row began a text of which nothing is known.

    Args:
      running: rows in use, that one included.
    """
    if self._plan is not None:
      self._track = self._plan.renew(self._track, 1 / running)
