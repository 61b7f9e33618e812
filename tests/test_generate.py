"""Text in, text out: the same text by every way, and every edge of it."""

import itertools

import numpy as np
import pytest

import ldjax
from ldjax import _engine

PROMPTS = ["hello", "abc ab", "zürich", "x", "Why?"]
SEEDS = [11, 22, 33, 44, 55]
LENGTH = 24
SAMPLED = {"temperature": 1.0, "seed": SEEDS}

# Every pair is checked; those that would take the fast tests too long to
# compile are slow.
PAIRS = [
  pytest.param(
    draft,
    batch,
    marks=[] if (draft, batch) in fast else [pytest.mark.slow],
  )
  for fast in [{("ngram", 2)}]
  for draft, batch in itertools.product(("none", "ngram", "medusa"), (1, 2, 8))
]


DRAFTS = ["none", "ngram", pytest.param("medusa", marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def alone(tiny_plain):
  """What each prompt gives plainly, one call a prompt: the oracle."""

  def run(**settings):
    return [
      ldjax.generate(tiny_plain, prompt, max_new_tokens=LENGTH, **each)
      for prompt, each in zip(PROMPTS, settings.pop("each"), strict=True)
    ]

  return {
    "greedy": run(each=[{}] * len(PROMPTS)),
    "sampled": run(each=[{"temperature": 1.0, "seed": s} for s in SEEDS]),
  }


@pytest.fixture
def model(request, tiny, tiny_plain, tiny_medusa):
  """The model with the draft that the test is parametrised by."""
  return {"none": tiny_plain, "ngram": tiny, "medusa": tiny_medusa}[
    request.getfixturevalue("draft")
  ]


class TestSameText:
  @pytest.mark.parametrize(("draft", "batch"), PAIRS)
  def test_any_draft_batch_and_order(self, model, draft, batch, alone):
    for kind, settings in (("greedy", {}), ("sampled", SAMPLED)):
      for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3]):
        shuffled = {
          name: [value[i] for i in order] if name == "seed" else value
          for name, value in settings.items()
        }
        results = ldjax.generate(
          model,
          [PROMPTS[i] for i in order],
          max_new_tokens=LENGTH,
          batch_size=batch,
          **shuffled,
        )
        for i, result in zip(order, results, strict=True):
          want = alone[kind][i]
          assert result.tokens == want.tokens, (kind, order, PROMPTS[i])
          assert result.text == want.text
          assert result.finish_reason == want.finish_reason
          assert result.prompt_tokens == want.prompt_tokens
          if draft == "none":
            assert result.rounds == len(result.tokens)
            assert result.mean_accepted == 1.0
          else:
            assert result.rounds <= len(result.tokens)
            assert result.mean_accepted == pytest.approx(
              len(result.tokens) / result.rounds
            )

  def test_the_oracle_is_worth_comparing_with(self, alone):
    assert len({result.tokens for result in alone["sampled"]}) == len(PROMPTS)
    for greedy, sampled in zip(alone["greedy"], alone["sampled"], strict=True):
      assert greedy.tokens != sampled.tokens

  @pytest.mark.slow
  def test_speculation_does_accept(self, tiny, tiny_medusa):
    for model in (tiny, tiny_medusa):
      # Or else a text this short has plain rounds, if another test has compiled
      # those alone.
      _engine.Engine(model, 1).compile_ladder()
      result = ldjax.generate(model, PROMPTS[0], max_new_tokens=LENGTH)
      assert result.mean_accepted > 1.5

  def test_one_seed_means_the_same_in_every_row(self, tiny):
    settings = {"temperature": 1.0, "seed": 9, "max_new_tokens": 12}
    solo = [ldjax.generate(tiny, p, **settings).tokens for p in PROMPTS]
    settings["batch_size"] = 2
    batch = ldjax.generate(tiny, PROMPTS, **settings)
    assert [result.tokens for result in batch] == solo
    twice = ldjax.generate(tiny, [PROMPTS[2]] * 5, **settings)
    assert {result.tokens for result in twice} == {solo[2]}

  def test_other_seeds_give_other_texts(self, tiny):
    results = ldjax.generate(
      tiny,
      ["x"] * 5,
      temperature=1.0,
      seed=SEEDS,
      max_new_tokens=12,
      batch_size=2,
    )
    assert len({result.tokens for result in results}) == 5

  def test_settings_a_prompt(self, tiny, alone):
    mixed = ldjax.generate(
      tiny,
      PROMPTS,
      max_new_tokens=LENGTH,
      temperature=[None, 1.0, 0, 1.0, 1.0],
      top_k=[3, None, None, 0, 1],
      top_p=[None, 1.0, 0.5, None, None],
      seed=SEEDS,
      batch_size=2,
    )
    # The cuts of rows 0 and 2 do not bear on a greedy draw; row 4 is cut to
    # its best token; 1 and 3 are cut by nothing.
    kinds = ["greedy", "sampled", "greedy", "sampled", "greedy"]
    for i, kind in enumerate(kinds):
      assert mixed[i].tokens == alone[kind][i].tokens

  @pytest.mark.slow
  def test_sampling_cuts(self, tiny, tiny_plain, tiny_medusa):
    settings = {
      "temperature": 0.7,
      "top_p": 0.9,
      "top_k": 40,
      "seed": SEEDS,
      "max_new_tokens": 60,
    }
    want = ldjax.generate(tiny_plain, PROMPTS, batch_size=1, **settings)
    for model in (tiny, tiny_medusa):
      for batch in (1, 2, 8):
        have = ldjax.generate(model, PROMPTS, batch_size=batch, **settings)
        assert [r.tokens for r in have] == [r.tokens for r in want]


