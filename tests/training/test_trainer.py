"""Losses worked by hand, exact resume, and a draft that learns."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldjax import models, training
from ldjax.training import _loss, _trainer

CONFIG = training.TrainConfig(
  steps=12, batch=3, window=16, learning_rate=3e-3, save_every=4
)


@pytest.fixture(scope="module")
def windows(corpus):
  return training.Windows(corpus, 16)


@pytest.fixture(scope="module")
def parts(small, windows):
  """Heads over 20 of the 31 tokens, and what training them takes."""
  config = training.draft_config(
    "recurrent", small.config, vocab_size=20, depth=3, hidden_size=16
  )
  token_ids = training.choose_tokens(windows.count_answers(31), 20)
  params = models.borrow(
    config,
    models.init_draft(config, jax.random.key(0), token_ids=token_ids),
    small.params,
  )
  heads, _ = models.functionalize_draft(config)
  lookup = np.full(31, -1, np.int32)
  lookup[token_ids] = np.arange(20)
  teacher = _loss.Teacher(
    small.params["embed_tokens"]["weight"][token_ids], jnp.asarray(lookup)
  )
  return config, heads, params, teacher


def _run(parts, windows, folder, config=CONFIG, on_step=None):
  shape, heads, params, teacher = parts
  trained, frozen = models.partition_draft(shape, params)
  return _trainer.train(
    heads,
    trained,
    frozen,
    models.combine_draft,
    teacher,
    windows,
    config,
    folder,
    on_step,
  )


def _softmax(x):
  x = np.exp(x - x.max(-1, keepdims=True))
  return x / x.sum(-1, keepdims=True)


@pytest.mark.parametrize(
  ("hardness", "cap"), [(0.0, None), (0.4, 1.5), (1.0, None)]
)
def test_loss_is_the_cross_entropy(parts, windows, hardness, cap):
  _, heads, params, teacher = parts
  if cap is not None:
    teacher = teacher._replace(soft_cap=jnp.float32(cap))
  batch = windows.at(0, 3, 0)
  got = jax.jit(
    lambda: _loss.loss(
      heads, params, teacher, batch, hardness=hardness, depth_decay=0.5
    )
  )()
  logits = np.asarray(
    heads.score(
      params,
      heads.unroll(params, batch.features.astype(jnp.float32), batch.tokens),
    )
  )
  tokens, texts, answers = map(
    np.asarray, (batch.tokens, batch.texts, batch.answers)
  )
  lookup = np.asarray(teacher.lookup)
  features = np.asarray(batch.features, np.float32)
  total = np.zeros(3)
  for d in range(3):
    values, right, places = [], 0, 0
    for row in range(3):
      for t in range(16 - 2 - d):
        goal = t + 2 + d
        if texts[row, goal] != texts[row, t] or not answers[row, goal]:
          continue
        places += 1
        label = lookup[tokens[row, goal]]
        likely = np.log(_softmax(logits[row, t, d]))
        right += int(label == logits[row, t, d].argmax())
        if label < 0:
          continue
        scores = features[row, goal - 1] @ teacher.output.T
        if cap is not None:
          scores = cap * np.tanh(scores / cap)
        opinion = _softmax(scores)
        values.append(
          -(1 - hardness) * (opinion * likely).sum() - hardness * likely[label]
        )
    assert got.places[d] == places
    np.testing.assert_allclose(got.accuracy[d], right / places, rtol=1e-6)
    np.testing.assert_allclose(got.loss[d], np.mean(values), rtol=2e-5)
    total[d] = np.mean(values)
  want = total @ [1, 0.5, 0.25] / 1.75
  np.testing.assert_allclose(got.total, want, rtol=2e-5)


@pytest.mark.slow
def test_killed_and_resumed_gives_the_same_losses(parts, windows, tmp_path):
  whole, pieces = [], []
  want = _run(parts, windows, tmp_path / "whole", on_step=whole.append)
  random = np.random.default_rng()
  stops = sorted(random.choice(np.arange(1, 12), 2, replace=False).tolist())

  def kill(report):
    pieces.append(report)
    if stops and report.step == stops[0]:
      stops.pop(0)
      raise KeyboardInterrupt

  for _ in range(2):
    with pytest.raises(KeyboardInterrupt):
      _run(parts, windows, tmp_path / "pieces", on_step=kill)
  got = _run(parts, windows, tmp_path / "pieces", on_step=kill)
  assert [report.step for report in pieces] == list(range(1, 13))
  for one, other in zip(whole, pieces, strict=True):
    np.testing.assert_array_equal(one.losses.total, other.losses.total)
  jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.slow
def test_a_kill_without_a_word_goes_on_from_the_last_checkpoint(
  parts, windows, tmp_path
):
  seen = []

  def crash(report):
    seen.append(report)
    if report.step == 7:
      raise RuntimeError("the machine is gone")

  with pytest.raises(RuntimeError):
    _run(parts, windows, tmp_path / "state", on_step=crash)
  again = []
  _run(parts, windows, tmp_path / "state", on_step=again.append)
  assert [report.step for report in again] == list(range(5, 13))
  for one, other in zip(seen[4:], again, strict=False):
    np.testing.assert_array_equal(one.losses.total, other.losses.total)


def test_the_caller_keeps_its_parameters(parts, windows, tmp_path):
  _, _, params, _ = parts
  before = jax.tree.map(np.array, params)
  _run(parts, windows, tmp_path / "state", dataclasses.replace(CONFIG, steps=2))
  jax.tree.map(np.testing.assert_array_equal, params, before)


def test_checkpoint_of_other_heads(small, parts, windows, tmp_path):
  few = dataclasses.replace(CONFIG, steps=1)
  _run(parts, windows, tmp_path / "state", few)
  _, _, _, teacher = parts
  config = training.draft_config(
    "recurrent", small.config, vocab_size=20, depth=3, hidden_size=12
  )
  heads, _ = models.functionalize_draft(config)
  params = models.borrow(
    config,
    models.init_draft(
      config,
      jax.random.key(0),
      token_ids=np.arange(20, dtype=np.int32),
    ),
    small.params,
  )
  with pytest.raises(ValueError, match="is no checkpoint of these heads"):
    _run((config, heads, params, teacher), windows, tmp_path / "state", CONFIG)


def test_loss_that_is_not_finite(parts, windows, tmp_path):
  config, heads, params, teacher = parts
  broken = _loss.Teacher(teacher.output * np.nan, teacher.lookup)
  with pytest.raises(FloatingPointError, match="is nan at step 1; lower"):
    _run((config, heads, params, broken), windows, tmp_path / "state")


@pytest.mark.parametrize(
  ("field", "value", "limit"),
  [
    ("steps", 0, "at least 1"),
    ("window", -3, "at least 1"),
    ("warmup", 1.5, "between 0 and 1"),
    ("hardness", -0.1, "between 0 and 1"),
    ("learning_rate", 0.0, "above 0 and finite"),
    ("clip", float("inf"), "above 0 and finite"),
  ],
)
def test_settings_out_of_range(field, value, limit):
  with pytest.raises(ValueError, match=f"{field} is {value}; .*{limit}"):
    training.TrainConfig(**{field: value})
