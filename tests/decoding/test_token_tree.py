"""Static trees: from paths, from Medusa's two notations, from widths."""

import itertools

import hypothesis
import hypothesis.strategies as st
import pytest

from ldjax import decoding

TokenTree = decoding.TokenTree

PUBLISHED = (
  "mc_sim_7b_63",
  "vicuna_13b_stage1",
  "vicuna_13b_stage2",
  "vicuna_33b_stage1",
  "vicuna_33b_stage2",
  "vicuna_7b_stage1",
  "vicuna_7b_stage1_ablation",
  "vicuna_7b_stage2",
  "zephyr_stage2",
)


@st.composite
def _paths(draw):
  paths = []
  for _ in range(draw(st.integers(0, 12))):
    parent = draw(st.sampled_from([(), *paths]))
    paths.append((*parent, draw(st.integers(0, 3))))
  return sorted(set(paths), key=lambda path: draw(st.integers(0, 99)))


@hypothesis.given(_paths(), st.randoms())
def test_order_of_the_paths_does_not_matter(paths, random):
  tree = TokenTree.from_paths(paths)
  shuffled = [list(path) for path in paths]
  random.shuffle(shuffled)
  other = TokenTree.from_paths(shuffled)
  assert other == tree and hash(other) == hash(tree) and len({tree, other}) == 1
  assert tree.size == len(paths) + 1
  assert tree.depth == max(map(len, paths), default=0)
  assert tree.parents[0] == -1 and tree.depths[0] == 0 and tree.ranks[0] == 0
  # Follow the parents up: the ranks met spell the path.
  for node, path in enumerate(tree.paths, start=1):
    spelled, at = [], node
    while at:
      assert tree.parents[at] < at
      assert tree.depths[at] == tree.depths[tree.parents[at]] + 1
      spelled.insert(0, tree.ranks[at])
      at = tree.parents[at]
    assert tuple(spelled) == path


@pytest.mark.parametrize(
  ("paths", "message"),
  [
    ([(0,), (1, 0)], r"\(1, 0\) stands before or without its parent \(1,\)"),
    ([(0,), (0, 0), (0,)], r"\(0,\) is there twice"),
    ([(0,), (0, -1)], r"\(0, -1\) holds a negative rank"),
    ([(), (0,)], "a path is empty"),
  ],
)
def test_paths_that_are_no_tree(paths, message):
  with pytest.raises(ValueError, match=message):
    TokenTree.from_paths(paths)


def test_parents_must_come_first():
  with pytest.raises(ValueError, match=r"from_paths"):
    TokenTree(((0, 0), (0,)))


def test_chain_and_root():
  assert TokenTree.chain(3).parents == (-1, 0, 1, 2)
  assert TokenTree.chain(3).ranks == (0, 0, 0, 0)
  assert TokenTree.chain(0) == TokenTree.root_only() == TokenTree.from_paths([])
  assert (TokenTree.root_only().size, TokenTree.root_only().depth) == (1, 0)
  with pytest.raises(ValueError, match="depth -1"):
    TokenTree.chain(-1)


@pytest.mark.parametrize("widths", [[1], [3], [2, 3], [1, 1, 1], [2, 1, 3]])
def test_product_is_the_enumeration(widths):
  tree = TokenTree.product(widths)
  paths = {
    path
    for path in itertools.chain.from_iterable(
      itertools.product(range(5), repeat=n) for n in range(1, len(widths) + 1)
    )
    if all(rank < width for rank, width in zip(path, widths, strict=False))
  }
  assert set(tree.paths) == paths and tree.size == len(paths) + 1


def test_product_errors():
  for widths in ([], [2, 0]):
    with pytest.raises(ValueError, match="at least"):
      TokenTree.product(widths)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_lists(name):
  tree = TokenTree.medusa(name)
  assert tree.size == 64
  assert tree.depth == (3 if name == "vicuna_33b_stage1" else 4)
  assert all(path[:-1] in {(), *tree.paths} for path in tree.paths)
  assert tree is not TokenTree.medusa(name) and tree == TokenTree.medusa(name)


def test_a_published_list_by_hand():
  # medusa_choices.py of FasterDecoding/Medusa, typed from the page.
  text = """
    0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09
    8 9 100 020 12 003 40 21 004 005 0000 011 006 030 50 13 007 008 009 60 040
    14 70 012 200 31 22 80 050 15 101 021 90 060 0001 16 070
  """
  paths = [tuple(map(int, word)) for word in text.split()]
  assert TokenTree.medusa("mc_sim_7b_63") == TokenTree.from_paths(paths)


def test_unknown_name_lists_the_known():
  with pytest.raises(ValueError, match="'mc_sim_8b'") as error:
    TokenTree.medusa("mc_sim_8b")
  for name in PUBLISHED:
    assert name in str(error.value)


def test_older_notation():
  # Medusa's first format: widths, after a 1 for the root's own token.
  assert TokenTree.medusa([1, 7, 6]) == TokenTree.product([7, 6])
  assert TokenTree.medusa([1, 7, 6]).size == 1 + 7 + 42
  assert TokenTree.medusa([1]) == TokenTree.root_only()
  assert TokenTree.medusa([[0], [0, 0]]) == TokenTree.chain(2)
  for widths in ([7, 6], [0, 3]):
    with pytest.raises(ValueError, match="must be 1"):
      TokenTree.medusa(widths)
