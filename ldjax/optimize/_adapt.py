"""Which rung of a ladder of tree sizes to use next, from what rounds brought.

Pure functions of plain numbers: no array, no clock and no chance.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

# Tried on streams of tokens, drawn independently and in bursts, with the costs
# of a CPU: between 0.9 and 1 of the best fixed size, and above it for bursts.
_WINDOW = 12
"""Rounds that the running acceptance looks back on."""
_PRIOR = 8
"""Drafted tokens that calibration counts for at the start of a text."""
_PATIENCE = 4
"""Rounds at the first rung if nobody knows what its tree should bring."""
_MARGIN = 1.03
"""How much faster another rung must promise to be."""
_MARGIN_TO_ROOT = 1.1
"""The same for rung 0, from where nothing is seen but by probes."""
_PROBING = 0.02
"""The share of time that probes may cost while they fail."""
_SHORTEST, _LONGEST = 8, 512
_BACK_OFF = 8
"""How many times longer than at first the wait between probes becomes."""


class LadderTrack(NamedTuple):
  """What the rounds so far came to; begins with `LadderPlan.begin`."""

  rung: int
  """The one in use between probes."""
  accepted: float
  """Levels of trees at which a drafted token was accepted, rounds long ago
  counting less."""
  foreseen: float
  """How many calibration expects of the levels that were tried; the ratio of
  the two says how drafts fare."""
  patience: int
  """Rounds to be read before the first change of rung."""
  waited: int
  """Rounds at rung 0 since the last probe."""
  interval: int
  """Rounds between two probes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LadderPlan:
  """What is known of a ladder before anything is decoded.

  Rung 0 proposes nothing: a round there brings one token. Elsewhere a walk
  down a tree of depth D is taken to survive each level with the same
  probability a, so that a round brings 1 + a + ... + a^D tokens; a is what
  gives the tokens that calibration expects, times how drafts fare in the text
  at hand.

  Args:
    costs: of a round at each rung, in any unit.
    expected: tokens that calibration expects of a round at each rung; 1 at
      rung 0 and more than that elsewhere.
    limits: the most tokens that a round can bring, depth + 1.
    start: the rung to begin with; None for the one that promises most.

  Raises:
    ValueError: for figures that no ladder can have.

  Example:
    >>> plan = LadderPlan(costs=(1., 1.3, 1.4), expected=(1., 1.3, 1.7),
    ...   limits=(1, 2, 4))
    >>> plan.begin().rung
    2
  """

  costs: tuple[float, ...]
  expected: tuple[float, ...]
  limits: tuple[int, ...]
  start: int | None = None

  def __post_init__(self):
    count = len(self.costs)
    if not count == len(self.expected) == len(self.limits) or count < 1:
      raise ValueError(
        f"a ladder of {count} costs, {len(self.expected)} expectations and"
        f" {len(self.limits)} limits; give one of each a rung"
      )
    for rung, cost in enumerate(self.costs):
      if not (math.isfinite(cost) and cost > 0):
        raise ValueError(
          f"cost {cost} of rung {rung}; a round takes time, so give a number"
          " above 0"
        )
    if self.expected[0] != 1 or self.limits[0] != 1:
      raise ValueError(
        f"rung 0 expects {self.expected[0]} tokens of {self.limits[0]}; it"
        " proposes nothing, so both must be 1"
      )
    for rung, (tokens, limit) in enumerate(
      zip(self.expected[1:], self.limits[1:], strict=True), 1
    ):
      if not 1 < tokens <= limit:
        raise ValueError(
          f"rung {rung} expects {tokens} tokens a round; it must be above 1,"
          f" and {limit} at most"
        )
    if self.start is not None and not 0 <= self.start < count:
      raise ValueError(f"start is {self.start}; there are {count} rungs")

  @functools.cached_property
  def _survival(self) -> tuple[float, ...]:
    """a of each rung, by calibration."""
    return tuple(map(_survival, self.expected, self.limits))

  def _rate(self, rung: int, faring: float) -> float:
    """Tokens a unit of time, if levels survive `faring` times as expected."""
    survival = min(faring * self._survival[rung], 1.0)
    return _tokens(survival, self.limits[rung]) / self.costs[rung]

  def _best(self, faring: float) -> int:
    rungs = range(len(self.costs))
    # The smaller one among equals.
    return max(rungs, key=lambda rung: (self._rate(rung, faring), -rung))

  def _probe(self) -> int:
    """The rung that brings the most expected tokens for what it costs more.

    Rung 0 where there is no other.
    """

    def worth(rung: int) -> float:
      extra = self.costs[rung] / self.costs[0] - 1
      return (self.expected[rung] - 1) / max(extra, 0.01)

    rungs = range(1, len(self.costs))
    return max(rungs, key=lambda rung: (worth(rung), -rung), default=0)

  def _first_interval(self) -> int:
    extra = self.costs[self._probe()] / self.costs[0] - 1
    return min(max(math.ceil(extra / _PROBING), _SHORTEST), _LONGEST)

  def begin(self) -> LadderTrack:
    """The track of which nothing is known but the calibration."""
    rung = self._best(1.0) if self.start is None else self.start
    # Never 0, which would leave the ratio open.
    foreseen = _PRIOR * max(self._survival[rung or self._probe()], 1e-6)
    return LadderTrack(
      rung=rung,
      accepted=foreseen,
      foreseen=foreseen,
      patience=0 if self.start is None else _PATIENCE,
      waited=0,
      interval=self._first_interval(),
    )

  def renew(self, track: LadderTrack, share: float = 1.0) -> LadderTrack:
    """The track after some of the rows were given to other texts.

    Args:
      track: before.
      share: of the rows; 1 begins anew.

    Raises:
      ValueError: for a share that is none.
    """
    if not 0 <= share <= 1:
      raise ValueError(f"share is {share}; give 0 to 1")
    fresh = self.begin()
    if share == 1:
      return fresh
    mixed = track._replace(
      accepted=(1 - share) * track.accepted + share * fresh.accepted,
      foreseen=(1 - share) * track.foreseen + share * fresh.foreseen,
      interval=fresh.interval,
    )
    return self._settled(mixed)

  def choose(self, track: LadderTrack) -> tuple[int, LadderTrack]:
    """The rung of the next round.

    Args:
      track: so far.

    Returns:
      The rung, and the track after the choice.

    Example:
      >>> plan = LadderPlan(costs=(1., 1.4), expected=(1., 1.7), limits=(1, 4))
      >>> rung, track = plan.choose(plan.begin())
      >>> for _ in range(20):
      ...   track = plan.observe(track, 1, [1])
      >>> rung, plan.choose(track)[0]
      (1, 0)
    """
    if track.rung or len(self.costs) == 1:
      return track.rung, track
    if track.waited + 1 < track.interval:
      return 0, track._replace(waited=track.waited + 1)
    return self._probe(), track._replace(waited=0)

  def instead(
    self, track: LadderTrack, rung: int, among: Sequence[int]
  ) -> tuple[int, float]:
    """What to use if a rung is not to be had, and what is missed by that.

    Args:
      track: so far.
      rung: that is wanted.
      among: those to be had, at least one.

    Returns:
      The one of them that promises most, and how much time a round of the
      wanted rung would save for its tokens, in rounds of rung 0.

    Example:
      >>> plan = LadderPlan(costs=(1., 1.4), expected=(1., 2.8), limits=(1, 4))
      >>> other, missed = plan.instead(plan.begin(), 1, [0])
      >>> other, round(missed, 3)
      (0, 1.4)
    """
    faring = track.accepted / track.foreseen
    other = max(among, key=lambda each: (self._rate(each, faring), -each))
    gain = self._rate(rung, faring) / self._rate(other, faring) - 1
    return other, max(gain, 0.0) * self.costs[rung] / self.costs[0]

  def observe(
    self, track: LadderTrack, rung: int, tokens: Sequence[int]
  ) -> LadderTrack:
    """The track after a round was read.

    Args:
      track: before.
      rung: which one made the round.
      tokens: that it brought to each row that ran and goes on.

    Raises:
      ValueError: for a rung that there is not, or tokens that no round of it
        brings.
    """
    if not 0 <= rung < len(self.costs):
      raise ValueError(f"rung is {rung}; there are {len(self.costs)}")
    limit = self.limits[rung]
    for count in tokens:
      if not 1 <= count <= limit:
        raise ValueError(
          f"a round of rung {rung} brought {count} tokens; give 1 to {limit}"
        )
    if not rung or not tokens:
      return track
    mean = sum(tokens) / len(tokens)
    interval = track.interval
    if not track.rung:
      # A probe that paid is followed up at once, so that a change is noticed
      # within a few rounds.
      first = self._first_interval()
      if mean > self.costs[rung] / self.costs[0]:
        interval = 1
      elif interval < first:
        interval = first
      else:
        interval = min(2 * interval, _BACK_OFF * first)
    # The level that a walk ends at was tried too, unless it is below a leaf.
    tried = sum(min(count, limit - 1) for count in tokens) / len(tokens)
    keep = 1 - 1 / _WINDOW
    track = track._replace(
      accepted=keep * track.accepted + mean - 1,
      foreseen=keep * track.foreseen + tried * self._survival[rung],
      patience=max(track.patience - 1, 0),
      interval=interval,
    )
    return self._settled(track)

  def _settled(self, track: LadderTrack) -> LadderTrack:
    """Moves to another rung if it promises enough."""
    faring = track.accepted / track.foreseen
    best = self._best(faring)
    margin = _MARGIN if best else _MARGIN_TO_ROOT
    now = self._rate(track.rung, faring)
    if track.patience or self._rate(best, faring) <= margin * now:
      return track
    return track._replace(rung=best, waited=0, interval=self._first_interval())


