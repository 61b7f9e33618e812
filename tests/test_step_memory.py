"""What a compiled step takes: parameters, pool, and a small workspace."""

import functools
import re

import jax
import pytest

import ldjax
from ldjax import testing

_BATCH = 2


def _compiled(num_pages, dtype, options):
  model = testing.tiny_model()
  init_cache = ldjax.assemble.cache_factory(
    model.config, max_len=64, page_size=4, num_pages=num_pages, dtype=dtype
  )
  decoder = ldjax.decoding.speculative(
    model.target, ldjax.decoding.ngram(3), init_cache, max_len=64
  )
  params = ldjax.decoding.DecoderParams(model.params)
  state = jax.eval_shape(functools.partial(decoder.empty, batch=_BATCH), params)
  step = jax.jit(decoder.step, donate_argnums=1)
  return step.lower(params, state).compile(options), params, state


def _bytes(tree):
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_larger_pool_takes_no_more_workspace(as_users, dtype):
  found = {}
  for num_pages in (53, 997):
    step, params, state = _compiled(num_pages, dtype, as_users)
    memory = step.memory_analysis()
    pool = _bytes(state.cache.pages)
    # Everything comes in once, but for what is so small that it is padded.
    given = _bytes((params, state))
    assert abs(memory.argument_size_in_bytes - given) < 4096
    # The pool goes out where it came in.
    assert memory.alias_size_in_bytes >= pool
    fresh = memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert fresh < 16384  # the round
    found[num_pages] = memory.temp_size_in_bytes
  # Nothing as large as the pool: one number a page, to find free ones.
  assert found[997] - found[53] < 16 * (997 - 53) * _BATCH
  model = testing.tiny_model()
  # A layer's prefix of each row, as attention gathers it, and the logits.
  row = 64 * model.config.num_kv_heads * 2 * model.config.head_dim * 4
  logits = 4 * model.config.vocab_size * 4
  assert found[53] < 16 * _BATCH * (row + logits)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_no_copy_of_the_pool(as_users, dtype):
  step, _, state = _compiled(997, dtype, as_users)
  text = step.as_text()
  for leaf in {x.shape: x for x in jax.tree.leaves(state.cache.pages)}.values():
    shape = ",".join(map(str, leaf.shape))
    assert f"[{shape}]" in text
    copies = re.findall(rf"= \w+\[{shape}\]\S* copy\(.*", text)
    assert not copies, copies
