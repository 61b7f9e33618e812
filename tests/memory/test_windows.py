"""Rings of pages and groups of layers against lists of what tokens see."""

import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from ldjax import memory

_BATCH, _HEADS, _HEAD_DIM, _SIZE, _MAX_LEN = 3, 1, 2, 3, 33
_NODES, _DEPTH = 11, 9  # T and D+1: wider than most windows
_WINDOWS = (2, None, 7, 2, None)

_commit = jax.jit(lambda cache, *args: cache.commit(*args))
_view = jax.jit(lambda cache: cache.view())
_release = jax.jit(lambda cache, mask: cache.release(mask))


def _blocks(serial, rows, layers):
  """L blocks [R, T, K, 2H] whose values tell where they come from."""
  shape = (layers, rows, _NODES, _HEADS, 2 * _HEAD_DIM)
  values = 1 + serial % 50 + np.arange(np.prod(shape)) / 8192
  return tuple(values.reshape(shape).astype(np.float32))


def _create(windows=_WINDOWS, num_pages=None, dtype="float32", batch=_BATCH):
  cache = memory.GroupedKVCache.create(
    windows=windows,
    batch=batch,
    max_len=_MAX_LEN,
    num_kv_heads=_HEADS,
    head_dim=_HEAD_DIM,
    page_size=_SIZE,
    num_pages=num_pages,
    dtype=dtype,
  )
  if dtype != "float32":
    return cache

  def marked(group):
    pages = tuple(jnp.full_like(x, jnp.nan) for x in group.pages)
    return group.replace(pages=pages)

  return cache.replace(
    full=cache.full and marked(cache.full),
    windowed=tuple(map(marked, cache.windowed)),
  )


