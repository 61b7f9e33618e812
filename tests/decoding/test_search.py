"""The best tree of a size, against all trees of that size."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from ldjax import decoding

TokenTree = decoding.TokenTree


def _all_trees(depth, ranks, size):
  """Every prefix-closed set of `size - 1` paths, by growing one at a time."""
  trees = {frozenset()}
  for _ in range(size - 1):
    trees = {
      tree | {(*path, rank)}
      for tree in trees
      for path in [(), *tree]
      if len(path) < depth
      for rank in range(ranks)
      if (*path, rank) not in tree
    }
  return trees


def _value(paths, acceptance):
  return 1 + sum(
    float(np.prod([acceptance[d][rank] for d, rank in enumerate(path)]))
    for path in paths
  )


@st.composite
def _rates(draw):
  depth, ranks = draw(st.integers(1, 3)), draw(st.integers(1, 3))
  rows = []
  for _ in range(depth):
    row = [draw(st.integers(0, 9)) for _ in range(ranks)]
    rows.append([x / max(sum(row), draw(st.integers(1, 20))) for x in row])
  return np.array(rows)


@hypothesis.given(_rates(), st.integers(1, 5))
def test_no_tree_of_the_size_is_better(acceptance, size):
  depth, ranks = acceptance.shape
  got = decoding.best_tree(acceptance, size)
  assert got.size <= size and got.depth <= depth
  expected = decoding.expected_length(got, acceptance)
  assert expected == pytest.approx(_value(got.paths, acceptance), rel=1e-12)
  trees = _all_trees(depth, ranks, size)
  values = [_value(tree, acceptance) for tree in trees]
  if not trees:  # there are not so many nodes
    values = [_value(_whole(depth, ranks), acceptance)]
  assert expected == pytest.approx(max(values), rel=1e-12)
  # No node that would never be accepted, and none missing that would.
  for path in got.paths:
    assert np.prod([acceptance[d, rank] for d, rank in enumerate(path)]) > 0
  assert got.size == size or expected == pytest.approx(
    _value(_whole(depth, ranks), acceptance), rel=1e-12
  )


def _whole(depth, ranks):
  return TokenTree.product([ranks] * depth).paths


def test_by_hand():
  acceptance = np.array([[0.5, 0.25, 0.125], [0.5, 0.25, 0.0]])
  # Worth: 0 1/2; 1 1/4; 00 1/4; 2 1/8; 01 1/8; 10 1/8. Of equals the shallower.
  best = [decoding.best_tree(acceptance, size).paths for size in range(1, 6)]
  assert best == [
    (),
    ((0,),),
    ((0,), (1,)),
    ((0,), (1,), (0, 0)),
    ((0,), (1,), (2,), (0, 0)),
  ]
  tree = decoding.best_tree(acceptance, 7)
  assert decoding.expected_length(tree, acceptance) == 1 + 1 + 3 / 8
  assert decoding.best_tree(acceptance, 4, max_depth=1).depth == 1
  assert decoding.best_tree(acceptance, 4, max_depth=0).size == 1
  assert decoding.best_tree(acceptance, 4, max_depth=9).depth == 2


def test_a_better_rank_may_come_later():
  # Rates that were counted are noisy: rank 1 may fare better than rank 0.
  acceptance = np.array([[0.2, 0.4], [0.1, 0.6]])
  assert decoding.best_tree(acceptance, 3).paths == ((1,), (1, 1))


@pytest.mark.parametrize("size", [2, 17, 64])
def test_wide_rates_are_quick(size):
  rng = np.random.default_rng(0)
  rates = rng.dirichlet(np.ones(50), 5)
  tree = decoding.best_tree(rates.astype(np.float32), size)
  assert tree.size == size
  assert 1 < decoding.expected_length(tree, rates) < 6


@pytest.mark.parametrize(
  ("acceptance", "size", "message"),
  [
    ([0.5], 3, r"shape \(1,\)"),
    (np.zeros((0, 3)), 3, r"shape \(0, 3\)"),
    ([[0.5, -0.1]], 3, r"acceptance\[0, 1\] is -0.1"),
    ([[0.5], [1.5]], 3, r"acceptance\[1, 0\] is 1.5"),
    ([[np.nan]], 3, r"acceptance\[0, 0\] is nan"),
    ([[0.5, 0.2], [0.75, 0.5]], 3, r"acceptance\[1\] sums to 1.25"),
    ([[0.5]], 0, "size is 0"),
  ],
)
def test_errors(acceptance, size, message):
  with pytest.raises(ValueError, match=message):
    decoding.best_tree(acceptance, size)
  if size:
    with pytest.raises(ValueError, match=message):
      decoding.expected_length(TokenTree.root_only(), acceptance)


def test_trees_that_the_rates_do_not_cover():
  rates = np.array([[0.5, 0.25]])
  with pytest.raises(ValueError, match="2 deep but acceptance has 1 rows"):
    decoding.expected_length(TokenTree.chain(2), rates)
  with pytest.raises(ValueError, match="ranks 3 tokens but acceptance has 2"):
    decoding.expected_length(TokenTree.product([3]), rates)
  with pytest.raises(ValueError, match="max_depth is -1"):
    decoding.best_tree(rates, 3, max_depth=-1)
