"""Stop strings, penalties, samples and log-probabilities, end to end."""

import asyncio
import threading

import numpy as np
import pytest

import ldjax
from ldjax import bench

PROMPTS = ["hello", "abc ab", "zürich"]
SAMPLED = {"temperature": 1.0, "max_new_tokens": 24}


@pytest.fixture(scope="module")
def models(tiny, tiny_plain):
  return {"none": tiny_plain, "ngram": tiny}


class TestStopStrings:
  """The text goes round: abcdefgh, and the n-gram draft gets it right."""

  @pytest.fixture
  def circle(self, tiny):
    return tiny.tokenizer.encode("abcdefgh")

  @pytest.fixture(
    params=[pytest.param("none", marks=pytest.mark.slow), "ngram"]
  )
  def model(self, request, scripted, bigram, circle):
    after = dict(zip(circle, circle[1:] + circle[:1], strict=True))
    return scripted(bigram(after), draft=request.param)

  def test_at_every_place_and_across_rounds(self, model, circle):
    whole = "bcdefgh" + "abcdefgh" * 2
    settings = {"max_new_tokens": len(whole), "logprobs": True}
    full = ldjax.generate(model, circle[:1], **settings)
    assert full.text == whole
    if model.draft_name == "ngram":
      assert full.mean_accepted > 1.5  # so that strings lie across rounds
    for start in range(12):
      for size in (1, 2, 5):
        stop = whole[start : start + size]
        cut = whole.find(stop)
        with ldjax.stream(model, circle[:1], stop=stop, **settings) as stream:
          pieces = list(stream)
        result = stream.result
        assert "".join(pieces) == result.text == whole[:cut]
        assert result.tokens == full.tokens[:cut]
        assert "".join(result.pieces) == result.text
        assert len(result.logprobs) == cut == sum(result.round_tokens)
        assert result.finish_reason == "stop"
        np.testing.assert_allclose(
          result.logprobs, full.logprobs[:cut], atol=1e-6
        )

  def test_the_one_that_is_complete_first(self, model, circle):
    result = ldjax.generate(
      model, circle[:1], max_new_tokens=20, stop=["ha", "fg", "efghabc", "zz"]
    )
    assert result.text == "bcde"

  def test_none_of_them_comes(self, model, circle):
    result = ldjax.generate(
      model, circle[:1], max_new_tokens=9, stop=["ca", "bcdefghabcd"]
    )
    assert (result.text, result.finish_reason) == ("bcdefghab", "length")

  def test_after_min_new_tokens(self, model, circle):
    result = ldjax.generate(
      model, circle[:1], max_new_tokens=20, min_new_tokens=3, stop="cd"
    )
    assert result.text == "bcdefghab"

  def test_rows_beside_it_go_on(self, model, circle):
    prompts = [circle[i : i + 1] for i in range(5)]
    alone = [
      ldjax.generate(model, p, max_new_tokens=15, stop="ef") for p in prompts
    ]
    batch = ldjax.generate(
      model, prompts, max_new_tokens=15, stop="ef", batch_size=2
    )
    assert [r.text for r in batch] == [r.text for r in alone]
    assert [r.text for r in alone] == ["bcd", "cd", "d", "", "fghabcd"]


class TestMinNewTokens:
  def test_no_stop_id_before(self, models):
    plain = ldjax.generate(models["none"], "hello", **SAMPLED, seed=3)
    stop_ids = list(dict.fromkeys(plain.tokens))[:9]
    for minimum in (0, 1, 4, 20):
      settings = {
        **SAMPLED,
        "seed": 3,
        "stop_ids": stop_ids,
        "min_new_tokens": minimum,
      }
      results = [
        ldjax.generate(model, "hello", **settings) for model in models.values()
      ]
      assert len({result.tokens for result in results}) == 1
      tokens = results[0].tokens
      assert len(tokens) >= minimum
      assert not set(tokens[: minimum - 1 if minimum else 0]) & set(stop_ids)
      if minimum == 0:
        assert len(tokens) == 1


class TestPenalties:
  SETTINGS = (
    {"repetition_penalty": 1.4},
    {"frequency_penalty": 0.8, "presence_penalty": 0.4},
    {"banned_ids": list(range(60))},
    {"min_p": 0.3},
  )

  @pytest.mark.parametrize("number", range(4))
  def test_same_text_with_any_draft_and_batch(self, models, number):
    settings = {**SAMPLED, **self.SETTINGS[number], "seed": [1, 2, 3]}
    want = ldjax.generate(models["none"], PROMPTS, batch_size=1, **settings)
    free = {**SAMPLED, "seed": [1, 2, 3], "batch_size": 1}
    free = ldjax.generate(models["none"], PROMPTS, **free)
    assert [r.tokens for r in want] != [r.tokens for r in free]
    have = ldjax.generate(models["ngram"], PROMPTS, batch_size=2, **settings)
    assert [r.tokens for r in have] == [r.tokens for r in want]

  @pytest.mark.slow
  def test_all_together_with_heads(self, models, tiny_medusa):
    for number in range(4):
      settings = {**SAMPLED, **self.SETTINGS[number], "seed": 6}
      settings |= {"stop": "a", "min_new_tokens": 5, "num_samples": 3}
      want = ldjax.generate(models["none"], PROMPTS, **settings, batch_size=1)
      have = ldjax.generate(tiny_medusa, PROMPTS, **settings)
      for one, two in zip(have, want, strict=True):
        assert [r.tokens for r in one] == [r.tokens for r in two]
        assert [r.text for r in one] == [r.text for r in two]

  def test_greedy_text_repeats_itself_less(self, models):
    settings = {"max_new_tokens": 40}
    free = ldjax.generate(models["ngram"], "hello", **settings)
    held = ldjax.generate(
      models["ngram"], "hello", presence_penalty=50.0, **settings
    )
    assert len(set(held.tokens)) == len(held.tokens)
    assert len(set(free.tokens)) < len(free.tokens)

  def test_banned_ids_never_come(self, models):
    free = ldjax.generate(models["ngram"], "hello", max_new_tokens=24)
    banned = sorted(set(free.tokens))[:10]
    held = ldjax.generate(
      models["ngram"], "hello", max_new_tokens=24, banned_ids=banned
    )
    assert not set(held.tokens) & set(banned)
    with pytest.raises(ValueError, match="banned id 262"):
      ldjax.generate(models["ngram"], "hello", banned_ids=[262])


