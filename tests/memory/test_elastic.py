"""Pool, tables and prefix index together, as a state machine.

What a position must hold is a number made of all tokens up to it, so that a
page that is found behind the wrong prefix shows.
"""

import functools

import hypothesis
import hypothesis.stateful as stateful
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from ldjax import memory

_BATCH, _COLUMNS, _SIZE = 3, 5, 2
_SIZES = (5, 8, 11)
_WIDTH = 4

_commit = jax.jit(lambda cache, *args: cache.commit(*args), donate_argnums=0)
_release = jax.jit(lambda cache, mask: cache.release(mask), donate_argnums=0)
_share = jax.jit(lambda cache, *args: cache.share(*args), donate_argnums=0)
_take = jax.jit(lambda cache, row: cache.take(row))
_put = jax.jit(lambda cache, *args: cache.put(*args), donate_argnums=0)
_hold = jax.jit(lambda pool, pages: pool.retain(pages), donate_argnums=0)
_let_go = jax.jit(lambda pool, pages: pool.release(pages), donate_argnums=0)


def _marks(tokens):
  """A number for each position that tells all tokens up to it."""
  marks, mark = [], 0
  for token in tokens:
    mark = (mark * 31 + token + 1) % 65521
    marks.append(mark)
  return marks


@functools.lru_cache
def _empty(num_pages):
  return memory.PagedKVCache.create(
    batch=_BATCH,
    max_len=_COLUMNS * _SIZE,
    num_layers=2,
    num_kv_heads=1,
    head_dim=1,
    page_size=_SIZE,
    num_pages=num_pages,
  )


