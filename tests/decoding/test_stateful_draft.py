"""The contract carries drafts with a paged cache of their own.

One is an independent model that happens to be the target, so that everything
it proposes must be accepted. The other is a toy of the EAGLE kind: one
attention layer over pairs of the target's feature and the token after it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from ldjax import decoding, memory, pallas_kernels, sampling, testing

Z = 4


def _chain(batch, size):
  parents = jnp.arange(-1, size - 1, dtype=jnp.int32)
  return jnp.broadcast_to(parents[None], (batch, size))


def _positions(start, size):
  return start[:, None] + jnp.arange(size, dtype=jnp.int32)[None]


def _path(rows, size):
  return jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32)[None], (rows, size))


def _pending(context):
  return jnp.take_along_axis(
    context.tokens, jnp.maximum(context.length - 1, 0)[:, None], axis=1
  )[:, 0]


@functools.cache
def model_draft(target, init_cache, depth):
  """A small model as the draft, drawing with the same noise."""

  def propose(params, cache, context):
    batch = context.length.shape[0]
    parents = _chain(batch, depth + 1)
    positions = _positions(cache.length, depth + 1)
    tokens = jnp.zeros((batch, depth + 1), jnp.int32)
    tokens = tokens.at[:, 0].set(_pending(context))

    def draw(i, tokens):
      out = target.forward(params, tokens, positions, parents, cache.view())
      at = jax.lax.dynamic_slice_in_dim(out.hidden, i, 1, axis=1)
      logits = target.score(params, at).logits[:, 0]
      drawn = sampling.draw(logits, context.sampling, cache.length + i + 1)
      return tokens.at[:, i + 1].set(drawn)

    tokens = jax.lax.fori_loop(0, depth, draw, tokens)
    return decoding.Candidates(tokens, parents), cache

  def observe(params, cache, seen):
    rows, size = seen.tokens.shape
    view = cache.view(seen.rows)
    out = target.forward(
      params, seen.tokens, seen.positions, _chain(rows, size), view
    )
    return cache.commit(out.block_kv, _path(rows, size), seen.count, seen.rows)[
      0
    ]

  return decoding.DraftFn(
    init=lambda params, batch: init_cache(batch),
    propose=propose,
    observe=observe,
    release=lambda cache, mask: cache.release(mask),
    size=depth + 1,
    depth=depth,
  )


@struct.dataclass(kw_only=True)
class EagleState:
  cache: memory.PagedKVCache
  feature: jax.Array
  """[B, E], of the last committed position; of none before the first."""


@functools.cache
def eagle_draft(vocab, width, depth, max_len):
  """Position t holds the pair (feature of t - 1, token of t)."""

  def layer(params, cache, rows, features, tokens, positions, parents):
    pair = jnp.concatenate(
      [features, params["embed"].at[tokens].get(mode="clip")], axis=-1
    )
    x = jnp.tanh(pair @ params["fuse"])
    x = x + params["place"].at[positions].get(mode="clip")
    view = cache.view(rows)
    kv = (x @ params["kv"])[:, :, None]
    out = pallas_kernels.tree_attention(
      x[:, :, None],
      kv,
      view.pages[0],
      view.block_table,
      view.length,
      pallas_kernels.ancestor_mask(parents),
      scale=width**-0.5,
    )
    return x + out[:, :, 0], kv

  def init(params, batch):
    return EagleState(
      cache=memory.PagedKVCache.create(
        batch=batch,
        max_len=max_len,
        num_layers=1,
        num_kv_heads=1,
        head_dim=width,
        page_size=Z,
      ),
      feature=jnp.zeros((batch, width)),
    )

  def propose(params, state, context):
    batch = context.length.shape[0]
    parents = _chain(batch, depth + 1)
    rows = jnp.arange(batch, dtype=jnp.int32)
    positions = _positions(state.cache.length, depth + 1)
    tokens = jnp.zeros((batch, depth + 1), jnp.int32)
    tokens = tokens.at[:, 0].set(_pending(context))
    features = jnp.zeros((batch, depth + 1, width)).at[:, 0].set(state.feature)

    def guess(i, carry):
      tokens, features = carry
      out, _ = layer(
        params, state.cache, rows, features, tokens, positions, parents
      )
      at = jax.lax.dynamic_slice_in_dim(out, i, 1, axis=1)[:, 0]
      best = jnp.argmax(at @ params["embed"].T, axis=-1).astype(jnp.int32)
      return tokens.at[:, i + 1].set(best), features.at[:, i + 1].set(at)

    tokens, _ = jax.lax.fori_loop(0, depth, guess, (tokens, features))
    return decoding.Candidates(tokens, parents), state

  def observe(params, state, seen):
    rows, size = seen.tokens.shape
    first = jnp.where(seen.positions[:, :1] == 0, 0.0, state.feature[seen.rows])
    before = jnp.concatenate([first[:, None], seen.features[:, :-1]], axis=1)
    _, kv = layer(
      params,
      state.cache,
      seen.rows,
      before,
      seen.tokens,
      seen.positions,
      _chain(rows, size),
    )
    cache, ok = state.cache.commit(
      (kv,), _path(rows, size), seen.count, seen.rows
    )
    del ok  # a draft that is full guesses badly and harms nobody
    return state.replace(
      cache=cache, feature=decoding.last_observed(seen, state.feature)
    )

  def release(state, mask):
    return state.replace(cache=state.cache.release(mask))

  return decoding.DraftFn(init, propose, observe, release, depth + 1, depth)


def _eagle_params(vocab, width, positions):
  keys = jax.random.split(jax.random.key(3), 4)
  shapes = {
    "embed": (vocab, width),
    "fuse": (2 * width, width),
    "place": (positions, width),
    "kv": (width, 2 * width),
  }
  return {
    name: jax.random.normal(key, shape) * 0.5
    for key, (name, shape) in zip(keys, shapes.items(), strict=True)
  }


def _eagle(toy, max_len=None):
  draft = eagle_draft(toy.V, 2, 3, max_len or toy.max_len)
  return toy.decoder(draft), draft, _eagle_params(toy.V, 2, toy.max_len)


@pytest.mark.parametrize(
  "depth", [3, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 6))]
)
@pytest.mark.parametrize("seed", [None, 4], ids=["greedy", "sampled"])
def test_exact_copy_is_accepted_for_ever(toy, depth, seed):
  # vllm#14649: one stale key in the draft's cache would cost acceptance.
  toy = toy.long()
  prompts = toy.prompts[:2]
  cache = toy.init_cache(page_size=16)
  draft = model_draft(toy.target, cache, depth)
  decoder = toy.decoder(draft, page_size=16)
  params = toy.params()._replace(draft=toy.params().target)
  setting = sampling.make_sampling(
    2, temperature=0.0 if seed is None else 1.0, seed=seed or 0
  )
  state = toy.init(
    decoder, params, prompts, max_new_tokens=352, sampling_=setting
  )
  state, rounds = toy.trace(decoder, params, state, 50)
  assert (rounds.count == depth + 1).all()
  np.testing.assert_array_equal(state.draft.length, state.cache.length)
  # The draft read what the target read, and wrote the same.
  np.testing.assert_array_equal(state.draft.pages[0], state.cache.pages[0])
  if seed is None:
    length = 1 + 50 * (depth + 1)
    assert toy.texts(state) == [toy.greedy(p, length) for p in prompts]


@pytest.mark.slow
def test_exact_copy_of_a_transformer():
  tiny = testing.tiny_model(max_len=48)
  draft = model_draft(tiny.target, tiny.init_cache, 3)
  decoder = decoding.speculative(
    tiny.target, draft, tiny.init_cache, max_len=tiny.max_len
  )
  params = decoding.DecoderParams(tiny.params, tiny.params)
  prompts = [[1, 2, 3], [9, 8, 7, 6, 5], [30]]
  for setting in ({}, {"temperature": 1.0, "seed": 3}):
    _, state = testing.decode_tokens(
      decoder,
      params,
      prompts,
      sampling=sampling.make_sampling(3, **setting),
      max_new_tokens=41,
    )
    assert state.rounds.tolist() == [1 + 10] * 3


@pytest.mark.parametrize("seed", [None, 9], ids=["greedy", "sampled"])
def test_eagle_changes_no_token(toy, seed):
  decoder, _, draft_params = _eagle(toy)
  request: dict[str, Any] = {"max_new_tokens": 28}
  if seed is not None:
    request["sampling_"] = sampling.make_sampling(4, temperature=1.0, seed=seed)
  want, _ = toy.run(toy.decoder(), toy.params(), **request)
  texts, state = toy.run(decoder, toy.params(draft_params), **request)
  assert texts == want
  if seed is None:
    assert texts == [toy.greedy(p, 28) for p in toy.prompts]
  np.testing.assert_array_equal(state.draft.cache.length, state.cache.length)


def _committed(cache, row):
  """[S, 2H] of one row, by position."""
  pages, table = np.asarray(cache.pages[0]), np.asarray(cache.block_table)
  return np.stack(
    [pages[table[row, s // Z], 0, s % Z] for s in range(int(cache.length[row]))]
  )


def test_eagle_holds_true_features_only(toy):
  """After a run, the draft's cache is what the whole text at once gives."""
  decoder, draft, draft_params = _eagle(toy)
  params = toy.params(draft_params)
  state = toy.init(decoder, params, max_new_tokens=27)
  state, rounds = toy.trace(decoder, params, state, 27)
  batch = len(toy.prompts)
  length = np.asarray(state.cache.length)
  size = int(length.max())
  tokens = state.tokens[:, :size]
  positions = _positions(jnp.zeros((batch,), jnp.int32), size)

  @jax.jit
  def at_once(params):
    view = toy.init_cache()(batch).view()
    out = toy.target.forward(
      params.target, tokens, positions, _chain(batch, size), view
    )
    return draft.observe(
      params.draft,
      draft.init(params.draft, batch),
      decoding.Observation(
        rows=jnp.arange(batch),
        tokens=tokens,
        features=out.features,
        positions=positions,
        count=jnp.asarray(length),
      ),
    )

  whole = at_once(params)
  for row in range(batch):
    # Sums over the prefix and over the block are in another order.
    np.testing.assert_allclose(
      _committed(state.draft.cache, row),
      _committed(whole.cache, row),
      rtol=1e-4,
      atol=1e-5,
    )
  np.testing.assert_array_equal(state.draft.feature, whole.feature)
  assert rounds.count.sum() == state.emitted.sum() - batch


