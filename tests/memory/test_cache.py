"""The paged and the dense cache against lists, and what they never write."""

import functools
import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from ldjax import memory

_BATCH, _LAYERS, _HEADS, _HEAD_DIM = 3, 2, 1, 2
_NODES, _DEPTH = 5, 4  # T and D+1

_commit = jax.jit(lambda cache, *args: cache.commit(*args))
_release = jax.jit(lambda cache, mask: cache.release(mask))


def _blocks(serial, rows, dtype=np.float32):
  """L blocks [R, T, K, 2H] whose values tell where they come from."""
  shape = (_LAYERS, rows, _NODES, _HEADS, 2 * _HEAD_DIM)
  values = 1 + serial % 50 + np.arange(np.prod(shape)) / 8192
  return tuple(values.reshape(shape).astype(dtype))


def _read(cache, row):
  """The committed entries of a row, [L, length, K, 2H], as a reader sees."""
  view = cache.view()
  table = np.asarray(view.block_table)
  size = view.pages[0].shape[2]
  return np.stack(
    [
      np.stack(
        [
          np.asarray(layer)[table[row, s // size], :, s % size]
          for s in range(int(view.length[row]))
        ]
        or [np.zeros((0, _HEADS, 2 * _HEAD_DIM))]
      ).reshape(-1, _HEADS, 2 * _HEAD_DIM)
      for layer in view.pages
    ]
  )


@functools.lru_cache
def _empty(kind, max_len, page_size=None, num_pages=None):
  """A cache whose pages hold a marker."""
  shape = {
    "batch": _BATCH,
    "max_len": max_len,
    "num_layers": _LAYERS,
    "num_kv_heads": _HEADS,
    "head_dim": _HEAD_DIM,
  }
  if kind == "dense":
    cache = memory.DenseKVCache.create(**shape)
  else:
    cache = memory.PagedKVCache.create(
      page_size=page_size, num_pages=num_pages, **shape
    )
  return cache.replace(pages=tuple(jnp.full_like(x, -7) for x in cache.pages))


def _check_paged(cache, lists):
  """Tables, counts and contents agree with the lists."""
  size, total = cache.page_size, cache.pool.num_pages
  table = np.asarray(cache.block_table)
  held = []
  for row, entries in enumerate(lists):
    live = -(-len(entries) // size)
    assert (table[row, :live] < total).all()
    assert (table[row, live:] == total).all()
    held += table[row, :live].tolist()
  assert len(held) == len(set(held))
  references = np.zeros(total, np.int32)
  references[held] = 1
  np.testing.assert_array_equal(cache.pool.references, references)


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


# Page size, capacity of a row (a whole number of pages), pages in the pool
# (fewer than three full rows need).
@pytest.mark.parametrize(
  "sizes",
  [
    (2, 10, 11),
    (3, 12, 7),
    pytest.param((4, 12, 9), marks=pytest.mark.slow),
    pytest.param((5, 15, 5), marks=pytest.mark.slow),
  ],
)
@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(steps=st.lists(_step, min_size=1, max_size=12))
def test_paged_equals_dense_equals_lists(sizes, steps):
  page_size, capacity, num_pages = sizes
  paged = _empty("paged", capacity, page_size, num_pages)
  dense = _empty("dense", capacity)
  lists = [[] for _ in range(_BATCH)]
  for serial, step in enumerate(steps):
    if step[0] == "release":
      mask = np.array(step[1])
      before = paged.pages
      paged, dense = _release(paged, mask), _release(dense, mask)
      lists = [[] if mask[row] else lists[row] for row in range(_BATCH)]
      for old, new in zip(before, paged.pages, strict=True):
        np.testing.assert_array_equal(old, new)
    else:
      rows = list(range(_BATCH)) if step[1] is None else list(step[1])
      count = np.array(step[2][: len(rows)], np.int32)
      path = np.array(step[3][: len(rows)], np.int32)
      blocks = _blocks(serial, len(rows))
      given = None if step[1] is None else np.array(rows, np.int32)
      before = [np.array(layer) for layer in paged.pages]
      after, ok = _commit(paged, blocks, path, count, given)

      # Who is served: in order, all or nothing.
      left = num_pages - sum(-(-len(x) // page_size) for x in lists)
      want = []
      for row, number in zip(rows, count.tolist(), strict=True):
        length = len(lists[row])
        pages = -(-(length + number) // page_size) - -(-length // page_size)
        fits = length + number <= capacity
        want.append(fits and pages <= left)
        left -= pages if want[-1] else 0
      assert ok.tolist() == want

      # Every slot of the pool: the accepted entries and nothing else.
      table = np.asarray(after.block_table)
      for i, row in enumerate(rows):
        for j in range(count[i] if want[i] else 0):
          position = len(lists[row])
          entry = [layer[i, path[i, j]] for layer in blocks]
          for layer, value in zip(before, entry, strict=True):
            page = table[row, position // page_size]
            layer[page, :, position % page_size] = value
          lists[row].append(np.stack(entry))
      for layer, expected in zip(after.pages, before, strict=True):
        np.testing.assert_array_equal(layer, expected)
      # Rows that were refused, or not asked, keep their table.
      for row in range(_BATCH):
        if row not in rows or not want[rows.index(row)]:
          np.testing.assert_array_equal(table[row], paged.block_table[row])
      paged = after
      dense, dense_ok = _commit(
        dense, blocks, path, np.where(want, count, 0), given
      )
      assert dense_ok.all()

    _check_paged(paged, lists)
    assert paged.length.tolist() == dense.length.tolist()
    assert paged.length.tolist() == [len(entries) for entries in lists]
    for row, entries in enumerate(lists):
      got = _read(paged, row)
      np.testing.assert_array_equal(got, _read(dense, row))
      if entries:
        np.testing.assert_array_equal(got, np.stack(entries, axis=1))


@pytest.mark.parametrize("kind", ["paged", "dense"])
def test_a_row_can_be_exactly_full_and_no_fuller(kind):
  cache = _empty(kind, 12, 4, 9)
  path = np.tile(np.arange(_DEPTH, dtype=np.int32), (_BATCH, 1))
  for serial, count in enumerate(([4, 3, 4], [4, 4, 0], [4, 4, 0])):
    cache, ok = _commit(cache, _blocks(serial, _BATCH), path, np.array(count))
    assert ok.all()
  assert cache.length.tolist() == [12, 11, 4]
  contents = [_read(cache, row) for row in range(_BATCH)]
  # One more, two more, and a row that still has room.
  cache, ok = _commit(cache, _blocks(9, _BATCH), path, np.array([1, 2, 1]))
  assert ok.tolist() == [False, False, True]
  assert cache.length.tolist() == [12, 11, 5]
  for row in range(_BATCH):
    old = contents[row]
    np.testing.assert_array_equal(_read(cache, row)[:, : old.shape[1]], old)
  # The last position.
  cache, ok = _commit(cache, _blocks(10, _BATCH), path, np.array([0, 1, 0]))
  assert ok.all()
  assert cache.length.tolist() == [12, 12, 5]
  np.testing.assert_array_equal(
    _read(cache, 1)[:, -1], np.stack([x[1, 0] for x in _blocks(10, _BATCH)])
  )


@pytest.mark.parametrize("kind", ["paged", "dense"])
def test_a_count_of_nothing_writes_nothing(kind):
  cache = _empty(kind, 12, 4, 9)
  path = np.zeros((_BATCH, _DEPTH), np.int32)
  cache, _ = _commit(cache, _blocks(0, _BATCH), path, np.array([3, 0, 4]))
  cache = _release(cache, np.array([False, False, True]))
  # An empty row, a released row and one with a half-full page; paths that
  # point nowhere.
  after, ok = _commit(
    cache,
    tuple(np.full_like(x, np.nan) for x in _blocks(1, _BATCH)),
    np.full((_BATCH, _DEPTH), -1, np.int32),
    np.zeros(_BATCH, np.int32),
  )
  assert ok.all()
  for old, new in zip(
    jax.tree.leaves(cache), jax.tree.leaves(after), strict=True
  ):
    np.testing.assert_array_equal(old, new)


def test_released_rows_keep_no_page():
  # sglang-jax#1147: a reused row kept its old page ids. A long request, then
  # a short one in the same row, against a cache that never knew the first.
  path = np.tile(np.arange(_DEPTH, dtype=np.int32), (_BATCH, 1))
  used = _empty("paged", 12, 4, 9)
  for serial in range(3):
    used, _ = _commit(used, _blocks(serial, _BATCH), path, np.array([4, 2, 4]))
  used = _release(used, np.array([True, False, True]))
  assert (np.asarray(used.block_table)[[0, 2]] == 9).all()
  used = _release(used, np.array([False, True, False]))
  assert int(used.pool.num_free) == 9
  fresh = _empty("paged", 12, 4, 9)
  caches = [
    _commit(cache, _blocks(7, _BATCH), path, np.array([2, 0, 1]))[0]
    for cache in (used, fresh)
  ]
  for name in ("block_table", "length"):
    np.testing.assert_array_equal(*(getattr(c, name) for c in caches))
  for row in range(_BATCH):
    np.testing.assert_array_equal(*(_read(cache, row) for cache in caches))


def test_a_hundred_sequences_leave_no_page_behind():
  rng = np.random.default_rng(0)
  cache = _empty("paged", 12, 3, 9)
  done = 0
  while done < 100:
    count = rng.integers(0, _DEPTH + 1, _BATCH).astype(np.int32)
    path = rng.integers(0, _NODES, (_BATCH, _DEPTH)).astype(np.int32)
    cache, ok = _commit(cache, _blocks(done, _BATCH), path, count)
    full = ~np.asarray(ok) | (np.asarray(cache.length) >= 9)
    full |= rng.random(_BATCH) < 0.2  # an aborted one
    done += int(full.sum())
    cache = _release(cache, full)
  cache = _release(cache, np.ones(_BATCH, bool))
  assert int(cache.pool.num_free) == cache.pool.num_pages
  assert not cache.pool.references.any()


@pytest.mark.parametrize("kind", ["paged", "dense"])
def test_bfloat16_entries_keep_their_bits(kind):
  create = {
    "paged": functools.partial(memory.PagedKVCache.create, page_size=4),
    "dense": memory.DenseKVCache.create,
  }[kind]
  cache = create(
    batch=_BATCH,
    max_len=12,
    num_layers=_LAYERS,
    num_kv_heads=_HEADS,
    head_dim=_HEAD_DIM,
    dtype=jnp.bfloat16,
  )
  blocks = tuple(x * jnp.bfloat16(1e38) for x in _blocks(0, 3, jnp.bfloat16))
  path = np.array([[4, 0, 1, 1]] * _BATCH, np.int32)
  cache, ok = _commit(cache, blocks, path, np.array([2, 4, 0]))
  assert ok.all()
  assert cache.pages[0].dtype == jnp.bfloat16
  for row, nodes in ((0, [4, 0]), (1, [4, 0, 1, 1])):
    want = np.stack([np.asarray(x)[row, nodes] for x in blocks])
    np.testing.assert_array_equal(_read(cache, row), want)


@pytest.mark.parametrize("rows", [None, np.array([2, 0], np.int32)])
def test_a_donated_commit_copies_no_pool(as_users, rows):
  cache = _empty("paged", 12, 4, 9)
  number = _BATCH if rows is None else len(rows)
  args = (
    _blocks(0, number),
    np.zeros((number, _DEPTH), np.int32),
    np.array([4, 1, 2][:number], np.int32),
    rows,
  )
  shape = ",".join(map(str, cache.pages[0].shape))
  copy = re.compile(rf"f32\[{shape}\]\S* copy\(")

  def copies(**options):
    commit = jax.jit(lambda cache, *args: cache.commit(*args), **options)
    program = commit.lower(cache, *args).compile(as_users)
    return len(copy.findall(program.as_text()))

  assert copies(donate_argnums=0) == 0
  assert copies() == _LAYERS  # the search does find them


def test_a_donated_commit_works_in_place():
  commit = jax.jit(lambda cache, *args: cache.commit(*args), donate_argnums=0)
  # Copies: what is donated must not be the memoised cache.
  cache = jax.tree.map(jnp.copy, _empty("paged", 12, 4, 9))
  where = [x.unsafe_buffer_pointer() for x in cache.pages]
  after, ok = commit(
    cache,
    _blocks(0, _BATCH),
    np.zeros((_BATCH, _DEPTH), np.int32),
    np.array([4, 1, 2], np.int32),
  )
  assert ok.all()
  assert [x.unsafe_buffer_pointer() for x in after.pages] == where
  assert all(x.is_deleted() for x in cache.pages)


def test_commit_under_scan():
  """The same entries one a step: a state of fixed shape."""
  cache = _empty("paged", 12, 4, 9)
  blocks = _blocks(3, _BATCH)
  path = jnp.zeros((_BATCH, 1), jnp.int32)

  def step(cache, node):
    return cache.commit(blocks, path + node, jnp.array([1, 0, 1]))

  got, ok = jax.jit(lambda cache: jax.lax.scan(step, cache, jnp.arange(5)))(
    cache
  )
  assert ok.all()
  assert got.length.tolist() == [5, 0, 5]
  for row in (0, 2):
    np.testing.assert_array_equal(
      _read(got, row), np.stack([x[row] for x in blocks])
    )


@pytest.mark.parametrize(
  ("setting", "value", "least"),
  [
    ("page_size", 1, 2),
    ("batch", 0, 1),
    ("max_len", 0, 1),
    ("num_pages", 0, 1),
  ],
)
def test_sizes_below_their_limits(setting, value, least):
  sizes = {
    "batch": 2,
    "max_len": 8,
    "num_layers": 1,
    "num_kv_heads": 1,
    "head_dim": 2,
    setting: value,
  }
  with pytest.raises(ValueError, match=f"{setting} is {value}; .* {least}"):
    memory.PagedKVCache.create(**sizes)


def test_default_pool_holds_every_row_in_full():
  cache = memory.PagedKVCache.create(
    batch=3,
    max_len=13,
    num_layers=2,
    num_kv_heads=5,
    head_dim=6,
    page_size=4,
    dtype=jnp.bfloat16,
  )
  assert (cache.page_size, cache.pool.num_pages) == (4, 12)
  assert cache.block_table.shape == (3, 4)
  assert cache.page_bytes == 2 * 5 * 4 * 12 * 2  # L, K, Z, 2H, bytes


def test_view_of_some_rows():
  path = np.zeros((_BATCH, _DEPTH), np.int32)
  for kind in ("paged", "dense"):
    cache = _empty(kind, 12, 4, 9)
    cache, _ = _commit(cache, _blocks(0, _BATCH), path, np.array([1, 2, 4]))
    view, whole = cache.view(jnp.array([2, 0])), cache.view()
    assert view.length.tolist() == [4, 1]
    np.testing.assert_array_equal(
      view.block_table, np.asarray(whole.block_table)[[2, 0]]
    )