class TestLimits:
  @pytest.mark.parametrize("draft", DRAFTS)
  def test_exactly_as_many_tokens(self, model, draft, alone):
    for limit in range(6):
      result = ldjax.generate(model, PROMPTS[0], max_new_tokens=limit)
      assert result.tokens == alone["greedy"][0].tokens[:limit]
      assert result.finish_reason == "length"
      assert result.rounds <= limit
      if limit < 2:
        assert (result.rounds, result.tokens_per_second) == (limit, 0.0)
      assert result.mean_accepted == (limit / result.rounds if limit else 0.0)

  def test_one_limit_a_prompt(self, tiny, alone):
    limits = [3, 0, 24, 1, 0]
    results = ldjax.generate(tiny, PROMPTS, max_new_tokens=limits, batch_size=1)
    for i, limit in enumerate(limits):
      assert results[i].tokens == alone["greedy"][i].tokens[:limit]
    assert (results[1].text, results[1].rounds) == ("", 0)
    assert results[1].prompt_tokens == alone["greedy"][1].prompt_tokens

  def test_nothing_to_do(self, tiny):
    results = ldjax.generate(tiny, PROMPTS, max_new_tokens=0)
    assert [result.tokens for result in results] == [()] * 5
    assert {result.finish_reason for result in results} == {"length"}
    assert ldjax.generate(tiny, []) == []
    assert ldjax.generate(tiny, (), max_new_tokens=[]) == []

  @pytest.mark.parametrize(
    ("length", "emitted"), [(255, 1), (256, 0), (250, 6)]
  )
  def test_end_of_the_cache(self, tiny, length, emitted):
    ids = [5 + i % 200 for i in range(length)]
    result = ldjax.generate(tiny, ids, max_new_tokens=1000)
    assert len(result.tokens) == emitted
    assert result.finish_reason == "length"
    assert result.prompt_tokens == length

  @pytest.mark.slow
  def test_long_prompt_equals_plain(self, tiny, tiny_plain):
    ids = [5 + i * i % 200 for i in range(130)]  # three chunks
    one, two = (
      ldjax.generate(model, ids, max_new_tokens=12)
      for model in (tiny, tiny_plain)
    )
    assert one.tokens == two.tokens