@pytest.mark.parametrize("size", [2, 3, 5, 16])
def test_a_ring_is_as_long_as_it_must_be(size):
  """By counting the pages of what the token at each position sees."""
  for window in range(1, 50):
    most = 0
    for length in range(1, 200):
      before = range(max(length - window + 1, 0), length)
      most = max(most, len({position // size for position in before}))
    found = memory.window_pages(window, size)
    assert found == max(most, 1)
    assert found <= -(-window // size) + 1


@pytest.mark.parametrize("windows", [(4, 4), (None, 3), (4, 9, None, 4)])
def test_windows_as_long_as_a_row_save_nothing(windows):
  assert memory.kept_windows(windows, 100, 4) == windows
  assert memory.kept_windows(windows, 5, 4) == (None,) * len(windows)


def test_each_window_by_itself():
  # Nine positions in pages of four take up to three pages, as many as rows of
  # twelve positions have.
  assert memory.window_pages(9, 4) == 3
  assert memory.kept_windows((4, 9, None), 12, 4) == (4, None, None)


def _check(cache, lists, windows):
  """All that the next token sees is there, and no page is held beside."""
  view = _view(cache)
  assert view.length.tolist() == [len(entries) for entries in lists]
  for layer, window in enumerate(windows):
    pages, table = np.asarray(view.pages[layer]), np.asarray(view.table(layer))
    held = table[table < len(pages)]
    assert len(held) == len(set(held.tolist()))
    for row, entries in enumerate(lists):
      length = len(entries)
      first = 0 if window is None else max(length - window + 1, 0)
      live = np.flatnonzero(table[row] < len(pages))
      want = range(first // _SIZE, -(-length // _SIZE))
      assert live.tolist() == list(want)
      if window is not None:
        assert len(live) <= memory.window_pages(window, _SIZE)
      for position in range(first, length):
        got = pages[table[row, position // _SIZE], :, position % _SIZE]
        np.testing.assert_array_equal(got, entries[position][layer])


_step = st.one_of(
  st.tuples(
    st.just("release"),
    st.lists(st.booleans(), min_size=_BATCH, max_size=_BATCH),
  ),
  st.tuples(
    st.just("commit"),
    st.one_of(
      st.none(), st.permutations(range(_BATCH)).map(lambda rows: rows[:2])
    ),
    st.lists(st.integers(0, _DEPTH), min_size=_BATCH, max_size=_BATCH),
    st.lists(
      st.lists(st.integers(0, _NODES - 1), min_size=_DEPTH, max_size=_DEPTH),
      min_size=_BATCH,
      max_size=_BATCH,
    ),
  ),
)


@pytest.mark.parametrize(
  ("windows", "num_pages"),
  [
    (_WINDOWS, None),
    (_WINDOWS, 13),  # fewer than three full rows need
    ((1, 5), None),  # no layer sees everything
  ],
)
@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(steps=st.lists(_step, min_size=1, max_size=14))
def test_groups_equal_lists(windows, num_pages, steps):
  cache = _create(windows, num_pages)
  lists = [[] for _ in range(_BATCH)]
  for serial, step in enumerate(steps):
    if step[0] == "release":
      mask = np.array(step[1])
      cache = _release(cache, mask)
      lists = [[] if mask[row] else lists[row] for row in range(_BATCH)]
    else:
      rows = list(range(_BATCH)) if step[1] is None else list(step[1])
      count = np.array(step[2][: len(rows)], np.int32)
      path = np.array(step[3][: len(rows)], np.int32)
      blocks = _blocks(serial, len(rows), len(windows))
      given = None if step[1] is None else np.array(rows, np.int32)
      cache, ok = _commit(cache, blocks, path, count, given)
      left = (
        10**6
        if None not in windows
        else (cache.full.pool.num_pages)
        - sum(-(-len(entries) // _SIZE) for entries in lists)
      )
      for i, row in enumerate(rows):
        length = len(lists[row])
        needed = -(-(length + count[i]) // _SIZE) - -(-length // _SIZE)
        fits = length + count[i] <= _MAX_LEN and needed <= left
        assert bool(ok[i]) == fits
        if not fits:
          continue
        left -= needed
        for j in range(count[i]):
          lists[row].append([layer[i, path[i, j]] for layer in blocks])
    _check(cache, lists, windows)
  # Whatever came, all pages are free at the end.
  cache = _release(cache, np.ones(_BATCH, bool))
  _check(cache, [[] for _ in range(_BATCH)], windows)
  if None in windows:
    assert int(cache.pool.num_free) == cache.pool.num_pages


def _filled(windows=_WINDOWS, dtype="float32", lengths=(14, 0, 9), **options):
  cache = _create(windows, dtype=dtype, **options)
  lists = [[] for _ in range(_BATCH)]
  path = np.tile(np.arange(_DEPTH, dtype=np.int32), (_BATCH, 1))
  for serial in range(4):
    count = np.clip(np.array(lengths) - 4 * serial, 0, 4).astype(np.int32)
    blocks = _blocks(serial, _BATCH, len(windows))
    held = tuple(memory.cast_kv(jnp.asarray(x), dtype) for x in blocks)
    cache, ok = _commit(cache, held, path, count)
    assert ok.all()
    for row in range(_BATCH):
      for node in range(count[row]):
        lists[row].append([layer[row, node] for layer in blocks])
  return cache, lists


def test_a_row_that_lacks_pages_commits_in_no_group():
  cache, lists = _filled(num_pages=9)  # of which eight are held
  path = np.tile(np.arange(_DEPTH, dtype=np.int32), (_BATCH, 1))
  before = jax.tree.leaves(cache)
  after, ok = _commit(
    cache, _blocks(9, _BATCH, 5), path, np.array([2, 4, 7], np.int32)
  )
  assert ok.tolist() == [True, False, False]
  lists[0] += [[x[0, node] for x in _blocks(9, _BATCH, 5)] for node in (0, 1)]
  _check(after, lists, _WINDOWS)
  # Refused altogether: every bit as it was.
  after, ok = _commit(
    cache, _blocks(9, _BATCH, 5), path, np.array([0, 4, 7], np.int32)
  )
  assert ok.tolist() == [True, False, False]
  for old, new in zip(before, jax.tree.leaves(after), strict=True):
    np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("windows", [_WINDOWS, (1, 5)])
def test_a_row_leaves_and_comes_back(windows):
  cache, lists = _filled(windows)
  taken = jax.device_get(cache.take(jnp.int32(0)))
  cache = _release(cache, np.array([True, False, False]))
  # Another sequence uses the row, and the pages, meanwhile.
  path = np.tile(np.arange(_DEPTH, dtype=np.int32), (_BATCH, 1))
  blocks = _blocks(20, _BATCH, len(windows))
  cache, _ = _commit(cache, blocks, path, np.array([9, 9, 0], np.int32))
  cache = _release(cache, np.array([True, True, False]))
  cache, ok = cache.put(jnp.int32(0), taken, jnp.int32(14))
  assert ok
  _check(cache, lists, windows)


def test_a_row_cannot_come_back_to_too_few_pages():
  cache, lists = _filled(num_pages=9)
  taken = cache.take(jnp.int32(0))
  cache = _release(cache, np.array([True, False, False]))
  path = np.tile(np.arange(_DEPTH, dtype=np.int32), (_BATCH, 1))
  blocks = _blocks(20, _BATCH, len(_WINDOWS))
  cache, ok = _commit(cache, blocks, path, np.array([0, 9, 0], np.int32))
  assert ok.all()
  cache, ok = cache.put(jnp.int32(0), taken, jnp.int32(14))
  assert not ok
  lists[0] = []
  lists[1] = [[x[1, node] for x in blocks] for node in range(9)]
  _check(cache, lists, _WINDOWS)


@pytest.mark.parametrize("windows", [_WINDOWS, (1, 5)])
def test_quantising_is_that_of_the_groups(windows):
  cache, _ = _filled(windows)
  after, error = cache.quantize("int8")
  want, _ = _filled(windows, "int8")
  assert error.largest.shape == error.rms.shape == (len(windows), 2)
  assert (error.largest > 0).all() or 1 in windows
  assert (error.largest < 1 / 250).all()
  got, view = _view(after), _view(want)
  for layer in range(len(windows)):
    table = np.asarray(got.table(layer))
    np.testing.assert_array_equal(table, view.table(layer))
    held = table[table < got.pages[layer].shape[0]]
    for mine, true in zip(got.pages[layer], view.pages[layer], strict=True):
      mine, true = np.asarray(mine[held]), np.asarray(true[held])
      sound = np.isfinite(mine.astype(np.float32))
      np.testing.assert_array_equal(mine[sound], true[sound])


def test_only_the_pool_is_resized():
  cache, lists = _filled()
  rings = [jax.tree.map(np.asarray, ring) for ring in cache.windowed]
  cache, moved = memory.resize(cache, 50)
  assert cache.pool.num_pages == 50 and moved.shape == (33,)
  for ring, want in zip(cache.windowed, rings, strict=True):
    jax.tree.map(np.testing.assert_array_equal, ring, want)
  _check(cache, lists, _WINDOWS)
  cache, _ = memory.resize(cache, 8)
  _check(cache, lists, _WINDOWS)
  with pytest.raises(
    ValueError, match="every layer of this cache has a window"
  ):
    memory.resize(_create((1, 5)), 50)


def test_a_donated_commit_copies_no_pool(as_users):
  cache = _create()
  path = np.zeros((_BATCH, _DEPTH), np.int32)
  args = _blocks(0, _BATCH, 5), path, np.array([9, 1, 2], np.int32)
  shapes = {",".join(map(str, x.shape)) for x in cache.pages}
  copy = re.compile(rf"f32\[(?:{'|'.join(shapes)})\]\S* copy\(")

  def copies(**options):
    commit = jax.jit(lambda cache, *args: cache.commit(*args), **options)
    program = commit.lower(cache, *args).compile(as_users)
    return len(copy.findall(program.as_text()))

  assert copies(donate_argnums=0) == 0
  assert copies() == 5  # the search does find them


def test_bytes():
  cache = _create()
  page = _SIZE * 2 * _HEAD_DIM * 4  # of one layer
  assert cache.page_bytes == 2 * page
  # Windows 2 (twice) and 7 hold one and three pages of Z = 3 at most.
  assert cache.held_bytes(1) == (2 + 2 + 1) * page
  assert cache.held_bytes(30) == (2 * 10 + 2 * 1 + 3) * page
  assert _create((1, 5)).held_bytes(30) == (1 + 2) * page
  held = sum(x.nbytes for ring in cache.windowed for x in ring.pages)
  assert held == _BATCH * (2 * 1 + 3) * page


def test_what_it_lacks_is_said():
  with pytest.raises(ValueError, match=r"without any, take a PagedKVCache"):
    _create((None, None))
  with pytest.raises(ValueError, match="window is 0"):
    _create((0, None))
  with pytest.raises(AttributeError, match="no pool: each of its layers has"):
    _create((1, 5)).pool  # noqa: B018
  with pytest.raises(ValueError, match="batch is 0"):
    _create(batch=0)
