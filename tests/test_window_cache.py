"""generate on models whose layers have windows, however memory fares."""

import dataclasses
import functools
import json
import shutil

import jax
import pytest

import ldjax
from ldjax import (
  _engine,
  _request,
  assemble,
  checkpoints,
  decoding,
  memory,
  testing,
)

_PROMPTS = ["Why is it so? Nobody knows.", "ab ab ab ab", "x", "Why?"]
_SETTINGS = {
  "max_new_tokens": [40, 11, 60, 33],
  "seed": [1, 2, 3, 4],
}
_KINDS = {
  "all": {"model_type": "mistral", "sliding_window": 9},
  "some": {
    "model_type": "smollm3",
    "use_sliding_window": True,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"],
    "no_rope_layers": [1, 1],
  },
}


@pytest.fixture(scope="module")
def windowed(tiny_folder, tmp_path_factory):
  """load(kind, **options) of a model with windows of nine positions."""

  def load(kind, **options):
    folder = tmp_path_factory.mktemp("windows") / kind
    shutil.copytree(tiny_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **_KINDS[kind]}))
    model = ldjax.load(folder, page_size=4, max_len=96, **options)
    return dataclasses.replace(model, prefill_chunks=(8, 64))

  return load


def _create_dense(config, max_len, batch):
  return memory.DenseKVCache.create(
    batch=batch,
    max_len=max_len,
    num_layers=config.num_layers,
    num_kv_heads=config.num_kv_heads,
    head_dim=config.head_dim,
  )


def _alone(model):
  """Texts without pages, one by one, by the decoder itself."""
  dense = functools.partial(_create_dense, model.config, model.max_len)
  decoder = decoding.autoregressive(model.target, dense, max_len=model.max_len)
  texts = []
  for prompt, limit in zip(_PROMPTS, _SETTINGS["max_new_tokens"], strict=True):
    (text,), _ = testing.decode_tokens(
      decoder,
      model.params,
      [ldjax.encode_prompt(model.tokenizer, prompt)],
      max_new_tokens=limit,
      stop_ids=model.eos_token_ids,
    )
    texts.append(tuple(text))
  return texts


@pytest.mark.slow
@pytest.mark.parametrize("kind", _KINDS)
def test_texts_are_those_of_the_dense_cache(windowed, kind):
  plain = windowed(kind, draft="none")
  want = _alone(plain)
  for options in (
    {},
    {"initial_pages": 6},
    {"num_pages": 26},
    {"num_pages": 26, "on_pressure": "offload"},
  ):
    model = windowed(kind, **options)
    results = ldjax.generate(model, _PROMPTS, batch_size=3, **_SETTINGS)
    assert [tuple(result.tokens) for result in results] == want, options


@pytest.mark.slow
def test_rows_give_way_and_come_back(windowed):
  """The pool of the layers without a window runs short, in each manner."""
  want = None
  for told, options in (
    ("grown", {"initial_pages": 6}),
    ("preempted", {"num_pages": 26}),
    ("offloaded", {"num_pages": 26, "on_pressure": "offload"}),
  ):
    model = windowed("some", **options)
    engine = _engine.Engine(model, 3, share=True)
    assert not engine._pages.sharing
    for i, prompt in enumerate(_PROMPTS):
      settings = ldjax.Settings(max_new_tokens=60, seed=i, temperature=1.0)
      for one in _request.make_requests(model, prompt, settings):
        engine.submit(one)
    found = {}
    while not engine.idle:
      for event in engine.advance():
        if event.generation is not None:
          found[event.request] = event.generation.tokens
    assert dataclasses.asdict(engine.memory_counts)[told] > 0
    cache = engine._state.cache
    assert int(cache.pool.num_free) == cache.pool.num_pages
    want = want or found
    assert found == want


@pytest.mark.slow
def test_compress(windowed):
  model = windowed("some", num_pages=26, on_pressure="compress", draft="none")
  with pytest.warns(UserWarning, match="the cache becomes int8"):
    results = ldjax.generate(model, _PROMPTS, batch_size=3, **_SETTINGS)
  assert any(result.compressed for result in results)


def test_bytes_held_follow_the_window(windowed):
  model = windowed("all")
  cache = jax.eval_shape(functools.partial(model.init_cache, 1))
  # Nine positions: the eight before, in three pages of four at most.
  one_page = 2 * 4 * 16 * 4  # L, Z, 2H, bytes
  assert cache.held_bytes(96) == cache.held_bytes(12) == 3 * one_page
  some = windowed("some")
  cache = jax.eval_shape(functools.partial(some.init_cache, 1))
  assert cache.held_bytes(96) == (24 + 3) * one_page // 2


def test_a_window_that_is_switched_off_sizes_nothing(tiny_folder, tmp_path):
  """transformers#38002, lorax#532: the flag is false and a size is there."""

  def cache_of(**changes):
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "qwen2", "sliding_window": 4} | changes
    (folder / "config.json").write_text(json.dumps(config))
    found = checkpoints.read_config(checkpoints.resolve(folder))
    init_cache = assemble.cache_factory(found, max_len=96, page_size=4)
    return jax.eval_shape(functools.partial(init_cache, 2))

  off = cache_of(use_sliding_window=False)
  assert isinstance(off, memory.PagedKVCache)
  assert [layer.shape[0] for layer in off.pages] == [48, 48]
  on = cache_of(use_sliding_window=True, max_window_layers=1)
  assert isinstance(on, memory.GroupedKVCache)
  assert [layer.shape[0] for layer in on.pages] == [48, 4]