class TestStops:
  def test_a_special_token_ends_the_text_and_is_not_in_it(self, tiny):
    results = ldjax.generate(
      tiny,
      ["x"] * 40,
      temperature=1.5,
      seed=list(range(40)),
      max_new_tokens=LENGTH,
      batch_size=2,
    )
    stopped = [r for r in results if r.finish_reason == "stop"]
    assert stopped, "no seed meets an EOS; take more of them"
    decode = tiny.tokenizer.decode
    for result in results:
      ends = [token in tiny.eos_token_ids for token in result.tokens]
      if result in stopped:
        assert ends.index(True) == len(ends) - 1
        assert result.text == decode(result.tokens[:-1])
      else:
        assert not any(ends)
        assert len(result.tokens) == LENGTH
      for special in ("<|im_end|>", "</s>", "<|eot|>"):
        assert special not in result.text

  @pytest.mark.parametrize("draft", DRAFTS)
  def test_further_stop_ids(self, model, draft, alone):
    whole = alone["sampled"][0].tokens
    settings = {"temperature": 1.0, "seed": SEEDS[0], "max_new_tokens": LENGTH}
    for stop in dict.fromkeys(whole):
      result = ldjax.generate(model, PROMPTS[0], stop_ids=[stop], **settings)
      end = whole.index(stop) + 1
      assert result.tokens == whole[:end]
      # A stop id wins over the limit where both come at once.
      assert result.finish_reason == "stop"

  def test_stop_in_the_last_place(self, tiny, alone):
    whole = alone["greedy"][1].tokens
    first = whole[0]
    for limit in (1, 2):
      result = ldjax.generate(
        tiny, PROMPTS[1], max_new_tokens=limit, stop_ids=[first]
      )
      assert (result.tokens, result.finish_reason) == ((first,), "stop")

  def test_the_models_own_eos(self, scripted, bigram):
    for eos in (258, 259, 260):
      model = scripted(bigram({1: 2, 2: 3, 3: eos}))
      result = ldjax.generate(model, [1])
      assert (result.tokens, result.finish_reason) == ((2, 3, eos), "stop")
      assert result.text == model.tokenizer.decode([2, 3])