def test_eagle_gives_its_pages_back(toy):
  decoder, _, draft_params = _eagle(toy)
  params = toy.params(draft_params)
  texts, state = toy.run(decoder, params, max_new_tokens=20)
  total = state.draft.cache.pool.num_pages
  programs = toy.programs(decoder)
  some = programs.release(state, jnp.array([True, False, True, False]))
  assert some.draft.cache.length.tolist() == [
    0,
    int(state.draft.cache.length[1]),
    0,
    int(state.draft.cache.length[3]),
  ]
  held = sum(-(-n // Z) for n in some.draft.cache.length.tolist())
  assert int(some.draft.cache.pool.num_free) == total - held
  everything = programs.release(state, jnp.ones((4,), bool))
  assert int(everything.draft.cache.pool.num_free) == total
  # A row that comes back after preemption tells its draft everything again.
  state = toy.init(decoder, params, max_new_tokens=20)
  for _ in range(3):
    state, _ = programs.step(params, state)
  state = programs.preempt(state, jnp.array([False, True, True, False]))
  assert state.draft.cache.length.tolist()[1:3] == [0, 0]
  for _ in range(8):
    state, _ = programs.prefill(params, state, jnp.arange(4), 4)
  np.testing.assert_array_equal(state.draft.cache.length, state.cache.length)
  while np.asarray(state.live).any():
    state, _ = programs.step(params, state)
  assert toy.texts(state) == texts


@pytest.mark.slow
def test_draft_shorter_than_the_target(toy):
  # vllm#21986: its cache is full long before the target's.
  decoder, _, draft_params = _eagle(toy, max_len=8)
  texts, state = toy.run(decoder, toy.params(draft_params), max_new_tokens=28)
  assert texts == [toy.greedy(p, 28) for p in toy.prompts]
  assert int(state.draft.cache.length.max()) <= 8
