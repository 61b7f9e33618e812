"""The choice among rungs, on streams whose best rung is known."""

import itertools
import math

import numpy as np
import pytest

from ldjax import optimize

# The demo model's costs on two cores, and an n-gram's calibration.
COSTS = (1.0, 1.30, 1.37, 1.58, 2.26)
SIZES = (1, 2, 4, 8, 16)


def geometric(rate, size):
  return sum(rate**i for i in range(size))


@pytest.fixture
def plan():
  """A chain draft that is right in 6 of 10 cases."""
  return optimize.LadderPlan(
    costs=COSTS,
    expected=tuple(geometric(0.6, size) for size in SIZES),
    limits=SIZES,
  )


def play(plan, bring, rounds, track=None):
  """Decodes `rounds` rounds, each read one late; rungs, tokens and track.

  `bring(rung, number)` is the number of tokens that a round brings.
  """
  track = plan.begin() if track is None else track
  rungs, tokens, unread = [], [], None
  for number in range(rounds):
    rung, track = plan.choose(track)
    rungs.append(rung)
    tokens.append(bring(rung, number))
    if unread is not None:
      track = plan.observe(track, *unread)
    unread = rung, [tokens[-1]]
  return rungs, tokens, track


def chain(rate, seed=0):
  """A stream of tokens of which each guess is right with one probability."""
  rng = np.random.default_rng(seed)

  def bring(rung, number):
    del number
    right = rng.random(SIZES[rung] - 1) < rate if rung else np.zeros(0, bool)
    return 1 + int(np.cumprod(right).sum())

  return bring


def seconds(rungs):
  return sum(COSTS[rung] for rung in rungs)


class TestBegin:
  def test_by_calibration_and_cost(self, plan):
    rates = [geometric(0.6, s) / c for s, c in zip(SIZES, COSTS, strict=True)]
    assert plan.begin().rung == int(np.argmax(rates)) == 2

  def test_at_the_root_if_nothing_pays(self):
    plan = optimize.LadderPlan(
      costs=(1.0, 1.3), expected=(1.0, 1.2), limits=(1, 2)
    )
    assert plan.begin().rung == 0

  def test_where_it_is_told_to_for_some_rounds(self):
    plan = optimize.make_plan((1.0, 9.0), (0, 3), (1.0, None), 1)
    rungs, _, _ = play(plan, lambda rung, number: 1, 40)
    assert rungs[:4] == [1] * 4
    assert rungs[6:30] == [0] * 24

  def test_one_rung_is_always_that(self):
    plan = optimize.LadderPlan(costs=(2.0,), expected=(1.0,), limits=(1,))
    rungs, _, track = play(plan, lambda rung, number: 1, 50)
    assert rungs == [0] * 50
    assert plan.renew(track, 0.5).rung == 0