class TestPrompts:
  def test_text_ids_and_conversation(self, tiny, alone):
    settings = {"max_new_tokens": LENGTH}
    want = alone["greedy"][0]
    turn = [{"role": "user", "content": "hello"}]
    ids = ldjax.encode_prompt(tiny.tokenizer, "hello")
    assert ids == ldjax.encode_prompt(tiny.tokenizer, turn)
    assert len(ids) == want.prompt_tokens
    for prompt in ("hello", ids, tuple(ids), turn, tuple(turn)):
      result = ldjax.generate(tiny, prompt, **settings)
      assert isinstance(result, ldjax.Generation)
      assert result.tokens == want.tokens
    mixed = ldjax.generate(tiny, ["hello", ids, turn], batch_size=1, **settings)
    assert isinstance(mixed, list)
    assert [result.tokens for result in mixed] == [want.tokens] * 3

  @pytest.mark.parametrize("make", [np.array, lambda x: list(np.array(x))])
  def test_ids_of_numpy(self, tiny, alone, make):
    ids = make(ldjax.encode_prompt(tiny.tokenizer, "hello"))
    result = ldjax.generate(tiny, ids, max_new_tokens=LENGTH)
    assert result.tokens == alone["greedy"][0].tokens
    assert "".join(ldjax.stream(tiny, ids, max_new_tokens=LENGTH)) == (
      alone["greedy"][0].text
    )

  def test_a_limit_of_numpy(self, tiny, alone):
    result = ldjax.generate(tiny, "hello", max_new_tokens=np.int32(3))
    assert result.tokens == alone["greedy"][0].tokens[:3]

  def test_a_list_of_one_is_a_list(self, tiny, alone):
    for prompts in (["hello"], ("hello",)):
      results = ldjax.generate(tiny, prompts, max_new_tokens=2)
      assert isinstance(results, list)
      assert [r.tokens for r in results] == [alone["greedy"][0].tokens[:2]]

  def test_with_and_without_the_template(self, tiny):
    plain = ldjax.encode_prompt(tiny.tokenizer, "hello", chat=False)
    assert plain == tiny.tokenizer.encode("hello")
    assert len(plain) == 5
    chat = ldjax.encode_prompt(tiny.tokenizer, "hello", chat=True)
    assert chat == [
      257,
      *tiny.tokenizer.encode("u"),
      *plain,
      258,
      257,
      *tiny.tokenizer.encode("a"),
    ]
    result = ldjax.generate(tiny, "hello", chat=False, max_new_tokens=3)
    assert result.prompt_tokens == 5
    assert result.tokens == ldjax.generate(tiny, plain, max_new_tokens=3).tokens

  def test_text_is_what_the_tokens_say(self, tiny, alone):
    for result in (*alone["greedy"], *alone["sampled"]):
      assert result.text == tiny.tokenizer.decode(result.tokens)

  def test_figures(self, tiny, alone):
    # One page is 16 positions of 2 layers, 1 head of 2 x 8 float32.
    page = 16 * 2 * 16 * 4
    for result in alone["greedy"]:
      assert result.time_to_first_token_s > 0
      assert result.tokens_per_second > 0
      held = result.prompt_tokens + len(result.tokens) - 1
      assert result.peak_cache_bytes == page * -(-held // 16)


class TestErrors:
  """Refused before any work, and the model works on."""

  @pytest.fixture(autouse=True)
  def works_on(self, tiny, alone, monkeypatch):
    from ldjax import _engine

    def start(*_):
      raise AssertionError("work began before the error was found")

    with monkeypatch.context() as patch:
      patch.setattr(_engine.Engine, "advance", start)
      yield
    result = ldjax.generate(tiny, PROMPTS[0], max_new_tokens=LENGTH)
    assert result.tokens == alone["greedy"][0].tokens

  @pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
      ([7] * 257, {}, r"257 tokens long, but max_len is 256"),
      ([[1], [7] * 257], {}, r"prompt 1 is 257 tokens long"),
      ("", {"chat": False}, r"the prompt is empty"),
      ([[1], []], {}, r"prompt 1 is empty"),
      ([1, 262], {}, r"token 262; the model knows 0 to 261"),
      ([-1], {}, r"token -1;"),
      ([1], {"max_new_tokens": -1}, r"max_new_tokens is -1"),
      ([[1], [2]], {"max_new_tokens": [1, -2]}, r"max_new_tokens is -2"),
      ([1], {"batch_size": 0}, r"batch_size is 0"),
      ([1], {"batch_size": -3}, r"batch_size is -3"),
      ([[1], [2]], {"max_new_tokens": [1]}, r"1 entries for 2 prompts"),
      ([[1], [2]], {"temperature": [1.0] * 3}, r"temperature has 3 entries"),
      ([[1], [2]], {"top_k": [1]}, r"top_k has 1 entries for 2 prompts"),
      ([[1], [2]], {"top_p": [0.5]}, r"top_p has 1 entries"),
      ([[1], [2]], {"seed": [1, 2, 3]}, r"seed has 3 entries for 2 prompts"),
      ([1], {"top_k": -1}, r"top_k is -1"),
      ([1], {"top_p": 0.0}, r"top_p is 0"),
      ([1], {"top_p": 1.5}, r"top_p is 1.5"),
      ([1], {"temperature": float("nan")}, r"temperature is nan"),
      ([1], {"temperature": -0.5}, r"temperature is -0.5"),
      ([1], {"seed": -1}, r"seed is -1"),
      ([1], {"stop_ids": [-1]}, r"stop id -1 is negative"),
      ([1], {"stop_ids": range(20)}, r"at most 16"),
    ],
  )
  def test_settings_and_prompts(self, tiny, prompts, settings, message):
    with pytest.raises(ValueError, match=message):
      ldjax.generate(tiny, prompts, **settings)

  def test_at_the_call_of_stream(self, tiny):
    with pytest.raises(ValueError, match="top_k is -1"):
      ldjax.stream(tiny, [1], top_k=-1)
    with pytest.raises(ValueError, match="257 tokens long"):
      ldjax.stream(tiny, [7] * 257)
    with pytest.raises(ValueError, match="takes one prompt"):
      ldjax.stream(tiny, ["a", "b"])

  def test_chat_without_a_template(self, tiny):
    tokenizer = ldjax.text.Tokenizer(tiny.tokenizer.backend)
    for settings in (
      {"prompt": "hello", "chat": True},
      {"prompt": [{"role": "user", "content": "hello"}]},
    ):
      with pytest.raises(ValueError, match="no chat template"):
        ldjax.encode_prompt(tokenizer, **settings)