class TestLogprobs:
  def test_are_the_models_own_with_any_draft(self, models):
    settings = {**SAMPLED, "seed": 5, "top_p": 0.8, "frequency_penalty": 0.3}
    results = {
      name: ldjax.generate(model, "hello", logprobs=True, **settings)
      for name, model in models.items()
    }
    want = results["none"]
    prompt = ldjax.encode_prompt(models["none"].tokenizer, "hello")
    for i in (0, 1, 7, len(want.tokens) - 1):
      logits = bench.next_logits(models["none"], [*prompt, *want.tokens[:i]])
      logits = logits.astype(np.float64)
      logprob = logits[want.tokens[i]] - np.log(np.exp(logits).sum())
      assert want.logprobs[i] == pytest.approx(logprob, abs=1e-4)
    for result in results.values():
      assert result.tokens == want.tokens
      assert len(result.logprobs) == len(result.tokens)
      np.testing.assert_allclose(result.logprobs, want.logprobs, atol=1e-4)
    assert ldjax.generate(models["none"], "hello", **settings).logprobs is None

  def test_of_one_prompt_of_several(self, tiny):
    each = [
      ldjax.Settings(max_new_tokens=4, logprobs=row == 1) for row in range(3)
    ]
    results = ldjax.generate(tiny, PROMPTS, each, batch_size=2)
    assert [result.logprobs is None for result in results] == [
      True,
      False,
      True,
    ]
    nothing = ldjax.generate(tiny, "a", max_new_tokens=0, logprobs=True)
    assert nothing.logprobs == ()


class TestSamples:
  def test_one_prompt(self, models):
    settings = {**SAMPLED, "seed": 8}
    first = ldjax.generate(models["none"], "hello", **settings)
    several = [
      ldjax.generate(model, "hello", num_samples=4, batch_size=size, **settings)
      for model, size in (
        (models["none"], 1),
        (models["ngram"], 2),
      )
    ]
    tokens = [[one.tokens for one in samples] for samples in several]
    assert tokens[0] == tokens[1]
    assert tokens[0][0] == first.tokens
    assert len(set(tokens[0])) == 4

  def test_several_prompts(self, tiny):
    results = ldjax.generate(
      tiny,
      PROMPTS,
      max_new_tokens=3,
      num_samples=[1, 2, 3],
      temperature=1.0,
      batch_size=2,
    )
    assert isinstance(results[0], ldjax.Generation)
    assert [len(samples) for samples in results[1:]] == [2, 3]
    alone = ldjax.generate(
      tiny,
      PROMPTS[2],
      max_new_tokens=3,
      num_samples=3,
      temperature=1.0,
      batch_size=2,
    )
    assert [r.tokens for r in results[2]] == [r.tokens for r in alone]

  def test_greedy_samples_are_alike(self, tiny):
    results = ldjax.generate(tiny, "x", max_new_tokens=5, num_samples=2)
    assert results[0].tokens == results[1].tokens

  def test_a_stream_has_one(self, tiny):
    with pytest.raises(ValueError, match="num_samples is 2; stream gives one"):
      ldjax.stream(tiny, "x", num_samples=2)


class TestAsyncStream:
  def test_same_pieces(self, tiny):
    async def collect():
      return [p async for p in ldjax.stream(tiny, "hello", **SAMPLED)]

    want = ldjax.generate(tiny, "hello", **SAMPLED).text
    assert "".join(asyncio.run(collect())) == want

  def test_the_loop_goes_on_meanwhile(self, tiny):
    async def main():
      ticks = 0

      async def tick():
        nonlocal ticks
        while True:
          ticks += 1
          await asyncio.sleep(0.001)

      ticking = asyncio.create_task(tick())
      async for _ in ldjax.stream(tiny, "hello", max_new_tokens=40):
        pass
      ticking.cancel()
      return ticks

    assert asyncio.run(main()) > 3

  def test_two_at_once(self, tiny):
    async def collect(prompt):
      stream = ldjax.stream(tiny, prompt, max_new_tokens=20)
      return "".join([piece async for piece in stream])

    async def both():
      return await asyncio.gather(*map(collect, PROMPTS))

    want = ldjax.generate(tiny, PROMPTS, max_new_tokens=20, batch_size=2)
    assert asyncio.run(both()) == [result.text for result in want]

  def test_a_task_that_is_cancelled(self, tiny):
    async def main():
      with ldjax.stream(tiny, "hello", max_new_tokens=200) as stream:

        async def read():
          async for _ in stream:
            await asyncio.sleep(0)

        task = asyncio.create_task(read())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
          await task
      assert [piece async for piece in stream] == []

    asyncio.run(main())
    want = ldjax.generate(tiny, "hello", max_new_tokens=3)
    assert len(want.tokens) == 3

  def test_closed_from_another_thread(self, tiny):
    stream = ldjax.stream(tiny, "hello", max_new_tokens=200)
    next(stream)
    thread = threading.Thread(target=stream.close)
    thread.start()
    rest = list(stream)
    thread.join()
    assert len(rest) < 200
    assert stream.result.finish_reason == "cancelled"
