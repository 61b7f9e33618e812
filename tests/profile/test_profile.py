"""Rounds observed and replayed, and all of it on a tiny model."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import ldjax
from ldjax import _request, _settings, decoding, profile
from ldjax.profile import _rounds


@pytest.fixture
def script(scripted, bigram):
  """A model whose text goes round in circles, which the n-gram sees."""
  return scripted(bigram({7: 8, 8: 9, 9: 7}))


def requests(model, prompts, tokens):
  settings = _settings.Settings(max_new_tokens=tokens)
  return [
    _request.make_requests(model, prompt, settings)[0] for prompt in prompts
  ]


PROMPTS = ([7, 8, 9, 7, 8], [3], [9, 7])


@pytest.mark.parametrize("batch", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_is_observed_is_what_was_generated(script, batch):
  run = _rounds.observe(script, requests(script, PROMPTS, 17), batch)
  want = ldjax.generate(
    script, list(PROMPTS), max_new_tokens=17, batch_size=batch
  )
  assert [x.tokens for x in run.generations] == [x.tokens for x in want]
  seen = sum(len(x.tokens) for x in run.rounds)
  every = sum(x.rounds - 1 for x in want)
  # Those whose time is not their own are left out: beside a prefill, or read
  # with another one at the end.
  assert seen <= every and (batch > 1 or seen >= every - 2 * len(PROMPTS))
  assert sum(x.seconds for x in run.rounds) <= run.seconds
  assert {x.size for x in run.rounds} == {4}
  if batch == 1:
    assert any(x.tokens == (4,) for x in run.rounds)


def test_a_replay_is_what_decoding_does(script):
  draft = decoding.ngram(3)
  for prompt in PROMPTS:
    text = ldjax.generate(script, prompt, max_new_tokens=23)
    found = profile.replay(draft, [(prompt, text.tokens)], script.max_len)
    assert found.rounds == text.rounds - 1
    assert found.tokens == len(text.tokens) - 1


def test_acceptance_leaves_out_what_the_end_cut():
  rounds = [
    _rounds.Round(4, 1.0, (4, 1), (False, False)),
    _rounds.Round(4, 1.0, (1,), (True,)),
    _rounds.Round(1, 1.0, (1,), (False,)),
  ]
  found = _rounds.acceptance_by_depth(rounds, {1: 0, 4: 3})
  assert [(x["tried"], x["accepted"]) for x in found] == [
    (2, 1),
    (1, 1),
    (1, 1),
  ]


@pytest.mark.parametrize(
  ("prompts", "given", "message"),
  [
    ([], {}, "there are no prompts"),
    ([[1]], {"batch_size": 0}, "batch_size is 0"),
    ([[1]], {"rounds": 0}, "rounds is 0"),
    ([[1]], {"num_samples": 2}, "num_samples is 2"),
    ([[1]], {"max_new_tokens": 1}, "max_new_tokens is 1"),
    ([[1], []], {}, "prompt 1 is empty"),
  ],
)
def test_what_is_refused(script, prompts, given, message):
  with pytest.raises(ValueError, match=message):
    profile.profile(script, prompts, **given)


def test_a_mesh_is_refused(script):
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("model",))
  spread = dataclasses.replace(script, mesh=mesh)
  with pytest.raises(ValueError, match="load it without a mesh"):
    profile.profile(spread, [[1]])


MACHINE = profile.Machine(1e10, 1e11, 4096, 8, "float32")


@pytest.mark.slow
def test_a_report_of_a_tiny_model(script, tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  lines = []
  report = profile.profile(
    script,
    list(PROMPTS),
    max_new_tokens=17,
    rounds=2,
    sizes=(1,),
    project=True,
    trace=tmp_path / "trace",
    progress=lines.append,
    machine=MACHINE,
  )
  assert json.loads(json.dumps(report)) == report
  text = ldjax.generate(script, list(PROMPTS), max_new_tokens=17, batch_size=1)
  speed = report["speed"]
  assert speed["tokens"] == sum(len(each.tokens) for each in text)
  assert list(speed["rounds_by_size"]) == ["4"]
  # As it is and trees of 4 alone are the same thing; plain is tried too.
  plain, alone = report["sizes"]
  assert (plain["size"], plain["tokens_a_round"]) == (1, 1.0)
  assert alone["tokens_a_round"] == speed["tokens_a_round"] > 1
  # The rules see nothing but the report.
  assert report["advice"] == profile.advise(report)
  parts = report["round"]
  assert 0 <= parts["idle"] <= parts["host"] and parts["verify"] > 0
  assert report["costs"]["source"] == "measured"
  assert report["costs"]["sizes"] == [1, 4]
  assert not (tmp_path / "cache").exists()  # nothing is kept unasked
  assert report["compilations"]["while_measuring"] == 0
  cache = report["cache"]
  assert 0 < cache["peak_used_bytes"] <= cache["total_bytes"]
  assert 0 < cache["mean_waste"] < 1
  assert report["dtype"] == "float32" and report["ngram"] == []
  assert len(report["projection"]["accelerators"]) == 7
  assert len(lines) > 5
  assert profile.to_html(report).startswith("<!DOCTYPE html>")

  [file] = (tmp_path / "trace").rglob("*.xplane.pb")
  traced = file.read_bytes()
  for scope in (b"draft", b"verify", b"accept", b"commit"):
    assert b"jit(step)/" + scope + b"/" in traced


def test_a_ceiling_is_measured():
  found = profile.measure_machine(read_bytes=8192, matmul_size=16, repeats=1)
  assert found.read_bytes == 8192
  assert np.isfinite([found.bytes_per_second, found.flops_per_second]).all()