class TestStream:
  def test_pieces_joined_are_the_text(self, tiny, alone):
    for i, prompt in enumerate(PROMPTS):
      for kind, settings in (
        ("greedy", {}),
        ("sampled", {"temperature": 1.0, "seed": SEEDS[i]}),
      ):
        stream = ldjax.stream(tiny, prompt, max_new_tokens=LENGTH, **settings)
        pieces = list(stream)
        assert all(pieces)
        assert "".join(pieces) == alone[kind][i].text == stream.result.text
        assert stream.result.tokens == alone[kind][i].tokens
        assert tiny.tokenizer.decode(stream.result.tokens) == "".join(pieces)

  def test_result_comes_with_the_end(self, tiny):
    stream = ldjax.stream(tiny, "hello", max_new_tokens=LENGTH)
    with pytest.raises(RuntimeError, match="not been read to its end"):
      _ = stream.result
    next(stream)
    with pytest.raises(RuntimeError, match="not been read to its end"):
      _ = stream.result
    for _ in stream:
      pass
    assert len(stream.result.tokens) == LENGTH
    with pytest.raises(StopIteration):
      next(stream)

  def test_closed_in_the_middle(self, tiny, alone):
    for read in range(3):
      stream = ldjax.stream(tiny, PROMPTS[1], max_new_tokens=LENGTH)
      for _ in range(read):
        next(stream)
      stream.close()
      assert list(stream) == []
      cut = stream.result
      assert (cut.finish_reason, len(cut.tokens) >= read) == ("cancelled", True)
      assert cut.tokens == alone["greedy"][1].tokens[: len(cut.tokens)]
      result = ldjax.generate(tiny, PROMPTS[1], max_new_tokens=LENGTH)
      assert result.tokens == alone["greedy"][1].tokens

  def test_two_at_once(self, tiny, alone):
    streams = [
      ldjax.stream(tiny, prompt, max_new_tokens=LENGTH)
      for prompt in PROMPTS[:2]
    ]
    for _ in itertools.zip_longest(*streams):
      pass
    for i, stream in enumerate(streams):
      assert stream.result.tokens == alone["greedy"][i].tokens

  def test_nothing_to_say(self, tiny):
    stream = ldjax.stream(tiny, "hello", max_new_tokens=0)
    assert list(stream) == []
    assert stream.result.tokens == ()

  def test_no_piece_ends_inside_a_character(self, tiny, scripted, bigram):
    # A circle of characters of two to four bytes, all bytes different.
    cycle = tiny.tokenizer.encode("é日🙂ж")
    assert len(cycle) == len(set(cycle)) == 11
    model = scripted(
      bigram(dict(zip(cycle, cycle[1:] + cycle[:1], strict=True)))
    )
    stream = ldjax.stream(model, cycle[:5], max_new_tokens=39)
    pieces = list(stream)
    whole = "🙂жé日" * 3 + "🙂ж"
    assert "".join(pieces) == whole == stream.result.text
    assert all("\ufffd" not in piece for piece in pieces)
    assert len(pieces) > 3
    assert stream.result.mean_accepted > 2  # it did come several at a time

  def test_what_ends_inside_a_character(self, tiny, scripted, bigram):
    cycle = tiny.tokenizer.encode("é日🙂ж")
    model = scripted(
      bigram(dict(zip(cycle, cycle[1:] + cycle[:1], strict=True)))
    )
    for limit in range(1, 12):
      stream = ldjax.stream(model, cycle[:1], max_new_tokens=limit)
      assert "".join(stream) == stream.result.text
      assert stream.result.text == model.tokenizer.decode(
        (cycle[1:] + cycle)[:limit]
      )
