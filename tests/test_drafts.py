"""Which trees a draft's calibration makes, and what is refused."""

import jax
import pytest

import ldjax
from ldjax import _drafts, checkpoints, decoding, models


def _sizes(model):
  return [rung.draft.size for rung in model.ladder]


def _expected(model):
  return [rung.expected for rung in model.ladder]


@pytest.fixture
def calibrated(tiny, tmp_path):
  """Makes a folder with a random draft and a calibration."""
  config = models.RecurrentConfig(
    depth=4,
    num_layers=1,
    target_size=24,
    hidden_size=9,
    intermediate_size=5,
    vocab_size=262,
  )
  params = models.init_draft(config, jax.random.key(0))

  def make(calibration):
    target = checkpoints.DraftTarget(tiny.name, 24, 262, tiny.config.num_layers)
    checkpoints.write_draft(
      tmp_path, config, params, target=target, calibration=calibration
    )
    return tmp_path

  return make


def test_ngram_ladder(tiny):
  assert _sizes(tiny) == [1, 2, 4, 8, 16]
  assert tiny.draft.size == 4
  expected = _expected(tiny)
  assert expected[0] == 1
  assert expected == sorted(expected)
  assert expected[2] == pytest.approx(1.438)


def test_one_tree_is_one_rung(tiny):
  model = ldjax.with_draft(tiny, "ngram", "chain:5")
  assert _sizes(model) == [6]
  assert _sizes(ldjax.with_draft(tiny, "none")) == [1]


def test_a_function_of_ones_own_may_give_way_to_the_root(tiny):
  model = ldjax.with_draft(tiny, decoding.ngram(2))
  assert _sizes(model) == [1, 3]
  assert model.draft.size == 3


def test_static_trees_follow_from_acceptance(tiny, calibrated):
  folder = calibrated({"acceptance": [[0.5, 0.2], [0.4, 0.1]]})
  model = ldjax.with_draft(tiny, folder)
  assert _sizes(model)[:3] == [1, 2, 4]
  assert _expected(model)[:2] == [1, 1.5]
  # Root, both first guesses, and the best below the better of them.
  assert _expected(model)[2] == pytest.approx(1 + 0.5 + 0.2 + 0.5 * 0.4)
  answer = ldjax.generate(model, "hello", max_new_tokens=12)
  plain = ldjax.with_draft(tiny, "none")
  want = ldjax.generate(plain, "hello", max_new_tokens=12)
  assert answer.tokens == want.tokens


def test_trees_by_confidence(tiny, calibrated):
  folder = calibrated(
    {
      "width": 2,
      "expected": {"2": 1.4, "4": 1.7},
      "ngram": {"depth": 3, "max_match": 3, "acceptance": [0.2, 0.4, 0.6]},
    }
  )
  model = ldjax.with_draft(tiny, folder)
  assert _sizes(model)[:3] == [1, 2, 4]
  assert _expected(model)[:4] == [1, 1.4, 1.7, None]
  answer = ldjax.generate(model, "ab ab ab a", max_new_tokens=16)
  plain = ldjax.with_draft(tiny, "none")
  want = ldjax.generate(plain, "ab ab ab a", max_new_tokens=16)
  assert answer.tokens == want.tokens


@pytest.mark.parametrize(
  "calibration",
  [
    {"acceptance": "much"},
    {"acceptance": [[1.5]]},
    {"expected": {}},
    {"width": 0},
    {"width": 2, "ngram": {"depth": 3}},
  ],
)
def test_calibration_that_makes_no_trees(tiny, calibrated, calibration):
  with pytest.raises(ValueError, match="train or calibrate the draft again"):
    ldjax.with_draft(tiny, calibrated(calibration))


def test_auto_is_the_shipped_draft_or_the_ngram(tiny, monkeypatch, tiny_heads):
  assert ldjax.with_draft(tiny, "auto").draft_name == "ngram"
  monkeypatch.setattr(_drafts, "_shipped", lambda name: tiny_heads)
  assert ldjax.with_draft(tiny, "auto").draft_name == str(tiny_heads)


@pytest.mark.parametrize(
  ("draft", "tree", "error", "message"),
  [
    ("nowhere", None, FileNotFoundError, "neither 'none' nor 'ngram'"),
    ("ngram", "1,2", ValueError, "give tree='chain:N'"),
    ("none", "chain:2", ValueError, "draft 'none' takes no tree"),
    (decoding.ngram(2), "chain:2", ValueError, "has a tree of its own"),
    ("ngram", "oak", ValueError, "tree 'oak' is not understood"),
  ],
)
def test_what_is_refused(tiny, draft, tree, error, message):
  with pytest.raises(error, match=message):
    ldjax.with_draft(tiny, draft, tree)
