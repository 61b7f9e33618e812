"""Logits that are not finite, and garbage where nobody should read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldjax import decoding, sampling, testing

Status = decoding.Status


def _equal(one, other):
  jax.tree.map(np.testing.assert_array_equal, one, other)


def test_nan_weights_emit_and_commit_nothing(toy):
  decoder = toy.decoder(testing.scripted_draft(4))
  good = toy.params(toy.script([toy.greedy(p, 38) for p in toy.prompts]))
  bad = toy.params(good.draft, scale=np.nan)
  state = toy.init(decoder, good)
  state, _ = toy.programs(decoder).step(good, state)
  after, one = toy.programs(decoder).step(bad, state)
  assert not np.asarray(one.finite).any() and not np.asarray(one.count).any()
  assert (np.asarray(one.tokens) == -1).all()
  assert not np.asarray(after.finite).any()
  assert not np.asarray(after.live).any()
  _equal(after.replace(finite=state.finite), state)
  # Nothing wrong was written, so good weights just go on.
  while not (np.asarray(after.status) == Status.LENGTH).all():
    after, _ = toy.programs(decoder).step(good, after)
  assert toy.texts(after) == [toy.greedy(p, 16) for p in toy.prompts]


def test_nan_in_prefill(toy):
  decoder = toy.decoder(testing.scripted_draft(4))
  script = toy.script([toy.greedy(p, 38) for p in toy.prompts])
  state = toy.init(decoder, toy.params(script, scale=np.nan))
  assert not np.asarray(state.finite).any()
  assert state.emitted.tolist() == [0] * 4
  assert state.status.tolist() == [Status.PREFILLING] * 4
  assert not np.asarray(state.live).any()
  good = toy.params(script)
  programs = toy.programs(decoder)
  state = programs.preempt(state, jnp.ones((4,), bool))
  for _ in range(3):
    state, _ = programs.prefill(good, state, jnp.arange(4), 4)
  assert np.asarray(state.finite).all()
  while np.asarray(state.live).any():
    state, _ = programs.step(good, state)
  assert toy.texts(state) == [toy.greedy(p, 16) for p in toy.prompts]


def test_root_only_rounds_carry_on(toy):
  """A target that fails only in a wide pass: the same state goes on narrow."""
  draft = testing.scripted_draft(4)
  wide, narrow = toy.decoder(draft), toy.decoder(decoding.root_only(draft))
  script = toy.script([toy.greedy(p, 38) for p in toy.prompts])
  state = toy.init(wide, toy.params(script))
  params = toy.params(script, when_wide=np.nan)
  fallbacks = 0
  for _ in range(40):
    state, one = toy.programs(wide).step(params, state)
    if not np.asarray(one.finite).all():
      fallbacks += 1
      state, one = toy.programs(narrow).step(params, state)
      assert np.asarray(one.finite).all()
  assert fallbacks == 15
  assert toy.texts(state) == [toy.greedy(p, 16) for p in toy.prompts]


@pytest.mark.parametrize(
  ("page_size", "cache_dtype"),
  [
    (4, "float32"),
    pytest.param(None, "float32", marks=pytest.mark.slow),
    pytest.param(4, "int8", marks=pytest.mark.slow),
    pytest.param(4, "float8_e4m3fn", marks=pytest.mark.slow),
  ],
)
def test_garbage_where_nothing_was_committed(page_size, cache_dtype):
  """NaN in every slot that holds no committed position changes nothing."""
  tiny = testing.tiny_model(
    max_len=24, page_size=page_size, cache_dtype=cache_dtype
  )
  decoder = decoding.speculative(
    tiny.target,
    testing.random_tree_draft(7, 3, 31),
    tiny.init_cache,
    max_len=tiny.max_len,
  )
  params = decoding.DecoderParams(tiny.params)
  step = jax.jit(decoder.step)
  poison = jax.jit(_poison)
  state = jax.jit(decoder.empty, static_argnums=1)(params, 2)
  admit = jax.jit(decoder.admit)
  for row, prompt in enumerate(([1, 2, 3, 4, 5], [6])):
    state = admit(
      state,
      jnp.int32(row),
      jnp.asarray([*prompt, *[0] * (5 - len(prompt))]),
      jnp.int32(len(prompt)),
      _greedy(),
      jnp.int32(14),
      jnp.asarray(decoding.stop_ids_row(())),
    )
  prefill = jax.jit(decoder.prefill, static_argnums=3)
  rows = jnp.arange(2)
  dirty = state.replace(cache=poison(state.cache))
  state, _ = prefill(params, state, rows, 5)
  dirty, _ = prefill(params, dirty, rows, 5)
  for _ in range(14):
    dirty = dirty.replace(cache=poison(dirty.cache))
    state, one = step(params, state)
    dirty, other = step(params, dirty)
    _equal(one, other)
  assert np.asarray(dirty.emitted).tolist() == [14, 14]
  assert np.asarray(dirty.finite).all()


def _greedy():
  from ldjax import sampling

  return jax.tree.map(lambda x: x[0], sampling.make_sampling(1))


def _poison(cache):
  """Keeps the committed slots, and puts NaN into all others."""
  view = cache.view()
  num_pages, _, size, _ = cache.pages[0].shape
  slot = jnp.arange(view.block_table.shape[1] * size)[None]
  page = jnp.where(
    slot < cache.length[:, None],
    view.block_table[:, slot[0] // size],
    num_pages,
  )
  kept = jnp.zeros((num_pages, size), bool)
  kept = kept.at[page, slot % size].set(True, mode="drop")

  def poison(layer):
    worst = 127 if layer.dtype == jnp.int8 else jnp.nan
    return jnp.where(
      kept[:, None, :, None], layer, jnp.asarray(worst, layer.dtype)
    )

  return cache.replace(pages=jax.tree.map(poison, cache.pages))


def test_minus_infinity_rules_an_id_out_and_nothing_else_may_be_infinite():
  rows = np.zeros((5, 1, 7), np.float32)
  rows[0, 0, :3] = -np.inf
  rows[0, 0, 5] = 1.0
  rows[1, 0, 2] = np.nan
  rows[2, 0, 2] = np.inf
  rows[3, 0, :] = -np.inf
  walk = decoding.accept(
    decoding.Scores(jnp.asarray(rows)),
    decoding.Candidates(
      jnp.full((5, 1), -1, jnp.int32), jnp.full((5, 1), -1, jnp.int32)
    ),
    sampling.make_sampling(5),
    sampling.History(
      jnp.zeros((5, 2), jnp.int32),
      jnp.ones((5,), jnp.int32),
      jnp.ones((5,), jnp.int32),
    ),
    depth=0,
    stop_ids=jnp.full((5, 1), -1, jnp.int32),
    remaining=jnp.ones((5,), jnp.int32),
  )
  assert walk.finite.tolist() == [True, False, False, False, True]
  assert walk.count.tolist() == [1, 0, 0, 0, 1]
  assert walk.tokens[0, 0] == 5