class ElasticMachine(stateful.RuleBasedStateMachine):
  """Rows are lists of tokens; a parked row keeps its contents outside."""

  def __init__(self):
    super().__init__()
    self.cache = jax.tree.map(jnp.copy, _empty(_SIZES[0]))
    self.index = memory.PrefixIndex(page_size=_SIZE, salt="a model")
    self.rows = [[] for _ in range(_BATCH)]
    self.parked = {}

  def _padded(self, pages):
    total = self.cache.pool.num_pages
    row = np.full(_SIZES[-1], total, np.int32)
    row[: len(pages)] = pages
    return row

  def _append(self, row, tokens):
    """Commits tokens to a row; whether there was room."""
    marks = _marks(self.rows[row] + tokens)[len(self.rows[row]) :]
    block = np.full((1, _WIDTH, 1, 2), np.nan, np.float32)
    block[0, : len(marks), 0] = np.array(marks, np.float32)[:, None]
    self.cache, ok = _commit(
      self.cache,
      (block, -block),
      np.arange(_WIDTH, dtype=np.int32)[None],
      np.array([len(tokens)], np.int32),
      np.array([row], np.int32),
    )
    if ok[0]:
      self.rows[row] = self.rows[row] + tokens
    return bool(ok[0])

  def _free(self):
    return int(self.cache.pool.num_free)

  def _live(self):
    return [
      row
      for row, tokens in enumerate(self.rows)
      if tokens and row not in self.parked
    ]

  # Hypothesis leaves whole rules out of an example: without a first row, an
  # example that lacks `begin` would do nothing at all.
  @stateful.initialize(
    prompt=st.lists(st.integers(0, 1), min_size=3, max_size=9),
    noted=st.booleans(),
  )
  def begin_first(self, prompt, noted):
    self.begin(pick=0, prompt=prompt)
    if noted:
      self.note(row=0)

  @stateful.precondition(lambda self: not all(self.rows))
  @stateful.rule(
    pick=st.integers(0, 5),
    prompt=st.lists(st.integers(0, 1), min_size=1, max_size=9),
  )
  def begin(self, pick, prompt):
    empty = [row for row, tokens in enumerate(self.rows) if not tokens]
    row = empty[pick % len(empty)]
    pages = self.index.match(prompt)
    assert len(pages) * _SIZE < len(prompt)
    if pages:
      before = self._free()
      table = self._padded(pages)[:_COLUMNS]
      self.cache = _share(
        self.cache, np.int32(row), table, np.int32(len(pages))
      )
      self.rows[row] = prompt[: len(pages) * _SIZE]
      assert self._free() == before
    rest = prompt[len(self.rows[row]) :]
    for i in range(0, len(rest), _WIDTH):
      if not self._append(row, rest[i : i + _WIDTH]):
        break

  @stateful.precondition(lambda self: self._live())
  @stateful.rule(
    pick=st.integers(0, 5),
    tokens=st.lists(st.integers(0, 1), min_size=1, max_size=_WIDTH),
  )
  def go_on(self, pick, tokens):
    row = self._live()[pick % len(self._live())]
    length = len(self.rows[row])
    needed = -(-(length + len(tokens)) // _SIZE) - -(-length // _SIZE)
    fits = length + len(tokens) <= _COLUMNS * _SIZE
    want = fits and needed <= self._free()
    assert self._append(row, tokens) == want

  @stateful.rule(row=st.integers(0, _BATCH - 1))
  def end(self, row):
    self.cache = _release(self.cache, np.arange(_BATCH) == row)
    self.rows[row] = []
    self.parked.pop(row, None)

  @stateful.rule(row=st.integers(0, _BATCH - 1))
  def note(self, row):
    if row in self.parked:
      return
    table = np.asarray(self.cache.block_table)[row]
    new = self.index.insert(self.rows[row], table.tolist())
    self.cache = self.cache.replace(
      pool=_hold(self.cache.pool, self._padded(new))
    )

  @stateful.rule(count=st.integers(0, 4))
  def drop(self, count):
    references = np.asarray(self.cache.pool.references)
    before = len(self.index)
    unused = sum(references[page] == 1 for page in self.index.pages)
    gone = self.index.drop(count, references)
    assert len(gone) == min(count, unused) == before - len(self.index)
    free = self._free()
    self.cache = self.cache.replace(
      pool=_let_go(self.cache.pool, self._padded(gone))
    )
    assert self._free() == free + len(gone)

  @stateful.rule(size=st.sampled_from(_SIZES))
  def resize(self, size):
    held = self.cache.pool.num_pages - self._free()
    if size < held:
      before = jax.tree.leaves(self.cache)
      with pytest.raises(ValueError, match=f"is {size}, but {held} pages"):
        memory.resize(self.cache, size)
      assert not any(x.is_deleted() for x in before)
      return
    old = self.cache.pages
    self.cache, moved = memory.resize(self.cache, size)
    assert all(x.is_deleted() for x in old)
    self.index.renumber(moved)

  @stateful.precondition(lambda self: self._live())
  @stateful.rule(pick=st.integers(0, 5))
  def park(self, pick):
    row = self._live()[pick % len(self._live())]
    self.parked[row] = jax.device_get(_take(self.cache, np.int32(row)))
    self.cache = _release(self.cache, np.arange(_BATCH) == row)

  @stateful.precondition(lambda self: self.parked)
  @stateful.rule(pick=st.integers(0, 5))
  def come_back(self, pick):
    row = sorted(self.parked)[pick % len(self.parked)]
    length = len(self.rows[row])
    want = -(-length // _SIZE) <= self._free()
    self.cache, ok = _put(
      self.cache, np.int32(row), self.parked[row], np.int32(length)
    )
    assert bool(ok) == want
    if ok:
      del self.parked[row]

  @stateful.invariant()
  def all_is_accounted_for(self):
    cache = jax.device_get(self.cache)
    total = cache.pool.references.shape[0]
    counts = np.zeros(total, np.int32)
    np.add.at(counts, self.index.pages, 1)
    positions, expected = set(), np.zeros((total, _SIZE), np.float32)
    seen = np.zeros((total, _SIZE), bool)
    for row, tokens in enumerate(self.rows):
      inside = [] if row in self.parked else tokens
      live = -(-len(inside) // _SIZE)
      table = cache.block_table[row]
      assert cache.length[row] == len(inside)
      assert (table[:live] < total).all() and (table[live:] == total).all()
      np.add.at(counts, table[:live], 1)
      for i, mark in enumerate(_marks(inside)):
        slot = table[i // _SIZE], i % _SIZE
        # Rows that share a page agree on what it holds.
        assert slot not in positions or expected[slot] == mark
        positions.add(slot)
        expected[slot] = mark
        seen[slot] = True
    for layer, sign in zip(cache.pages, (1, -1), strict=True):
      held = layer[:, 0][seen]
      want = np.repeat(sign * expected[seen][:, None], 2, axis=1)
      assert (held == want).all(), (held, want)
    assert (cache.pool.references == counts).all(), counts

    positions |= {(p, z) for p in self.index.pages for z in range(_SIZE)}
    stats = memory.cache_stats(self.cache)
    held = int((counts > 0).sum())
    assert (stats.pages, stats.free) == (total, total - held)
    assert stats.shared == (counts > 1).sum()
    assert stats.positions == len(positions)
    slots = held * _SIZE
    assert stats.waste == (1 - len(positions) / slots if held else 0.0)


TestElastic = ElasticMachine.TestCase
TestElastic.settings = hypothesis.settings(
  max_examples=15, stateful_step_count=25, deadline=None
)


@pytest.mark.slow
class TestElasticAtLength(ElasticMachine.TestCase):
  """50,000 operations, most of which do something."""

  settings = hypothesis.settings(
    max_examples=500,
    stateful_step_count=100,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
  )
