"""Fakes are what they say they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldjax import decoding, memory, testing


def _context(lengths, width=12):
  return decoding.DraftContext(
    jnp.zeros((len(lengths), width), jnp.int32),
    jnp.asarray(lengths, dtype=jnp.int32),
    None,
  )


@pytest.mark.parametrize(("size", "depth"), [(1, 0), (2, 1), (9, 1), (13, 4)])
def test_random_trees_are_trees(size, depth):
  draft = testing.random_tree_draft(size, depth, 7)
  assert (draft.size, draft.depth) == (size, depth)
  propose = jax.jit(lambda context: draft.propose((), (), context)[0])
  shapes, invalid, deepest = set(), 0, 0
  for start in range(20):
    got = propose(_context([start, start + 3]))
    for parents, tokens in zip(
      got.parents.tolist(), got.tokens.tolist(), strict=True
    ):
      assert parents[0] == -1
      depths = [0]
      for node in range(1, size):
        assert 0 <= parents[node] < node
        depths.append(depths[parents[node]] + 1)
      assert all(-1 <= token < 7 for token in tokens)
      deepest = max(deepest, *depths)
      invalid += tokens[1:].count(-1)
      shapes.add(tuple(parents))
  assert deepest == depth
  if size > 2 and depth > 1:
    assert len(shapes) > 10 and invalid


def test_script_is_played_from_the_length_on():
  script = jnp.arange(24, dtype=jnp.int32).reshape(2, 12)
  got, _ = testing.scripted_draft(3).propose(script, (), _context([4, 11]))
  assert got.tokens.tolist() == [[-1, 4, 5, 6], [-1, 23, -1, -1]]
  assert got.parents.tolist() == [[-1, 0, 1, 2]] * 2


def test_tiny_model():
  tiny = testing.tiny_model(max_len=20, page_size=8, num_pages=3)
  again = testing.tiny_model(num_pages=3, page_size=8, max_len=20)
  assert tiny is again
  cache = tiny.init_cache(2)
  assert isinstance(cache, memory.PagedKVCache)
  assert cache.block_table.shape == (2, 3) and cache.pool.num_pages == 3
  dense = testing.tiny_model(max_len=20, page_size=None)
  assert isinstance(dense.init_cache(2), memory.DenseKVCache)
  # One configuration, one target: nothing compiles again for other weights.
  other = testing.tiny_model(seed=1, max_len=20, page_size=8, num_pages=3)
  assert other.target is tiny.target and other.init_cache is tiny.init_cache
  assert not np.array_equal(
    other.params["embed_tokens"]["weight"],
    tiny.params["embed_tokens"]["weight"],
  )
  narrow = testing.tiny_model(dtype="bfloat16", cache_dtype="float16")
  assert narrow.params["embed_tokens"]["weight"].dtype == jnp.bfloat16
  assert narrow.init_cache(1).pages[0].dtype == jnp.float16


def test_pad_prompts():
  tokens, lengths = testing.pad_prompts([[4], [1, 2, 3]])
  assert tokens.tolist() == [[4, 0, 0], [1, 2, 3]]
  assert lengths.tolist() == [1, 3]
  assert tokens.dtype == lengths.dtype == jnp.int32
