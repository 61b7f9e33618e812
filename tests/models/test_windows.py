"""Decoding with pages that only a window can see."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ldjax import assemble, decoding, memory, models, sampling, testing

_MAX_LEN, _SIZE = 60, 4
_PROMPTS = ([1, 2, 3, 1, 2, 3, 1, 2, 9, 4, 4, 6, 6, 1], [30, 0], [7])
_MODELS = {
  "Gemma 2": {
    "norm_offset": 1.0,
    "embed_scale": 3.0,
    "activation": "gelu_tanh",
    "output_norms": True,
    "tie_word_embeddings": True,
    "query_scale": 0.6,
    "attn_soft_cap": 2.0,
    "final_soft_cap": 5.0,
    "windows": (4, None),
  },
  "Gemma 3": {
    "norm_offset": 1.0,
    "activation": "gelu_tanh",
    "output_norms": True,
    "qk_norm": True,
    "windows": (6, None),
    "rope_theta": 300.0,
    "rope_local_theta": 20.0,
  },
  "Mistral": {"windows": (5, 5)},
  "two windows": {"windows": (1, 9)},
}


def _model(config, name):
  config = dataclasses.replace(config, **_MODELS[name])
  target, params = models.functionalize(
    models.Transformer(config, rngs=nnx.Rngs(0))
  )
  return config, target, decoding.DecoderParams(params)


def _dense(config):
  def init_cache(batch):
    return memory.DenseKVCache.create(
      batch=batch,
      max_len=_MAX_LEN,
      num_layers=config.num_layers,
      num_kv_heads=config.num_kv_heads,
      head_dim=config.head_dim,
    )

  return init_cache


def _texts(target, params, init_cache, draft):
  decoder = decoding.speculative(
    target, draft, init_cache, max_len=_MAX_LEN, chunk=11
  )
  init = jax.jit(decoder.init)
  tokens, lengths = testing.pad_prompts(_PROMPTS)
  state = init(
    params,
    tokens,
    lengths,
    sampling=sampling.make_sampling(3, temperature=[0.0, 1.0, 0.7], seed=5),
    max_new_tokens=_MAX_LEN,
  )
  state = jax.jit(decoding.decode, static_argnums=0)(decoder, params, state)
  return [
    row[: int(n)].tolist()
    for row, n in zip(np.asarray(state.tokens), state.length, strict=True)
  ], state


@pytest.mark.slow
@pytest.mark.parametrize("name", _MODELS)
def test_texts_are_those_of_the_dense_cache(config, name):
  config, target, params = _model(config, name)
  want, _ = _texts(target, params, _dense(config), decoding.root_only())
  assert [len(text) for text in want] == [_MAX_LEN] * 3
  init_cache = assemble.cache_factory(config, max_len=_MAX_LEN, page_size=_SIZE)
  for draft in (
    decoding.root_only(),
    decoding.ngram(7),
    testing.random_tree_draft(17, 7, config.vocab_size),
  ):
    got, state = _texts(target, params, init_cache, draft)
    assert got == want
    cache = state.cache
    assert isinstance(cache, memory.GroupedKVCache)
    # As long as a row may be, a ring has the pages of its window.
    for ring in cache.windowed:
      pages = memory.window_pages(ring.window, _SIZE)
      assert ring.pages[0].shape[0] == 3 * pages
      assert pages < _MAX_LEN // _SIZE


def _seen(config, spoil):
  """Whether the next logits are finite if `spoil` (positions) is NaN."""
  _, target, params = _model(config, "Mistral")
  window = 5
  init_cache = assemble.cache_factory(
    dataclasses.replace(config, windows=(window, window)),
    max_len=_MAX_LEN,
    page_size=_SIZE,
  )
  decoder = decoding.speculative(
    target, decoding.root_only(), init_cache, max_len=_MAX_LEN, chunk=7
  )
  state = jax.jit(decoder.init)(
    params,
    jnp.arange(23, dtype=jnp.int32)[None],
    jnp.array([23]),
    sampling=sampling.make_sampling(1),
    max_new_tokens=9,
  )
  cache = state.cache
  assert cache.length.tolist() == [23]
  view = cache.view()
  ring = cache.windowed[0]
  kept = np.zeros((*ring.pages[0].shape[:1], _SIZE), bool)
  for position in range(23):
    page = int(view.table(0)[0, position // _SIZE])
    if page < len(kept) and position not in spoil:
      kept[page, position % _SIZE] = True
  pages = tuple(
    jnp.where(kept[:, None, :, None], x, jnp.nan) for x in ring.pages
  )
  state = state.replace(
    cache=cache.replace(windowed=(ring.replace(pages=pages),))
  )
  _, emitted = jax.jit(decoder.step)(params, state)
  return bool(emitted.finite[0])


@pytest.mark.slow
def test_exactly_the_window_is_seen(config):
  """mistral.rs#486: positions 19 to 22 and itself, and nothing of the rest."""
  assert _seen(config, range(19))
  for position in range(19, 23):
    assert not _seen(config, [position])


def test_one_cache_for_models_without_windows(config):
  init_cache = assemble.cache_factory(config, max_len=_MAX_LEN, page_size=_SIZE)
  assert isinstance(init_cache(2), memory.PagedKVCache)
  longer = dataclasses.replace(config, windows=(_MAX_LEN, None))
  init_cache = assemble.cache_factory(longer, max_len=_MAX_LEN, page_size=_SIZE)
  assert isinstance(init_cache(2), memory.PagedKVCache)
