"""The target's own texts: what is written, kept, and gone on with."""

import functools

import jax
import numpy as np
import pytest

import ldjax
from ldjax import decoding, sampling, training

PROMPTS = [[3, 1, 4], [1, 5], [9, 2, 6, 5, 3], [5], [8, 9, 7]]


def _texts(corpus):
  return {
    text.name: text
    for file in corpus.files
    for text in corpus.read(file).texts()
  }


_decode = jax.jit(decoding.decode, static_argnums=0)


@functools.cache
def _plain(target, init_cache, max_len):
  decoder = decoding.autoregressive(target, init_cache, max_len=max_len)
  return decoder, jax.jit(decoder.init, static_argnames="stop_ids")


def _decoded(small, prompt, limit, **settings):
  """The same answer by plain decoding of one row."""
  decoder, start = _plain(small.target, small.init_cache, small.max_len)
  padded = np.zeros((1, 12), np.int32)
  padded[0, : len(prompt)] = prompt
  params = decoding.DecoderParams(small.params)
  state = start(
    params,
    padded,
    np.array([len(prompt)]),
    sampling=sampling.make_sampling(1, **settings),
    max_new_tokens=limit,
    stop_ids=(7,),
  )
  state = _decode(decoder, params, state)
  return np.asarray(state.tokens[0])[: int(state.length[0])]


def test_texts_are_the_targets_own(small, write_corpus, tmp_path):
  corpus = write_corpus(tmp_path, PROMPTS, max_new_tokens=9)
  texts = _texts(corpus)
  assert sorted(texts) == list(range(len(PROMPTS)))
  for name, text in texts.items():
    assert text.start == len(PROMPTS[name])
    want = _decoded(small, PROMPTS[name], 9)
    np.testing.assert_array_equal(text.tokens, want)


def test_features_are_those_of_one_pass(small, write_corpus, tmp_path):
  corpus = write_corpus(tmp_path, PROMPTS, max_new_tokens=9)
  forward = jax.jit(small.target.forward)
  past = jax.jit(lambda: small.init_cache(1).view())()
  for text in _texts(corpus).values():
    read = text.tokens[:-1][None]
    chain = np.arange(-1, read.shape[1] - 1, dtype=np.int32)[None]
    output = forward(
      small.params, read, (chain + 1).astype(np.int32), chain, past
    )
    assert text.features.dtype == np.float16
    # Half precision keeps 11 bits.
    np.testing.assert_allclose(
      text.features, output.features[0], rtol=2**-11, atol=2e-4
    )


def test_a_run_cut_short_goes_on_with_what_is_missing(write_corpus, tmp_path):
  whole = _texts(write_corpus(tmp_path / "whole", PROMPTS))
  stopped = 0

  def stop(tokens):
    nonlocal stopped
    stopped += 1
    if stopped == 4:  # the first call says what was there
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    write_corpus(tmp_path / "parts", PROMPTS, on_tokens=stop)
  corpus = training.Corpus(tmp_path / "parts")
  names, tokens = corpus.counts()
  assert len(names) == 3
  first = _texts(corpus)
  assert tokens == sum(len(t.tokens) - t.start for t in first.values())
  write_corpus(tmp_path / "parts", PROMPTS)
  parts = _texts(corpus)
  assert len(corpus.files) == 2
  assert sorted(parts) == sorted(whole)
  for name, text in whole.items():
    np.testing.assert_array_equal(parts[name].tokens, text.tokens)


def test_enough_is_enough(write_corpus, tmp_path):
  corpus = write_corpus(tmp_path, PROMPTS * 20, tokens=100)
  _, tokens = corpus.counts()
  assert 100 <= tokens < 120  # by less than one answer
  files = corpus.files
  write_corpus(tmp_path, PROMPTS * 20, tokens=100)
  assert corpus.files == files


def test_one_group_in_five_is_sampled(small, write_corpus, tmp_path):
  prompts = [[2, 3]] * 321
  corpus = write_corpus(
    tmp_path, prompts, max_new_tokens=6, batch=32, temperature=2.0, seed=5
  )
  texts = _texts(corpus)
  greedy = _decoded(small, [2, 3], 6)
  for name in (0, 63, 255, 320):
    np.testing.assert_array_equal(texts[name].tokens, greedy)
  for name in (256, 300, 319):
    want = _decoded(small, [2, 3], 6, temperature=2.0, seed=5 + name)
    np.testing.assert_array_equal(texts[name].tokens, want)


@pytest.mark.slow
def test_the_model_asks_itself(small, tmp_path):
  corpus = training.Corpus(tmp_path)
  frame = training.ChatFrame([1, 2], [4, 5, 6])
  training.self_distill(
    small.target,
    small.params,
    small.init_cache,
    corpus,
    frame=frame,
    tokens=40,
    max_len=small.max_len,
    feature_size=small.config.hidden_size,
    stop_ids=(7,),
    max_new_tokens=8,
    batch=16,
    seed=3,
  )
  for name, text in _texts(corpus).items():
    prompt = text.tokens[: text.start].tolist()
    assert prompt[:2] == [1, 2] and prompt[-3:] == [4, 5, 6]
    question = _decoded(
      small, [1, 2], 120, temperature=1.0, top_p=0.95, seed=3 + name
    )
    assert prompt[2:-3] == question[2:-1].tolist()


def test_nothing_to_ask(small, tmp_path):
  with pytest.raises(ValueError, match="give prompts, or a frame"):
    training.self_distill(
      small.target,
      small.params,
      small.init_cache,
      training.Corpus(tmp_path),
      tokens=1,
      max_len=48,
      feature_size=24,
      stop_ids=(),
    )


@pytest.mark.parametrize("length", [0, 48, 60])
def test_prompt_that_leaves_no_room(write_corpus, tmp_path, length):
  with pytest.raises(
    ValueError,
    match=rf"prompt 1 is {length} tokens long; it"
    " needs 1 to 47",
  ):
    write_corpus(tmp_path, [[3], [2] * length])


def test_shard_cut_in_half(write_corpus, tmp_path):
  corpus = write_corpus(tmp_path, PROMPTS)
  (file,) = corpus.files
  data = file.read_bytes()
  for size in (0, len(data) // 2, len(data) - 3):
    file.write_bytes(data[:size])
    with pytest.raises(ValueError, match=r"shard_00000.npz is not a whole"):
      corpus.counts()


def test_no_logits_no_text(small, tmp_path):
  corpus = training.Corpus(tmp_path)
  broken = ldjax.testing.tiny_model(seed=1).params
  broken["norm"]["weight"] = broken["norm"]["weight"] * np.nan
  training.self_distill(
    small.target,
    broken,
    small.init_cache,
    corpus,
    prompts=PROMPTS,
    tokens=10,
    max_len=small.max_len,
    feature_size=small.config.hidden_size,
    stop_ids=(7,),
    batch=2,
  )
  assert corpus.counts() == (set(), 0)
