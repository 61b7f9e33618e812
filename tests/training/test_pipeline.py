"""A tiny model writes, a draft learns from it, and decoding gets faster."""

import dataclasses
import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

import ldjax
from ldjax import _base, checkpoints, models, testing, training
from ldjax.training import _pipeline

PROMPTS = [[65 + i % 26, 97 + i % 7, 97 + i % 11] for i in range(150)]
UNSEEN = [[90 - i, 99, 100 + i] for i in range(4)]


@pytest.fixture(scope="module")
def texts(tiny_plain, tmp_path_factory):
  return training.write_texts(
    tiny_plain,
    tmp_path_factory.mktemp("texts"),
    tokens=10**6,
    prompts=PROMPTS,
    max_new_tokens=40,
    batch=8,
  )


@pytest.mark.slow
@pytest.mark.parametrize("kind", training.KINDS)
def test_training_raises_mean_accepted(tiny_plain, texts, kind, tmp_path):
  config = training.draft_config(
    kind, tiny_plain.config, vocab_size=200, depth=3
  )
  losses = []
  settings = training.TrainConfig(
    steps=250, batch=8, window=32, learning_rate=5e-3, hardness=0.5
  )
  draft = training.train_draft(
    tiny_plain, texts, config, tmp_path, settings, losses.append
  )
  if kind != "medusa":  # which begins as the target's output, and well here
    assert losses[-1].losses.total < 0.6 * losses[0].losses.total
  trained = ldjax.with_draft(tiny_plain, tmp_path, tree="chain:3")
  plain = ldjax.generate(tiny_plain, UNSEEN, max_new_tokens=40)
  fast = ldjax.generate(trained, UNSEEN, max_new_tokens=40)
  assert [x.tokens for x in fast] == [x.tokens for x in plain]
  assert np.mean([x.mean_accepted for x in fast]) > 1.5
  report = json.loads((tmp_path / "report.json").read_text())
  assert report["draft"]["kind"] == kind
  assert draft.calibration.acceptance[0, 0] > 0.3
  file = checkpoints.read_draft(tmp_path, target_config=tiny_plain.config)
  assert file.calibration["acceptance"] == report["acceptance"]


@pytest.mark.slow
def test_more_texts_do_not_change_the_vocabulary(tiny_plain, tmp_path):
  config = training.draft_config(
    "recurrent", tiny_plain.config, vocab_size=20, depth=2
  )

  def train(prompts, steps):
    corpus = training.write_texts(
      tiny_plain,
      tmp_path / "corpus",
      tokens=10**6,
      prompts=prompts,
      max_new_tokens=20,
      batch=4,
    )
    settings = training.TrainConfig(steps=steps, batch=2, window=16)
    out = tmp_path / "draft"
    training.train_draft(tiny_plain, corpus, config, out, settings)
    file = checkpoints.read_draft(out, target_config=tiny_plain.config)
    return np.asarray(file.params["token_ids"])

  first = train(PROMPTS[:4], 2)
  np.testing.assert_array_equal(train(PROMPTS[:24], 4), first)
  (tmp_path / "draft" / "vocabulary.npy").write_bytes(b"\x93NUM")
  with pytest.raises(ValueError, match="delete the checkpoint to begin anew"):
    train(PROMPTS[:24], 6)


def test_shapes_that_cannot_be(tiny):
  with pytest.raises(ValueError, match="no draft is called 'lookahead'; there"):
    training.draft_config("lookahead", tiny.config, vocab_size=9)
  with pytest.raises(ValueError, match="depth is 0"):
    training.draft_config("recurrent", tiny.config, vocab_size=9, depth=0)


def test_corpus_of_another_model(tiny_plain, corpus, tmp_path):
  # `corpus` comes from a model of the same width; its features are cut here.
  file = corpus.files[0]
  shard = corpus.read(file)
  narrow = training.Corpus(tmp_path / "narrow")
  narrow.write(
    [text._replace(features=text.features[:, :20]) for text in shard.texts()]
  )
  config = training.draft_config("medusa", tiny_plain.config, vocab_size=31)
  settings = training.TrainConfig(window=16)
  with pytest.raises(ValueError, match="features of 20 numbers, the draft"):
    training.train_draft(tiny_plain, narrow, config, tmp_path / "out", settings)
  assert not pathlib.Path(tmp_path / "out").exists()


