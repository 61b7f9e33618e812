"""Attention over pages against its definition and a float64 loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldjax import pallas_kernels
from ldjax.pallas_kernels._prefix_attention import _reference, _xla

_STATIC = ("scale", "soft_cap")
_attention = jax.jit(pallas_kernels.prefix_attention, static_argnames=_STATIC)
_definition = jax.jit(_reference.prefix_attention, static_argnames=_STATIC)


def _problem(
  seed,
  lengths,
  *,
  heads,
  kv_heads,
  head_dim,
  page_size,
  nodes,
  dtype="float32",
  query_dtype="float32",
  spare=1,
):
  """A pool of NaN in which only the live slots hold numbers."""
  rng = np.random.default_rng(seed)
  rows = len(lengths)
  live = [-(-length // page_size) for length in lengths]
  row_pages = max(1, *live) + spare
  num_pages = sum(live) + 3
  pages = np.full((num_pages, kv_heads, page_size, 2 * head_dim), np.nan)
  order = rng.permutation(num_pages)
  # What lies past a row's pages: just out of range, far out, negative, and a
  # page in range that belongs to another row or to nobody.
  table = rng.choice(
    [num_pages, 10**6, -7, 0, num_pages - 1], (rows, row_pages)
  )
  taken = 0
  for row, length in enumerate(lengths):
    table[row, : live[row]] = order[taken : taken + live[row]]
    taken += live[row]
    for s in range(length):
      pages[table[row, s // page_size], :, s % page_size] = rng.normal(
        size=(kv_heads, 2 * head_dim)
      )
  query = rng.normal(size=(rows, nodes, heads, head_dim))
  return (
    jnp.asarray(query.astype(np.float32)).astype(query_dtype),
    jnp.asarray(pages.astype(np.float32)).astype(dtype),
    jnp.asarray(table.astype(np.int32)),
    jnp.asarray(np.array(lengths, np.int32)),
  )


def _loop(query, pages, table, length, scale, start=None, soft_cap=None):
  """One softmax a row and head in float64, reading only what is live."""
  query, pages = (np.asarray(x).astype(np.float64) for x in (query, pages))
  table = np.asarray(table)
  rows, nodes, heads, head_dim = query.shape
  kv_heads, page_size = pages.shape[1:3]
  out = np.zeros(query.shape)
  lse = np.full((rows, nodes, heads), -np.inf)
  for row in range(rows):
    entries = [
      pages[table[row, s // page_size], :, s % page_size]
      for s in range(int(length[row]))
    ]
    for node in range(nodes):
      begin = 0 if start is None else int(start[row, node])
      if begin >= len(entries):
        continue
      seen = np.stack(entries[begin:])  # [S, K, 2H]
      for head in range(heads):
        mine = seen[:, head // (heads // kv_heads)]
        scores = scale * mine[:, :head_dim] @ query[row, node, head]
        if soft_cap is not None:
          scores = soft_cap * np.tanh(scores / soft_cap)
        top = scores.max()
        weights = np.exp(scores - top)
        total = weights.sum()
        out[row, node, head] = weights / total @ mine[:, head_dim:]
        lse[row, node, head] = top + np.log(total)
  return out, lse


def _check(problem, scale, tolerance):
  got, want = _attention(*problem, scale=scale), _loop(*problem, scale)
  for mine, true in zip(got, want, strict=True):
    assert mine.dtype == jnp.float32
    np.testing.assert_allclose(mine, true, rtol=0, atol=tolerance)


# Every entry is a standard normal number. In fp32 a score is a sum of H terms
# of size under about 10 * scale, hence good to some 1e-6; so are the weights
# (relatively) and the sums of S of them.
_FP32 = 1e-5


@pytest.mark.parametrize(
  ("heads", "kv_heads", "head_dim", "page_size", "nodes", "lengths"),
  [
    # Around a page's edges; several blocks of 256 positions.
    (3, 1, 64, 16, 5, (0, 1, 15, 16, 17, 257, 100)),
    (2, 2, 80, 7, 1, (6, 0, 7, 8, 293)),
    (8, 1, 96, 5, 26, (63, 4, 6)),
    (6, 2, 128, 16, 5, (531, 256, 255)),
    (3, 3, 256, 3, 1, (2, 3, 4, 0)),
    (1, 1, 2, 300, 5, (301, 299, 300, 0)),  # a page wider than a block
  ],
)
def test_fp32_equals_the_loop(
  heads, kv_heads, head_dim, page_size, nodes, lengths
):
  problem = _problem(
    0,
    lengths,
    heads=heads,
    kv_heads=kv_heads,
    head_dim=head_dim,
    page_size=page_size,
    nodes=nodes,
  )
  scale = head_dim**-0.5
  _check(problem, scale, _FP32)
  got = _attention(*problem, scale=scale)
  empty = np.array(lengths) == 0
  assert (np.asarray(got[0])[empty] == 0).all()
  assert np.isneginf(np.asarray(got[1])[empty]).all()


@pytest.mark.parametrize(("kv_heads", "page_size"), [(1, 16), (2, 7)])
def test_the_definition_says_the_same(kv_heads, page_size):
  problem = _problem(
    8,
    (0, 1, page_size - 1, page_size, page_size + 1, 270),
    heads=6,
    kv_heads=kv_heads,
    head_dim=10,
    page_size=page_size,
    nodes=5,
  )
  want = _loop(*problem, 0.3)
  for attention in (_definition, _attention):
    for mine, true in zip(attention(*problem, scale=0.3), want, strict=True):
      np.testing.assert_allclose(mine, true, rtol=0, atol=_FP32)


@pytest.mark.parametrize("soft_cap", [0.5, 50.0])
def test_a_cap_bends_the_scores_before_the_mask(soft_cap):
  """Large scores, all but equal under a low cap; NaN in what is masked."""
  problem = _problem(
    9, (0, 3, 7, 270), heads=6, kv_heads=2, head_dim=10, page_size=7, nodes=5
  )
  rows, nodes = problem[0].shape[:2]
  start = np.zeros((rows, nodes), np.int32)
  start[3] = [0, 1, 255, 256, 269]
  options = {"scale": 3.0, "soft_cap": soft_cap}
  want = _loop(*problem, 3.0, start, soft_cap)
  plain = _loop(*problem, 3.0, start)
  assert np.abs(want[0] - plain[0]).max() > 1e-3
  for attention in (_definition, _attention):
    got = attention(*problem, start=start, **options)
    for mine, true in zip(got, want, strict=True):
      # Scores are of size 50 here, not 10.
      np.testing.assert_allclose(mine, true, rtol=0, atol=5 * _FP32)


@pytest.mark.parametrize(
  ("query_dtype", "dtype", "tolerance"),
  [
    ("float32", "bfloat16", _FP32),  # the pages are exact in fp32
    ("float32", "float16", _FP32),
    # The queries, the weights and (from fp32) the pages are rounded to eight
    # bits, 2^-9 relative: a score under 5 is off by at most 3 * 2^-9 * 5 / 3
    # in the mean over its terms, an output of size 1 by twice that.
    ("bfloat16", "bfloat16", 2.0**-5),
    ("bfloat16", "float32", 2.0**-5),
    ("float16", "float16", 2.0**-8),  # eleven bits
  ],
)
def test_other_dtypes(query_dtype, dtype, tolerance):
  problem = _problem(
    1,
    (11, 0, 270, 1),
    heads=6,
    kv_heads=2,
    head_dim=16,
    page_size=5,
    nodes=3,
    dtype=dtype,
    query_dtype=query_dtype,
  )
  _check(problem, 0.25, tolerance)


def test_lengths_and_tables_are_data():
  """One program: rows shrink to nothing, and the pages move."""
  shape = {
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 6,
    "page_size": 4,
    "nodes": 3,
  }
  full = _problem(2, (9, 12), **shape, spare=2)
  for lengths in ((9, 12), (1, 12), (0, 3), (0, 0)):
    query, pages, table, _ = full
    moved = np.random.default_rng(3).permutation(pages.shape[0])
    where = np.argsort(moved).astype(np.int32)
    inside = (np.asarray(table) >= 0) & (np.asarray(table) < len(where))
    table = np.where(inside, where[np.where(inside, table, 0)], table)
    problem = (query, pages[moved], jnp.asarray(table), jnp.array(lengths))
    _check(problem, 0.4, _FP32)
    want = _attention(query, pages, full[2], jnp.array(lengths), scale=0.4)
    for one, two in zip(_attention(*problem, scale=0.4), want, strict=True):
      np.testing.assert_array_equal(one, two)


def test_a_row_does_not_depend_on_its_neighbours():
  shape = {
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 6,
    "page_size": 4,
    "nodes": 3,
  }
  query, pages, table, length = _problem(4, (5, 600, 0, 11), **shape)
  out, lse = _attention(query, pages, table, length, scale=0.4)
  for row in range(4):
    alone = _attention(
      query[row][None], pages, table[row][None], length[row][None], scale=0.4
    )
    np.testing.assert_allclose(alone[0][0], out[row], rtol=0, atol=_FP32)
    np.testing.assert_allclose(alone[1][0], lse[row], rtol=0, atol=_FP32)


def test_large_scores_do_not_overflow():
  # exp(200) is past float32: only a running maximum gets this right.
  query, pages, table, length = _problem(
    5, (300, 7), heads=1, kv_heads=1, head_dim=4, page_size=8, nodes=2
  )
  problem = (query * 100, pages, table, length)
  want = _loop(*problem, 1.0)
  assert want[1].max() > 200
  got = _attention(*problem, scale=1.0)
  # A score of 500 is good to 500 * 2^-24 * H, and so is a weight relatively.
  np.testing.assert_allclose(got[0], want[0], rtol=0, atol=5e-4)
  np.testing.assert_allclose(got[1], want[1], rtol=1e-5)


def test_work_follows_the_longest_row_not_the_table():
  text = str(
    jax.make_jaxpr(lambda *args: _xla.prefix_attention(*args, scale=1.0))(
      *_problem(
        6,
        (5,),
        heads=1,
        kv_heads=1,
        head_dim=4,
        page_size=4,
        nodes=1,
        spare=400,
      )
    )
  )
  assert "while" in text  # a traced trip count
  assert "1608" not in text  # nothing as wide as the table's 402 * 4 slots


def test_heads_that_do_not_divide():
  query, pages, table, length = _problem(
    7, (3,), heads=2, kv_heads=2, head_dim=4, page_size=4, nodes=1
  )
  three = jnp.concatenate([query, query[:, :, :1]], axis=2)
  with pytest.raises(ValueError, match=r"3 query heads .* 2 key/value heads"):
    pallas_kernels.prefix_attention(three, pages, table, length, scale=1.0)


@pytest.mark.parametrize(
  ("kv_heads", "page_size", "lengths", "window"),
  [
    (1, 16, (0, 1, 15, 16, 17, 700), 5),
    (2, 7, (6, 293, 8), 100),
    (3, 5, (600, 256, 3), 300),  # more than a block of it
    (1, 300, (301, 640), 12),  # pages wider than a block
    (2, 4, (9, 2), 1000),  # hides nothing
  ],
)
def test_each_query_begins_where_it_is_told(
  kv_heads, page_size, lengths, window
):
  problem = _problem(
    9,
    lengths,
    heads=6,
    kv_heads=kv_heads,
    head_dim=10,
    page_size=page_size,
    nodes=4,
  )
  query, pages, table, length = problem
  # Nodes at several depths; the last lies deeper than the window is long.
  position = length[:, None] + jnp.array([[0, 2, 1, window]])
  start = jnp.maximum(position - (window - 1), 0).astype(jnp.int32)
  want = _loop(*problem, 0.3, start)
  assert np.isneginf(want[1][:, 3]).all()
  # What lies before a row's first start may hold anything.
  table = np.asarray(table)
  spoiled = np.asarray(pages).copy()
  for row, begin in enumerate(np.asarray(start.min(1)).tolist()):
    for s in range(min(begin, lengths[row])):
      spoiled[int(table[row, s // page_size]), :, s % page_size] = np.nan
  spoiled = jnp.asarray(spoiled)
  for attention in (_definition, _attention):
    got = attention(query, spoiled, table, length, scale=0.3, start=start)
    for mine, true in zip(got, want, strict=True):
      np.testing.assert_allclose(mine, true, rtol=0, atol=_FP32)


def test_work_follows_the_window_not_the_length(monkeypatch):
  trips = []
  plain = jax.lax.fori_loop

  def spy(lower, upper, body, carry):
    trips.append(int(upper))
    return plain(lower, upper, body, carry)

  query, pages, table, length = _problem(
    10, (5000, 40, 0), heads=1, kv_heads=1, head_dim=2, page_size=16, nodes=2
  )
  start = jnp.maximum(length[:, None] + jnp.array([[0, 1]]) - 99, 0)
  monkeypatch.setattr(jax.lax, "fori_loop", spy)
  for begin in (None, start.astype(jnp.int32)):
    pallas_kernels.prefix_attention(
      query, pages, table, length, scale=1.0, start=begin
    )
  # Three rows read blocks of 80 positions: of 5000, and of 99 with the rest of
  # a page.
  assert trips == [63, 2]


def test_starts_of_another_shape():
  query, pages, table, length = _problem(
    11, (3, 5), heads=2, kv_heads=1, head_dim=4, page_size=4, nodes=3
  )
  with pytest.raises(AssertionError, match=r"\(2, 1\)"):
    pallas_kernels.prefix_attention(
      query, pages, table, length, scale=1.0, start=jnp.zeros((2, 1), jnp.int32)
    )