def _tokens(survival: float, limit: int) -> float:
  return sum(survival**level for level in range(limit))


def _survival(tokens: float, limit: int) -> float:
  """The probability a level that brings so many tokens a round."""
  low, high = 0.0, 1.0
  for _ in range(50):
    middle = (low + high) / 2
    low, high = (
      (middle, high) if _tokens(middle, limit) < tokens else (low, middle)
    )
  return high


def make_plan(
  costs: Sequence[float],
  depths: Sequence[int],
  expected: Sequence[float | None],
  start: int,
) -> LadderPlan:
  """The plan of a ladder, with guesses where calibration says nothing.

  A tree of depth D of which nobody knows more is taken to have at each depth
  a node that is right in three of five cases; the ladder then begins at
  `start` and stays there for some rounds, instead of where it promises most.

  Args:
    costs: of a round at each rung, in any unit.
    depths: D of each rung's tree; 0 for rung 0.
    expected: tokens a round by calibration, None where unknown.
    start: the rung to begin with in that case.

  Example:
    >>> plan = make_plan((1., 1.3), (0, 1), (1., None), 1)
    >>> plan.expected, plan.start
    ((1.0, 1.6), 1)
  """
  guessed = tuple(
    sum(0.6**i for i in range(depth + 1)) if tokens is None else tokens
    for depth, tokens in zip(depths, expected, strict=True)
  )
  return LadderPlan(
    costs=tuple(costs),
    expected=tuple(
      min(max(tokens, 1.0 + 1e-6), depth + 1.0) if depth else 1.0
      for depth, tokens in zip(depths, guessed, strict=True)
    ),
    limits=tuple(depth + 1 for depth in depths),
    start=start if None in expected else None,
  )
