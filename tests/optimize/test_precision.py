"""Fewer bits within a bound: the bound holds, and 0 changes nothing."""

import json
import pathlib

import numpy as np
import pytest

import ldjax
from ldjax import optimize


@pytest.fixture(scope="module")
def model(tiny_folder):
  return ldjax.load(tiny_folder, draft="none", max_len=64)


@pytest.fixture(scope="module")
def texts(model):
  rng = np.random.default_rng(0)
  return rng.integers(0, model.config.vocab_size, (6, 16)).astype(np.int32)


def _gains(model, precision):
  """As if every matrix gained alike."""
  names = []
  for layer in model.params.target["layers"]:
    for half in ("self_attn", "mlp"):
      part = model.params.target["layers"][layer][half]
      names += [f"layers.{layer}.{half}.{n}" for n in part if n[-4:] == "proj"]
  return {
    name: {"precision": precision, "gain": 1e-5} for name in [*names, "lm_head"]
  }


def _kl(model, narrow, texts):
  """By NumPy, from the logits of the two models themselves."""

  def logprobs(which):
    rows = []
    for text in texts:
      chain = np.arange(len(text), dtype=np.int32)[None]
      view = model.init_cache(1).view()
      out = which.target.forward(
        which.params.target, text[None], chain, chain - 1, view
      )
      logits = which.target.score(which.params.target, out.hidden).logits[0]
      wide = np.asarray(logits).astype(np.float64)
      wide -= wide.max(-1, keepdims=True)
      rows.append(wide - np.log(np.exp(wide).sum(-1, keepdims=True)))
    return np.array(rows)

  ours, theirs = logprobs(narrow), logprobs(model)
  kl = (np.exp(theirs) * (theirs - ours)).sum(-1)
  changed = ours.argmax(-1) != theirs.argmax(-1)
  return kl.mean(-1), changed.mean()


@pytest.mark.slow
def test_the_bound_holds_and_is_what_was_measured(model, texts):
  gains = _gains(model, "int4")
  all_of_it, most = optimize.choose_precision(model, texts, gains, max_kl=1e9)
  assert set(all_of_it) == set(gains)
  some, least = optimize.choose_precision(
    model, texts, gains, max_kl=most.kl_bound / 3
  )
  assert 0 < len(some) < len(gains)
  assert 0 < least.kl_bound <= most.kl_bound / 3
  narrow = ldjax.with_target(
    model, *optimize.narrowed(model.config, model.params.target, some)
  )
  kl, changed = _kl(model, narrow, texts)
  np.testing.assert_allclose(least.kl, kl.mean(), rtol=1e-3, atol=1e-6)
  error = kl.std(ddof=1) / len(kl) ** 0.5
  np.testing.assert_allclose(least.kl_error, error, rtol=1e-2, atol=1e-6)
  np.testing.assert_allclose(least.changed, changed, atol=1e-6)


@pytest.mark.slow
def test_the_bound_holds_on_other_text(demo_model):
  """Chosen on some prompts of the examples, measured on the others."""
  model = ldjax.load(demo_model, draft="none", max_len=128)
  lines = pathlib.Path(__file__).parents[2] / "examples" / "prompts.jsonl"
  prompts = [json.loads(x)["prompt"] for x in lines.read_text().splitlines()]
  tokens = [model.tokenizer.encode(prompt)[:48] for prompt in prompts]
  texts = np.array([each for each in tokens if len(each) == 48], np.int32)
  assert len(texts) >= 12
  gains = {
    name: gain
    for name, gain in _gains(model, "w8a8").items()
    if name == "lm_head" or int(name.split(".")[1]) % 3 == 0
  }
  bound = 0.004
  choice, seen = optimize.choose_precision(
    model, texts[::2], gains, max_kl=bound
  )
  assert 0 < len(choice) < len(gains)
  assert seen.kl_bound <= bound
  held_out = optimize.Comparison(model, texts[1::2], choice)
  assert held_out.difference(list(choice)).kl <= bound


@pytest.mark.parametrize("bound", [{"max_kl": 0}, {"max_changed": 0}])
def test_a_bound_of_nothing_changes_nothing(model, texts, bound):
  choice, difference = optimize.choose_precision(
    model, texts, _gains(model, "int8"), **{"max_kl": 1.0, **bound}
  )
  assert choice == {}
  assert difference == (0.0, 0.0, 0.0)


def test_refusals(model, texts):
  for bad, match in (
    ({"max_kl": -1.0}, "max_kl is -1.0"),
    ({"max_kl": float("nan")}, "max_kl is nan"),
    ({"max_kl": 1.0, "max_changed": 2.0}, "max_changed 2.0"),
  ):
    with pytest.raises(ValueError, match=match):
      optimize.choose_precision(model, texts, {}, **bad)
  with pytest.raises(ValueError, match="at least one text"):
    optimize.choose_precision(model, texts[:, :1], {}, max_kl=1.0)
  with pytest.raises(ValueError, match=r"no matrix 'layers\.9\.mlp\.up_proj'"):
    optimize.narrowed(
      model.config,
      model.params.target,
      {"layers.9.mlp.up_proj": "bfloat16"},
    )


def test_only_what_gains_is_a_candidate(model, monkeypatch):
  def seconds(shape, dtype, rows, precisions):
    del dtype, precisions
    fast = shape[0] == model.config.vocab_size
    return {
      "same": 1.0 * rows,
      "w8a8": 0.5 * rows if fast else 0.99 * rows,
      "bfloat16": 9.0,
    }

  monkeypatch.setattr(optimize._gains, "product_seconds", seconds)
  found = optimize.what_gains(
    model.params.target, model.config, [1, 3], ["w8a8", "bfloat16"]
  )
  assert found == {"lm_head": {"precision": "w8a8", "gain": 1.0}}
