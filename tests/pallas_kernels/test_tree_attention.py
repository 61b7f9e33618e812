"""The ancestor mask by walking up, and tree attention by one dense softmax."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from ldjax import pallas_kernels

_mask = jax.jit(pallas_kernels.ancestor_mask)
_window = jax.jit(pallas_kernels.window_mask, static_argnums=2)
_attention = jax.jit(
  pallas_kernels.tree_attention, static_argnames=("scale", "soft_cap")
)


def _walk(parents):
  mask = np.zeros((len(parents), len(parents)), bool)
  for node in range(len(parents)):
    above = node
    while above >= 0:
      mask[node, above] = True
      above = parents[above]
  return mask


@st.composite
def _trees(draw):
  size = draw(st.sampled_from([1, 2, 5, 16, 17]))
  kind = draw(st.sampled_from(["any", "chain", "star"]))
  if kind == "chain":  # the deepest there is
    return list(range(-1, size - 1))
  if kind == "star":
    return [-1] + [0] * (size - 1)
  return [-1] + [draw(st.integers(0, i - 1)) for i in range(1, size)]


@hypothesis.given(_trees())
def test_mask_is_ancestor_or_self(parents):
  got = np.asarray(_mask(jnp.asarray(np.array([parents], np.int32))))[0]
  np.testing.assert_array_equal(got, _walk(parents))
  # sglang-jax#1188: the root saw the other nodes.
  assert got[0].tolist() == [True] + [False] * (len(parents) - 1)


def test_rows_have_trees_of_their_own():
  rng = np.random.default_rng(0)
  trees = np.array(
    [[-1] + [rng.integers(0, i) for i in range(1, 11)] for _ in range(5)],
    np.int32,
  )
  got = _mask(trees)
  np.testing.assert_array_equal(got, [_walk(tree) for tree in trees])


def test_several_roots():
  assert pallas_kernels.ancestor_mask(jnp.array([[-1, -1, 0, 1]])).tolist() == [
    _walk([-1, -1, 0, 1]).tolist()
  ]


@hypothesis.given(
  _trees(), st.integers(0, 9), st.sampled_from([1, 2, 4, 16, 17])
)
def test_window_is_counted_in_positions(parents, prefix, window):
  """By walking up: itself and as many ancestors, then the prefix's end."""
  parents = np.array([parents], np.int32)
  mask = _walk(parents[0])
  positions = (prefix + mask.sum(-1) - 1)[None].astype(np.int32)
  got, start = _window(mask[None], positions, window)
  for node, position in enumerate(positions[0]):
    above, seen = node, set()
    while above >= 0 and len(seen) < window:
      seen.add(above)
      above = parents[0, above]
    assert set(np.flatnonzero(np.asarray(got)[0, node])) == seen
    left = window - len(seen)  # positions of the prefix, if it has so many
    first = int(start[0, node])
    assert max(prefix - first, 0) == min(left, prefix), (node, position)


@pytest.mark.parametrize("window", [0, -4])
def test_a_window_of_nothing(window):
  with pytest.raises(ValueError, match=f"window is {window}"):
    pallas_kernels.window_mask(
      np.ones((1, 1, 1), bool), np.zeros((1, 1), np.int32), window
    )


