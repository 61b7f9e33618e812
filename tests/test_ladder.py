"""The size of the tree changes from round to round; the text does not."""

import dataclasses

import numpy as np
import pytest

import ldjax
from ldjax import _engine, _ladder, assemble, decoding, optimize, testing

PROMPTS = ["ab ab ab a", "hello", [5, 6, 5, 6, 5], "xyz xyz"]
LIMITS = [24, 9, 30, 17]


class _Scripted(optimize.LadderPlan):
  """Goes through the rungs in an order that nothing decides."""

  def choose(self, track):
    waited = track.waited + 1
    rung = (waited * waited + waited // 3) % len(self.costs)
    return rung, track._replace(waited=waited)


@pytest.fixture
def restless(monkeypatch):
  """Every ladder changes its rung all the time, whatever that compiles.

  Returns the rungs that were used.
  """
  plan_ladder = optimize.plan_ladder
  chosen = []

  def plan(model, batch=1):
    honest = plan_ladder(model, batch)
    fields = dataclasses.fields(honest)
    return _Scripted(**{f.name: getattr(honest, f.name) for f in fields})

  step = _ladder.Ladder.step

  def note(self, rung):
    chosen.append(rung)
    return step(self, rung)

  monkeypatch.setattr(optimize, "plan_ladder", plan)
  monkeypatch.setattr(_ladder.Ladder, "step", note)
  monkeypatch.setattr(_ladder, "_COMPILATION", 0.0)
  return chosen


@pytest.mark.parametrize(("temperature", "batch"), [(0.0, 1), (0.9, 3)])
def test_changing_rungs_change_no_token(
  tiny, tiny_plain, restless, temperature, batch
):
  settings = {
    "max_new_tokens": LIMITS,
    "temperature": temperature,
    "seed": [1, 2, 3, 4],
    "batch_size": batch,
    "logprobs": True,
  }
  assert len(tiny.ladder) == 5
  have = ldjax.generate(tiny, PROMPTS, **settings)
  assert set(restless) == set(range(5))
  want = ldjax.generate(tiny_plain, PROMPTS, **settings)
  for one, two in zip(have, want, strict=True):
    assert one.tokens == two.tokens
    assert one.finish_reason == two.finish_reason
    np.testing.assert_allclose(one.logprobs, two.logprobs, atol=2e-5)


@pytest.mark.slow
def test_rungs_share_a_state_of_heads(tiny, tiny_heads, tiny_plain, restless):
  model = ldjax.with_draft(tiny, tiny_heads)
  assert [rung.draft.size for rung in model.ladder] == [1, 2, 3]
  have = ldjax.generate(model, PROMPTS, max_new_tokens=LIMITS)
  assert set(restless) == {0, 1, 2}
  want = ldjax.generate(tiny_plain, PROMPTS, max_new_tokens=LIMITS)
  assert [x.tokens for x in have] == [x.tokens for x in want]


def test_sizes_are_told_of_each_round(tiny, restless):
  [result] = ldjax.generate(tiny, [PROMPTS[0]], max_new_tokens=20)
  sizes = [rung.draft.size for rung in tiny.ladder]
  assert len(result.round_sizes) == len(result.round_tokens)
  # The first is the prefill; the last one enqueued may be of no use any more.
  assert (
    list(result.round_sizes[1:])
    == [sizes[r] for r in restless][: len(result.round_sizes) - 1]
  )
  for size, tokens in zip(result.round_sizes, result.round_tokens, strict=True):
    assert 1 <= tokens <= size


def test_nothing_is_compiled_twice(tiny, restless):
  _engine.Engine(tiny, 1).compile_ladder()
  ldjax.generate(tiny, "warm", max_new_tokens=3)
  with testing.assert_no_recompile():
    ldjax.generate(tiny, "ab ab ab a", max_new_tokens=24, temperature=0.5)


def test_drafts_that_are_never_right_are_given_up(scripted, bigram):
  # What follows a token depends on its place: no earlier text tells.
  model = scripted(bigram(), shift=1, max_len=128)
  ladder = (
    assemble.Rung(decoding.root_only(), model.fallback, 1.0),
    model.ladder[0]._replace(expected=1.9),
  )
  model = dataclasses.replace(model, ladder=ladder, start=1)
  _engine.Engine(model, 1).compile_ladder()
  result = ldjax.generate(model, [3, 1, 4, 1, 5], max_new_tokens=60)
  assert result.round_sizes[1] == 4
  late = result.round_sizes[20:]
  assert late.count(1) > 0.8 * len(late)


def test_a_step_is_compiled_once_it_would_have_paid(tiny_folder, monkeypatch):
  model = ldjax.load(tiny_folder, page_size=8)  # its programs are its own
  used = []
  monkeypatch.setattr(_ladder, "_COMPILATION", 10.0)
  ladder = _ladder.Ladder(model, 1, None)
  for _ in range(200):
    rung = ladder.choose()
    ladder.step(rung)
    used.append(rung)
    ladder.observe(rung, [1])  # no draft is ever right
  first = used.index(0)
  # A wasted round costs about a third of a plain one.
  assert len({*used[:first]}) == 1
  assert 10 < first < 60
  assert used[first:].count(0) > 100
  missed = [_ladder.programs(rung.decoder).missed for rung in model.ladder]
  assert sum(1 in each and each[1] == float("inf") for each in missed) <= 3