class TestStreams:
  @pytest.mark.parametrize("rate", [0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0])
  def test_near_the_best_fixed_rung(self, plan, rate):
    rungs, tokens, _ = play(plan, chain(rate), 2000)
    have = sum(tokens) / seconds(rungs)
    best = max(
      geometric(rate, size) / cost
      for size, cost in zip(SIZES, COSTS, strict=True)
    )
    # Learning and probing cost a little.
    assert have > 0.95 * best

  @pytest.mark.parametrize("rate", [0.5, 0.6, 0.75])
  def test_it_does_not_flap(self, plan, rate):
    rungs, _, _ = play(plan, chain(rate), 1000)
    changes = sum(a != b for a, b in itertools.pairwise(rungs))
    assert changes < 100

  def test_what_the_next_rung_does_not_bring_is_not_kept(self, plan):
    # Eight tokens a round at most. That 16 nodes bring no more than 8 do,
    # nobody can know who does not try; then they are left again.
    rungs, tokens, _ = play(plan, lambda rung, _: min(SIZES[rung], 8), 400)
    assert {3, 4} == set(rungs[60:])
    assert sum(tokens[60:]) / seconds(rungs[60:]) > 8 / COSTS[4]

  def test_changes_of_the_text_are_followed(self, plan):
    good, bad = chain(0.95), chain(0.0)

    def bring(rung, number):
      return (good if number // 300 % 2 else bad)(rung, number)

    rungs, tokens, _ = play(plan, bring, 1200)
    assert np.mean(np.array(rungs[100:300]) == 0) > 0.9
    assert np.mean(np.array(rungs[500:600]) >= 3) > 0.9
    assert np.mean(np.array(rungs[800:900]) == 0) > 0.9
    assert sum(tokens) / seconds(rungs) > 1.5  # plain decoding: 1

  def test_probing_costs_two_percent_at_most(self, plan):
    rungs, _, _ = play(plan, lambda rung, number: 1, 4000)
    tail = rungs[100:]
    assert sum(rung > 0 for rung in tail) > 0
    assert seconds(tail) / len(tail) < 1.02
    # The wait between probes doubles, up to a bound.
    probes = np.flatnonzero(np.array(tail))
    waits = np.diff(probes)
    assert waits[-1] == waits[-2] >= 4 * 19
    assert sorted(waits) == list(waits)

  def test_a_probe_that_pays_is_followed_up_at_once(self, plan):
    rungs, _, track = play(plan, lambda rung, number: 1, 300)
    assert track.rung == 0
    rungs, _, track = play(plan, lambda rung, number: SIZES[rung], 200, track)
    first = rungs.index(2)
    assert rungs[first : first + 12].count(0) <= 4
    assert track.rung > 0

  def test_a_round_counts_for_the_rung_that_made_it(self, plan):
    # Two tokens at 16 nodes: one of two levels tried was survived. Two at 2
    # nodes: the only one was.
    wide = narrow = plan.begin()
    for _ in range(99):
      wide = plan.observe(wide, 4, [2])
      narrow = plan.observe(narrow, 1, [2])
    assert wide.accepted / wide.foreseen == pytest.approx(0.5 / 0.6, rel=1e-3)
    assert narrow.accepted / narrow.foreseen == pytest.approx(1 / 0.6, rel=1e-3)

  def test_rows_of_a_batch_count_together(self, plan):
    track = plan.begin()
    for _ in range(99):
      track = plan.observe(track, 2, [1, 4, 2])
    # Levels survived 0, 3 and 1; tried 1, 3 and 2.
    have = track.accepted / track.foreseen
    assert have == pytest.approx((4 / 6) / 0.6, rel=1e-3)

  def test_nothing_is_learnt_from_a_plain_round(self, plan):
    track = plan.begin()
    assert plan.observe(track, 0, [1]) == track
    assert plan.observe(track, 2, []) == track

  def test_it_is_a_pure_function(self, plan):
    one = play(plan, chain(0.5, seed=3), 200)
    two = play(plan, chain(0.5, seed=3), 200)
    assert one == two


class TestRenew:
  def test_all_rows(self, plan):
    _, _, track = play(plan, lambda rung, number: 1, 300)
    assert track.rung == 0
    assert plan.renew(track) == plan.begin()

  def test_some_rows(self, plan):
    _, _, track = play(plan, lambda rung, number: 1, 300)
    assert plan.renew(track, 0.0).rung == 0
    half = plan.renew(track, 0.5)
    assert half.accepted == pytest.approx(
      (track.accepted + plan.begin().accepted) / 2
    )
    assert half.interval <= track.interval

  @pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
  def test_no_share(self, plan, share):
    with pytest.raises(ValueError, match="share is"):
      plan.renew(plan.begin(), share)


class TestChecks:
  @pytest.mark.parametrize(
    ("fields", "message"),
    [
      ({"costs": (1.0,)}, "ladder of 1 costs, 2 expectations and 2 limits"),
      ({"costs": (), "expected": (), "limits": ()}, "ladder of 0 costs"),
      ({"costs": (1.0, 0.0)}, "cost 0.0 of rung 1"),
      ({"costs": (1.0, math.nan)}, "cost nan of rung 1"),
      ({"costs": (math.inf, 1.0)}, "cost inf of rung 0"),
      ({"expected": (1.5, 1.5)}, "rung 0 expects 1.5"),
      ({"limits": (2, 2)}, "rung 0 expects"),
      ({"expected": (1.0, 1.0)}, "rung 1 expects 1.0 tokens"),
      ({"expected": (1.0, 2.1)}, "above 1, and 2 at most"),
      ({"expected": (1.0, math.nan)}, "rung 1 expects nan"),
      ({"start": 2}, "start is 2; there are 2"),
      ({"start": -1}, "start is -1"),
    ],
  )
  def test_figures_that_cannot_be(self, fields, message):
    good = {"costs": (1.0, 1.5), "expected": (1.0, 1.7), "limits": (1, 2)}
    optimize.LadderPlan(**good)
    with pytest.raises(ValueError, match=message):
      optimize.LadderPlan(**{**good, **fields})

  @pytest.mark.parametrize("rung", [-1, 5])
  def test_no_rung(self, plan, rung):
    with pytest.raises(ValueError, match=f"rung is {rung}; there are 5"):
      plan.observe(plan.begin(), rung, [1])

  @pytest.mark.parametrize(
    ("rung", "tokens"), [(2, [0]), (2, [1, -1]), (2, [5]), (0, [2])]
  )
  def test_no_round_brings_so_many(self, plan, rung, tokens):
    with pytest.raises(ValueError, match=f"rung {rung} brought {tokens[-1]} t"):
      plan.observe(plan.begin(), rung, tokens)


class TestMakePlan:
  def test_known(self):
    plan = optimize.make_plan((1, 2, 3), (0, 1, 3), (1.0, 1.5, 2.5), 2)
    assert plan.expected == (1.0, 1.5, 2.5)
    assert plan.limits == (1, 2, 4)
    assert plan.start is None

  def test_unknown(self):
    plan = optimize.make_plan((1, 2, 3), (0, 1, 3), (1.0, None, None), 2)
    assert plan.expected == pytest.approx((1.0, 1.6, 1 + 0.6 + 0.36 + 0.216))
    assert (plan.start, plan.begin().rung) == (2, 2)

  def test_calibration_that_promises_nothing_or_too_much(self):
    # Acceptances of 0 are a calibration too.
    plan = optimize.make_plan((1, 2, 3), (0, 1, 1), (1.0, 1.0, 7.0), 1)
    assert plan.begin().rung == 0
    assert 1 < plan.expected[1] < 1.001
    assert plan.expected[2] == 2
    rungs, _, _ = play(plan, lambda rung, number: 1, 200)
    assert set(rungs) <= {0, 1, 2}