def _dense(
  query, block_kv, pages, table, length, mask, scale, first=None, soft_cap=None
):
  """Prefix, from `first[row, node]` on, and ancestors in one softmax."""
  query, block_kv, pages = (
    np.asarray(x).astype(np.float64) for x in (query, block_kv, pages)
  )
  rows, nodes, heads, head_dim = query.shape
  kv_heads, page_size = pages.shape[1:3]
  out = np.zeros(query.shape)
  for row in range(rows):
    prefix = [
      pages[table[row, s // page_size], :, s % page_size]
      for s in range(int(length[row]))
    ]
    for node in range(nodes):
      seen = [block_kv[row, i] for i in range(nodes) if mask[row, node, i]]
      begin = 0 if first is None else first[row, node]
      entries = np.stack(prefix[begin:] + seen)
      for head in range(heads):
        mine = entries[:, head // (heads // kv_heads)]
        scores = scale * mine[:, :head_dim] @ query[row, node, head]
        if soft_cap is not None:
          scores = soft_cap * np.tanh(scores / soft_cap)
        weights = np.exp(scores - scores.max())
        out[row, node, head] = weights / weights.sum() @ mine[:, head_dim:]
  return out


@pytest.mark.parametrize(
  ("window", "soft_cap"), [(None, None), (1, None), (3, 1.5), (8, None)]
)
@pytest.mark.parametrize(
  ("heads", "kv_heads", "head_dim", "dtype", "cache_dtype", "tolerance"),
  [
    # See test_prefix_attention for the tolerances.
    (3, 1, 6, "float32", "float32", 1e-5),
    (2, 2, 10, "float32", "bfloat16", 1e-5),
    (8, 1, 6, "bfloat16", "bfloat16", 2.0**-5),
    (6, 2, 6, "float16", "float32", 2.0**-8),
  ],
)
def test_equals_one_dense_softmax(
  heads, kv_heads, head_dim, dtype, cache_dtype, tolerance, window, soft_cap
):
  rng = np.random.default_rng(1)
  lengths = np.array([0, 1, 7, 13], np.int32)
  rows, nodes, page_size = len(lengths), 11, 4

  def normal(*shape, kind):
    array = rng.normal(size=shape).astype(np.float32)
    return jnp.asarray(array).astype(kind)

  query = normal(rows, nodes, heads, head_dim, kind=dtype)
  block_kv = normal(rows, nodes, kv_heads, 2 * head_dim, kind=cache_dtype)
  pages = np.full((17, kv_heads, page_size, 2 * head_dim), np.nan, np.float32)
  table = np.full((rows, 5), 17, np.int32)
  order = rng.permutation(17)[:16].reshape(rows, 4)
  for row, length in enumerate(lengths):
    live = -(-length // page_size)
    table[row, :live] = order[row, :live]
    for s in range(length):
      pages[table[row, s // page_size], :, s % page_size] = rng.normal(
        size=(kv_heads, 2 * head_dim)
      )
  pages = jnp.asarray(pages).astype(cache_dtype)
  trees = np.array(
    [[-1] + [rng.integers(0, i) for i in range(1, nodes)] for _ in range(rows)],
    np.int32,
  )
  mask = np.stack([_walk(tree) for tree in trees])
  first = start = None
  if window is not None:
    depth = mask.sum(-1) - 1
    positions = (lengths[:, None] + depth).astype(np.int32)
    mask, start = _window(mask, positions, window)
    first = np.zeros((rows, nodes), int)
    for row in range(rows):
      for node in range(nodes):
        while positions[row, node] - window >= first[row, node]:
          first[row, node] += 1
  problem = (query, block_kv, pages, table, lengths, mask)
  got = _attention(*problem, scale=0.5, start=start, soft_cap=soft_cap)
  assert got.dtype == dtype
  np.testing.assert_allclose(
    np.asarray(got).astype(np.float64),
    _dense(*problem, 0.5, first, soft_cap),
    rtol=0,
    atol=tolerance,
  )


def test_a_node_sees_no_stranger():
  """Other branches change nothing, not one bit."""
  rng = np.random.default_rng(2)
  query = rng.normal(size=(1, 5, 3, 6)).astype(np.float32)
  block = rng.normal(size=(1, 5, 1, 12)).astype(np.float32)
  pages = rng.normal(size=(3, 1, 4, 12)).astype(np.float32)
  parents = np.array([[-1, 0, 0, 1, 2]], np.int32)
  place = (pages, np.array([[2, 0]], np.int32), np.array([5], np.int32))
  mask = np.asarray(_mask(parents))
  want = np.asarray(_attention(query, block, *place, mask, scale=0.4))
  for node in range(5):
    other = block.copy()
    other[0, ~mask[0, node]] *= -3
    got = np.asarray(_attention(query, other, *place, mask, scale=0.4))
    np.testing.assert_array_equal(got[0, node], want[0, node])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_broken_node_reaches_only_its_descendants(value):
  rng = np.random.default_rng(0)
  parents = jnp.asarray([[-1, 0, 0, 1, 2]], jnp.int32)
  mask = pallas_kernels.ancestor_mask(parents)
  query = jnp.asarray(rng.standard_normal((1, 5, 3, 8)), jnp.float32)
  pages = jnp.asarray(rng.standard_normal((2, 1, 3, 16)), jnp.float32)
  block = rng.standard_normal((1, 5, 1, 16)).astype(np.float32)

  def run(block):
    return np.asarray(
      pallas_kernels.tree_attention(
        query,
        jnp.asarray(block),
        pages,
        jnp.asarray([[1, 0]]),
        jnp.asarray([5]),
        mask,
        scale=0.3,
      )
    )

  sound = run(block)
  block[0, 2] = value  # node 2, whose only child is node 4
  broken = run(block)
  np.testing.assert_array_equal(broken[0, [0, 1, 3]], sound[0, [0, 1, 3]])
  assert np.isnan(broken[0, [2, 4]]).all()


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("platform", ["cpu", "cuda", "rocm", "tpu"])
def test_lowers_for_every_platform(platform, window):
  def attend(query, block, pages, table, length, parents, positions):
    mask, start = pallas_kernels.ancestor_mask(parents), None
    if window is not None:
      mask, start = pallas_kernels.window_mask(mask, positions, window)
    return pallas_kernels.tree_attention(
      query, block, pages, table, length, mask, scale=0.5, start=start
    )

  shapes = [
    jax.ShapeDtypeStruct(shape, dtype)
    for shape, dtype in (
      ((2, 5, 6, 16), jnp.bfloat16),
      ((2, 5, 2, 32), jnp.bfloat16),
      ((7, 2, 16, 32), jnp.bfloat16),
      ((2, 3), jnp.int32),
      ((2,), jnp.int32),
      ((2, 5), jnp.int32),
      ((2, 5), jnp.int32),
    )
  ]
  traced = jax.jit(attend).trace(*shapes)
  text = traced.lower(lowering_platforms=(platform,)).as_text()
  # Without a window nothing reads the positions.
  read = text.count("%arg6") > 1
  assert read == (window is not None)
  assert "stablehlo.while" in text