def test_only_a_layer_of_the_same_kind_is_taken_over(tiny):
  # Gemma 1's layers have a Llama's shapes, and weights that mean other things.
  gemma = dataclasses.replace(
    tiny.config, norm_offset=1.0, activation="gelu_tanh"
  )
  for target, alike in ((tiny.config, True), (gemma, False)):
    for kind in training.KINDS:
      config = training.draft_config(kind, target, vocab_size=200)
      wanted = alike or kind != "eagle"
      assert _pipeline._begins_alike(config, target) == wanted


def test_eagle3_is_not_trained(tiny_plain, corpus, tmp_path):
  config = models.Eagle3Config(
    depth=2,
    hidden_size=24,
    intermediate_size=10,
    num_heads=2,
    num_kv_heads=1,
    head_dim=6,
    vocab_size=262,
  )
  with pytest.raises(ValueError, match="'eagle3' reads states of several"):
    training.train_draft(
      tiny_plain, corpus, config, tmp_path / "out", training.TrainConfig()
    )
  assert not (tmp_path / "out").exists()


def test_texts_hold_the_final_state_whatever_the_draft_reads(
  tiny_plain, tmp_path
):
  def written(model, name):
    corpus = training.write_texts(
      model,
      tmp_path / name,
      tokens=20,
      prompts=PROMPTS[:2],
      max_new_tokens=4,
      batch=2,
    )
    return [text for file in corpus.files for text in corpus.read(file).texts()]

  showing, _ = models.functionalize(
    models.abstract_model(tiny_plain.config, feature_layers=(0, 1))
  )
  wide = dataclasses.replace(tiny_plain, target=showing, feature_layers=(0, 1))
  for one, two in zip(
    written(wide, "wide"), written(tiny_plain, "plain"), strict=True
  ):
    np.testing.assert_array_equal(one.features, two.features)


def test_the_frame_of_a_question(tiny):
  frame = training.chat_frame(tiny)
  whole = ldjax.encode_prompt(tiny.tokenizer, "abc")
  question = tiny.tokenizer.encode("abc")
  assert [*frame.head, *question, *frame.tail] == whole


def test_a_model_without_a_template(tmp_path):
  folder = testing.write_tiny_model(tmp_path)
  file = folder / "tokenizer_config.json"
  file.write_text('{"eos_token": "<|im_end|>"}')
  with pytest.raises(ValueError, match="no chat template"):
    training.chat_frame(ldjax.load(folder))


def test_calibration_counts_ranks_by_hand(corpus):
  """A draft that always ranks tokens 0, 1, 2, ... has known acceptance."""
  heads = _base.HeadsFn(
    *[None] * 5,
    unroll=lambda params, features, tokens: jnp.zeros((*tokens.shape, 2, 1)),
    score=lambda params, states: jnp.broadcast_to(
      -jnp.arange(31.0), (*states.shape[:-1], 31)
    ),
    token_ids=lambda params: None,
    depth=2,
    vocab_size=31,
    feature_size=24,
  )
  windows = training.Windows(corpus, 16, held_out=True)
  found = training.calibrate(
    heads,
    {"any": jnp.zeros(1)},
    np.arange(31, dtype=np.int32),
    windows,
    ranks=30,
  )
  counts = np.zeros((2, 30))
  places = np.zeros(2, int)
  for part in windows.in_order(1):
    tokens, texts, answers = (
      np.asarray(x)[0] for x in (part().tokens, part().texts, part().answers)
    )
    for t in range(16):
      for d in range(2):
        goal = t + 2 + d
        if goal > 15 or texts[goal] != texts[t] or not answers[goal]:
          continue
        if d == 1 and not (answers[t + 2] and tokens[t + 2] < 30):
          continue
        places[d] += 1
        if tokens[goal] < 30:
          counts[d, tokens[goal]] += 1
  np.testing.assert_array_equal(found.places, places)
  np.testing.assert_allclose(found.acceptance, counts / places[:, None])
  assert found.coverage == 1.0
