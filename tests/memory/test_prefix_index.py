"""The prefix index against a list of sequences."""

import hypothesis
import numpy as np
from hypothesis import strategies as st

from ldjax import memory

_tokens = st.lists(st.integers(0, 1), max_size=9)


@hypothesis.given(st.lists(_tokens, max_size=6), _tokens)
def test_the_longest_known_prefix(known, wanted):
  index = memory.PrefixIndex(page_size=2)
  pages = {}  # prefix of full pages -> page
  for i, tokens in enumerate(known):
    index.insert(tokens, [10 * i + j for j in range(5)])
    for j in range(len(tokens) // 2):
      pages.setdefault(tuple(tokens[: 2 * j + 2]), 10 * i + j)
  want = []
  for j in range(max(len(wanted) - 1, 0) // 2):
    page = pages.get(tuple(wanted[: 2 * j + 2]))
    if page is None:
      break
    want.append(page)
  assert index.match(wanted) == want
  assert sorted(index.pages) == sorted(pages.values())


def test_another_salt_knows_nothing():
  tokens, found = [1, 2, 3, 4, 5], []
  for salt in ("a model", "another", "a model"):
    index = memory.PrefixIndex(page_size=2, salt=salt)
    index.insert(tokens, [0, 1])
    found.append(next(iter(index._pages)))
  assert found[0] == found[2] != found[1]


def test_the_least_recently_used_goes_first_and_a_page_before_its_prefix():
  index = memory.PrefixIndex(page_size=1)
  index.insert([1, 2, 3], [0, 1, 2])
  index.insert([1, 5], [0, 3])
  index.match([1, 2, 3, 9])
  references = np.ones(4, np.int32)
  assert index.drop(9, references + (np.arange(4) == 1)) == [3, 2, 0]
  assert index.pages == [1]  # somebody holds it
  assert index.match([1, 2, 3]) == []  # and nothing leads to it
  assert index.drop(1, references) == [1]
  assert len(index) == 0


def test_drop_takes_no_more_than_asked():
  index = memory.PrefixIndex(page_size=1)
  index.insert([1, 2, 3], [0, 1, 2])
  assert index.drop(0, np.ones(3, np.int32)) == []
  assert index.drop(-1, np.ones(3, np.int32)) == []
  assert index.drop(2, np.ones(3, np.int32)) == [2, 1]
