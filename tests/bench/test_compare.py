"""Methods side by side: what is measured, counted and written."""

import dataclasses
import json
import statistics

import pytest

import ldjax
from ldjax import bench

FIELDS = {
  "draft",
  "tokens_per_second",
  "speedup",
  "over",
  "mean_accepted",
  "rounds_by_size",
  "time_to_first_token_s",
  "peak_cache_bytes",
  "flops_per_token",
  "bytes_per_token",
  "prefill_flops_per_token",
  "equal",
  "near_ties",
}
PROMPTS = ["hello", "abc", "x"]


@pytest.fixture(scope="module")
def report(tiny):
  done = []
  methods = bench.make_methods(tiny, ["autoregressive", "ngram", "ldjax"])
  report = bench.compare(
    methods, PROMPTS, max_new_tokens=12, on_prompt=done.append
  )
  assert done == [1, 2, 3]
  return report


class TestCompare:
  def test_fields_are_those_of_the_issue(self, report, tiny):
    assert json.loads(json.dumps(report)) == report
    assert set(report) == {
      "model",
      "device",
      "prompts",
      "max_new_tokens",
      "batch_size",
      "methods",
    }
    assert report["model"] == tiny.name
    assert isinstance(report["device"], str) and report["device"]
    assert (report["prompts"], report["max_new_tokens"]) == (3, 12)
    assert list(report["methods"]) == ["autoregressive", "ngram", "ldjax"]
    for figures in report["methods"].values():
      assert set(figures) == FIELDS

  def test_figures(self, report, tiny):
    plain = report["methods"]["autoregressive"]
    assert plain["speedup"] == 1.0
    assert plain["mean_accepted"] == 1.0
    runs = [ldjax.generate(tiny, p, max_new_tokens=12) for p in PROMPTS]
    accepted = 36 / sum(run.rounds for run in runs)
    for name in ("ngram", "ldjax"):
      assert report["methods"][name]["mean_accepted"] == pytest.approx(accepted)
    # The same rounds at the same sizes, so the same work; never less than plain
    # decoding's for a token that no draft guessed.
    work = {n: m["flops_per_token"] for n, m in report["methods"].items()}
    assert work["ngram"] == work["ldjax"]
    step = plain["flops_per_token"]
    rounds = report["methods"]["ngram"]["rounds_by_size"]
    assert work["ngram"] >= step * sum(rounds.values()) / 33 > 0
    for figures in report["methods"].values():
      assert figures["equal"] == [3, 3]
      assert figures["near_ties"] == 0
      assert figures["tokens_per_second"] > 0
      assert figures["time_to_first_token_s"] > 0
      assert figures["bytes_per_token"] > 0
      assert figures["over"] == {}
      # 10 + 11 positions at most, two pages of 16.
      assert figures["peak_cache_bytes"] == 2 * 16 * 2 * 16 * 4

  @pytest.mark.slow
  def test_folder_of_a_draft(self, tiny, tiny_heads, monkeypatch):
    # With the tree whose decoder the other tests have compiled.
    from ldjax import assemble

    with_draft = assemble.with_draft
    monkeypatch.setattr(
      assemble,
      "with_draft",
      lambda model, draft: with_draft(
        model, draft, "1,2,2" if draft == str(tiny_heads) else None
      ),
    )
    report = bench.compare(
      bench.make_methods(tiny, ["autoregressive", str(tiny_heads)]),
      PROMPTS[:2],
      max_new_tokens=8,
      temperature=1.0,
      top_p=0.95,
      seed=4,
    )
    assert report["methods"]["tiny-heads"]["equal"] == [2, 2]

  def test_without_the_baseline(self, tiny):
    with pytest.raises(ValueError, match="lack autoregressive"):
      bench.compare({"ngram": tiny}, PROMPTS)

  def test_one_token_gives_no_speed(self, tiny):
    report = bench.compare({"autoregressive": tiny}, ["x"], max_new_tokens=1)
    figures = report["methods"]["autoregressive"]
    assert figures["speedup"] is None
    assert figures["tokens_per_second"] == 0.0
    assert figures["equal"] == [1, 1]

  def test_unequal_texts_are_counted_and_near_ties_among_them(
    self, scripted, bigram
  ):
    # After "x" all agree. After "a" the first two tokens of the baseline are
    # 5e-4 apart, after "b" they are 0.5 apart; the other method takes the
    # second one both times.
    a, b, x = (scripted(bigram()).tokenizer.encode(c)[0] for c in "abx")
    one = bigram({a: 5, b: 6, x: 7})
    one[a, 8], one[b, 8] = one[a, 5] - 5e-4, one[b, 6] - 0.5
    other = bigram({a: 8, b: 8, x: 7})
    report = bench.compare(
      {"autoregressive": scripted(one), "odd": scripted(other)},
      ["x", "a", "b", "xx"],
      max_new_tokens=6,
      chat=False,
    )
    assert report["methods"]["autoregressive"]["equal"] == [4, 4]
    assert report["methods"]["autoregressive"]["near_ties"] == 0
    assert report["methods"]["odd"]["equal"] == [2, 4]
    assert report["methods"]["odd"]["near_ties"] == 1

  def test_speedup_is_the_median_of_paired_ratios(self, tiny, monkeypatch):
    from ldjax import _generate
    from ldjax.bench import _work

    rates = {"plain": [10.0, 20.0, 40.0], "fast": [30.0, 20.0, 60.0]}
    order = []

    warm_up = [2 * 2]

    def one(method, prompt):
      method = method.draft_name
      if warm_up[0]:
        warm_up[0] -= 1
        rate = 1.0
      else:
        order.append((method, prompt))
        rate = rates[method][PROMPTS.index(prompt)]
      return ldjax.Generation(
        text="",
        tokens=(1,) * 5,
        pieces=("",) * 5,
        round_tokens=(1,) * 5 if method == "plain" else (3, 2),
        round_sizes=(1,) * 5 if method == "plain" else (1, 4),
        logprobs=None,
        prompt_tokens=1,
        finish_reason="length",
        tokens_per_second=rate,
        time_to_first_token_s=rate / 10,
        waited_s=0.0,
        peak_cache_bytes=int(rate),
      )

    def run(method, prompts, settings, *, batch_size):
      assert len(prompts) <= batch_size
      return [one(method, prompt) for prompt in prompts]

    monkeypatch.setattr(_generate, "generate", run)
    one_node, four = _work.Work(2.0, 30.0), _work.Work(6.0, 40.0)
    monkeypatch.setattr(
      _work,
      "compile_method",
      lambda method, batch, prompt_tokens: _work.MethodWork(
        {1: one_node.over(1 / batch), 4: four.over(1 / batch)},
        _work.Work(1.5, 0.0),
      ),
    )
    methods = {
      "autoregressive": dataclasses.replace(tiny, draft_name="plain"),
      "medusa2": dataclasses.replace(tiny, draft_name="fast"),
    }
    report = bench.compare(
      methods,
      PROMPTS,
      max_new_tokens=5,
    )
    fast = report["methods"]["medusa2"]
    assert fast["speedup"] == statistics.median([3.0, 1.0, 1.5]) == 1.5
    # 4 tokens each after the first, over 4/30 + 4/20 + 4/60 seconds.
    assert fast["tokens_per_second"] == pytest.approx(12 / 0.4)
    assert fast["mean_accepted"] == 2.5
    # The first round of a text is its prefill.
    assert fast["rounds_by_size"] == {"4": 3}
    assert fast["time_to_first_token_s"] == 3.0
    assert fast["peak_cache_bytes"] == 60
    # 6 for a round that brings two tokens.
    assert (fast["flops_per_token"], fast["bytes_per_token"]) == (3.0, 20.0)
    assert fast["prefill_flops_per_token"] == 1.5
    plain = report["methods"]["autoregressive"]
    assert plain["flops_per_token"] == 2.0
    assert plain["over"] == {"medusa2": pytest.approx(2 / 3)}
    # Interleaved, and each goes first in turn.
    assert order == [
      ("plain", "hello"),
      ("fast", "hello"),
      ("fast", "abc"),
      ("plain", "abc"),
      ("plain", "x"),
      ("fast", "x"),
    ]

    # Together: as fast as the slowest of them. The last one is alone, for which
    # there is a warm-up too.
    warm_up[0] = 2 * 2 * (2 + 1)
    report = bench.compare(
      methods,
      PROMPTS,
      batch_size=2,
      max_new_tokens=5,
    )
    fast = report["methods"]["medusa2"]
    assert report["batch_size"] == 2
    assert fast["tokens_per_second"] == pytest.approx(12 / (4 / 20 + 4 / 60))
    assert fast["speedup"] == statistics.median([2.0, 1.5])
    assert fast["flops_per_token"] == 3.0

  @pytest.mark.slow
  def test_batches(self, tiny):
    methods = bench.make_methods(tiny, ["autoregressive", "ldjax"])
    report = bench.compare(methods, PROMPTS, batch_size=2, max_new_tokens=6)
    for figures in report["methods"].values():
      assert figures["equal"] == [3, 3]
      assert figures["tokens_per_second"] > 0

  def test_no_batch(self, tiny):
    with pytest.raises(ValueError, match="batch_size is 0; give at least 1"):
      bench.compare({"autoregressive": tiny}, PROMPTS, batch_size=0)
