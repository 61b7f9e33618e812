"""The best speed by acceptance, against an enumeration by hand."""

import pytest

from ldjax import optimize

CURVE = optimize.CostCurve(
  sizes=(1, 2, 4, 8, 16),
  seconds=(1.0, 1.35, 1.45, 1.75, 2.6),
  draft_seconds=(0.0, 0.05, 0.08, 0.17, 0.34),
  batch=1,
  device="cpu",
  model="m",
)


def test_chains():
  rates = (0.0, 0.35, 0.6, 0.8, 0.95, 1.0)
  found = optimize.chain_ceiling(CURVE, rates)
  assert [each.acceptance for each in found] == list(rates)
  for rate, each in zip(rates, found, strict=True):
    speeds, free = {}, {}
    for size in range(1, 17):
      tokens = 1 + sum(rate**i for i in range(1, size))
      speeds[size] = tokens / CURVE.at(size)
      free[size] = tokens / (CURVE.at(size) - CURVE.draft_at(size))
    assert each.speedup == pytest.approx(max(speeds.values()))
    assert each.speedup == pytest.approx(speeds[each.size])
    assert each.free_speedup == pytest.approx(max(free.values()))
    assert each.free_speedup == pytest.approx(free[each.free_size])
    assert each.tokens == pytest.approx(sum(rate**i for i in range(each.size)))
    assert each.free_speedup >= each.speedup >= 1
  assert (found[0].size, found[0].tokens, found[0].speedup) == (1, 1.0, 1.0)
  assert (found[-1].size, found[-1].tokens) == (16, 16.0)
  speedups = [each.speedup for each in found]
  assert speedups == sorted(speedups)


def test_default_rates():
  assert len(optimize.chain_ceiling(CURVE)) == 8


@pytest.mark.parametrize("rate", [-0.01, 1.01, float("nan")])
def test_no_rate(rate):
  with pytest.raises(ValueError, match="give 0 to 1"):
    optimize.chain_ceiling(CURVE, [0.5, rate])


def test_a_tree_of_one_rank_is_a_chain():
  have = optimize.tree_ceiling(CURVE, [[0.8]] * 15)
  [want] = optimize.chain_ceiling(CURVE, [0.8])
  assert have == pytest.approx(want)


def test_second_guesses_help():
  [chain] = optimize.chain_ceiling(CURVE, [0.6])
  tree = optimize.tree_ceiling(CURVE, [[0.6, 0.2, 0.1]] * 15)
  assert tree.acceptance == 0.6
  assert tree.speedup > chain.speedup


def test_fewer_nodes_than_the_curve_goes():
  # Only a root, two children and four grandchildren can be.
  tree = optimize.tree_ceiling(CURVE, [[0.6, 0.3], [0.6, 0.3]])
  assert 1 < tree.size <= 7
