"""The page pool as a state machine, against a dict of counts."""

import hypothesis
import hypothesis.stateful as stateful
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from ldjax import memory

_PAGES, _ROWS, _WIDTH = 7, 3, 3

_allocate = jax.jit(
  lambda pool, counts, width: pool.allocate(counts, width), static_argnums=2
)
_retain = jax.jit(lambda pool, pages: pool.retain(pages))
_release = jax.jit(lambda pool, pages: pool.release(pages))


def _padded(pages):
  """One shape for any number of pages; P and more are skipped."""
  row = np.full(_PAGES, _PAGES, np.int32)
  row[: len(pages)] = pages
  row[len(pages) :] += np.arange(_PAGES - len(pages), dtype=np.int32)
  return row


class PoolMachine(stateful.RuleBasedStateMachine):
  """Holders are lists of pages; a page's count is how many hold it."""

  def __init__(self):
    super().__init__()
    self.pool = memory.PagePool.create(_PAGES)
    self.holders = []

  @stateful.rule(
    counts=st.lists(st.integers(0, _WIDTH + 1), min_size=_ROWS, max_size=_ROWS)
  )
  def allocate(self, counts):
    held = {page for pages in self.holders for page in pages}
    left = _PAGES - len(held)
    self.pool, pages, ok = _allocate(
      self.pool, np.array(counts, np.int32), _WIDTH
    )
    pages, given = np.asarray(pages), set()
    for row, count in enumerate(counts):
      want = count <= left and count <= _WIDTH
      assert bool(ok[row]) == want
      got = pages[row][pages[row] < _PAGES].tolist()
      if not want:
        assert got == []
        continue
      left -= count
      assert len(got) == len(set(got)) == count
      # In front, so that they are the next entries of a block table.
      assert pages[row, :count].tolist() == got
      assert not set(got) & (held | given)
      given |= set(got)
      if got:
        self.holders.append(got)

  @stateful.precondition(lambda self: self.holders)
  @stateful.rule(data=st.data())
  def share(self, data):
    pages = data.draw(st.sampled_from(self.holders))
    self.pool = _retain(self.pool, _padded(pages))
    self.holders.append(list(pages))

  @stateful.precondition(lambda self: self.holders)
  @stateful.rule(data=st.data())
  def let_go(self, data):
    index = data.draw(st.integers(0, len(self.holders) - 1))
    self.pool = _release(self.pool, _padded(self.holders.pop(index)))

  @stateful.invariant()
  def free_and_held_are_all(self):
    want = np.zeros(_PAGES, np.int32)
    for pages in self.holders:
      want[pages] += 1
    np.testing.assert_array_equal(self.pool.references, want)
    assert int(self.pool.num_free) == (want == 0).sum()


TestPool = PoolMachine.TestCase
TestPool.settings = hypothesis.settings(
  max_examples=30, stateful_step_count=20, deadline=None
)


def test_exhaustion_hands_out_nothing_and_says_so():
  pool = memory.PagePool.create(5)
  pool, pages, ok = _allocate(pool, jnp.array([2, 4, 3, 1]), 4)
  # The second asks for more than is left; those after it are still served.
  assert ok.tolist() == [True, False, True, False]
  assert pages.tolist() == [[0, 1, 5, 5], [5] * 4, [2, 3, 4, 5], [5] * 4]
  assert int(pool.num_free) == 0
  same, pages, ok = _allocate(pool, jnp.array([1, 0]), 4)
  assert ok.tolist() == [False, True]  # nothing is always to be had
  assert (np.asarray(pages) == 5).all()
  np.testing.assert_array_equal(same.references, pool.references)
  pool = pool.release(jnp.array([3]))
  pool, pages, ok = _allocate(pool, jnp.array([2, 1]), 2)
  assert ok.tolist() == [False, True]
  assert pages.tolist() == [[5, 5], [3, 5]]


def test_a_shared_page_is_free_when_its_last_holder_leaves():
  pool, _, _ = _allocate(memory.PagePool.create(3), jnp.array([2]), 2)
  pool = pool.retain(jnp.array([1, 3]))
  assert pool.references.tolist() == [1, 2, 0]
  pool = pool.release(jnp.array([[0, 1], [3, 4]]))
  assert pool.references.tolist() == [0, 1, 0]
  pool, pages, ok = _allocate(pool, jnp.array([3, 2]), 3)
  assert (ok.tolist(), pages[1].tolist()) == ([False, True], [0, 2, 3])
  assert int(pool.release(jnp.array([0, 1, 2])).num_free) == 3


@pytest.mark.parametrize("num_pages", [0, -1])
def test_a_pool_of_nothing(num_pages):
  with pytest.raises(ValueError, match=f"num_pages is {num_pages}; .* 1"):
    memory.PagePool.create(num_pages)
