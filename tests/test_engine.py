"""Rows that come and go, memory that runs short, logits that break."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ldjax
from ldjax import _engine, _generate, _ladder, _request, testing


@pytest.fixture(autouse=True)
def never_hangs(monkeypatch):
  """Fails a test whose host loop goes round and round."""
  turns = 0
  enqueue = _engine.Engine._enqueue_step

  def counted(run):
    nonlocal turns
    turns += 1
    if turns > 3000:
      raise AssertionError("the host loop does not come to an end")
    return enqueue(run)

  monkeypatch.setattr(_engine.Engine, "_enqueue_step", counted)


@pytest.fixture
def preempted(monkeypatch):
  """Counts preemptions: a list with an entry for each."""
  calls = []
  preempt = _engine.Engine._give_way

  def counted(run):
    calls.append(len(run.queue))
    preempt(run)

  monkeypatch.setattr(_engine.Engine, "_give_way", counted)
  return calls


def request(model, tokens, limit, stop_ids=None, **settings):
  """A request for `limit` tokens that ends at `stop_ids` alone, if given."""
  if stop_ids is not None:
    model = dataclasses.replace(model, eos_token_ids=tuple(stop_ids))
  settings = ldjax.Settings(max_new_tokens=limit, **settings)
  [one] = _request.make_requests(model, tokens, settings)
  return one


def finish(model, requests, batch, share=False):
  """Runs requests to their end; what they came to, and the state left."""
  engine = _engine.Engine(model, batch, share=share)
  assert [engine.submit(each) for each in requests] == [*range(len(requests))]
  results = [None] * len(requests)
  texts = [""] * len(requests)
  while not engine.idle:
    for event in engine.advance():
      assert results[event.request] is None, "an event after the last one"
      results[event.request] = event.generation
      texts[event.request] += event.text
  assert [result.text for result in results] == texts
  if share:
    engine._state = engine._pages.forget(engine._state)
  return results, engine._state


def assert_nothing_is_held(state):
  cache = state.cache
  assert int(cache.pool.num_free) == cache.pool.num_pages
  assert (np.asarray(cache.block_table) == cache.pool.num_pages).all()
  assert not np.asarray(cache.length).any()
  assert (np.asarray(state.status) == 0).all()  # free


@pytest.fixture(scope="module")
def scarce(tiny_folder):
  """The tiny model with 16 pages of 4 positions: not enough for four rows."""
  model = ldjax.load(tiny_folder, page_size=4, num_pages=16)
  return dataclasses.replace(model, prefill_chunks=(64,))


def _forget_announcements(model):
  for decoder in (model.fallback, *(rung.decoder for rung in model.ladder)):
    _ladder.programs(decoder).announced.clear()


# 6 to 16 tokens, and 12 to 40 more.
PROMPTS = ["a", "hello", "0123456789", "xyz", "Why?", "ab ab ab a", "q"]
LIMITS = [40, 30, 24, 12, 33, 25, 40]
SEEDS = [1, 2, 3, 4, 5, 6, 7]


class TestScarcePool:
  @pytest.mark.parametrize("temperature", [0.0, 1.0])
  def test_same_texts_with_rows_preempted(
    self, scarce, tiny_plain, preempted, temperature
  ):
    settings = {"temperature": temperature, "max_new_tokens": LIMITS}
    have = ldjax.generate(scarce, PROMPTS, seed=SEEDS, batch_size=4, **settings)
    assert preempted, "the pool was large enough; the test says nothing"
    want = ldjax.generate(
      tiny_plain, PROMPTS, seed=SEEDS, batch_size=1, **settings
    )
    for one, two in zip(have, want, strict=True):
      assert one.tokens == two.tokens
      assert one.finish_reason == two.finish_reason
      assert one.rounds <= two.rounds

  def test_nothing_leaks(self, scarce, preempted):
    ids = [ldjax.encode_prompt(scarce.tokenizer, text) for text in PROMPTS]
    requests = [
      request(scarce, tokens, limit)
      for tokens, limit in zip(ids, LIMITS, strict=True)
    ]
    _, state = finish(scarce, requests * 3, 4)
    assert preempted
    assert_nothing_is_held(state)

  def test_cache_bytes_stay_within_the_pool(self, scarce):
    results = ldjax.generate(
      scarce, PROMPTS, max_new_tokens=LIMITS, batch_size=4
    )
    page = 4 * 2 * 16 * 4
    assert max(r.peak_cache_bytes for r in results) <= 16 * page

  def test_what_can_never_fit_is_refused_at_once(self, scarce, monkeypatch):
    monkeypatch.setattr(
      _engine.Engine, "__init__", lambda *_, **__: pytest.fail("work began")
    )
    # 61 + 5 tokens, of which the last is never committed: 65 positions.
    with pytest.raises(ValueError) as caught:
      ldjax.generate(scarce, [[1] * 9, [1] * 61], max_new_tokens=5)
    message = str(caught.value)
    for part in ("prompt 1", "5 new tokens", "17 pages", "4 pos", "has 16"):
      assert part in message

  def test_what_just_fits_runs(self, scarce):
    outcomes, state = finish(scarce, [request(scarce, [1] * 60, 5)], 4)
    assert len(outcomes[0].tokens) == 5
    assert_nothing_is_held(state)


class TestTinyPool:
  """Two rows of a scripted model over 6 pages of 4 positions, plainly."""

  @pytest.fixture
  def model(self, scripted, bigram):
    # 10, 11, 12, … 15 and then an end.
    following = {t: t + 1 for t in range(10, 15)} | {15: 258}
    return scripted(bigram(following), draft="none", num_pages=6)

  def test_last_token_waits_for_a_page_while_the_other_row_stops(self, model):
    # B holds 4 pages and stops after some rounds, by an EOS that the host
    # does not foresee. A has 2 and needs one more for its last token; by then
    # it is in a round that was enqueued and brought it nothing.
    b = request(model, [0] * 8 + [9], 15)
    one = model.params.target["logits"].at[9].set(0.0).at[9, 10].set(9.0)
    params = model.params._replace(
      target={**model.params.target, "logits": one}
    )
    model = dataclasses.replace(model, params=params)
    a = request(model, [20] * 5, 5)
    outcomes, state = finish(model, [b, a], 2)
    assert outcomes[0].tokens == (10, 11, 12, 13, 14, 15, 258)
    assert outcomes[0].finish_reason == "stop"
    solo, _ = finish(model, [a], 2)
    assert outcomes[1].tokens == solo[0].tokens
    assert len(solo[0].tokens) == 5
    assert_nothing_is_held(state)

  @pytest.mark.parametrize("seed", range(8))
  def test_random_requests(self, model, seed, preempted):
    rng = np.random.default_rng(seed)
    requests = []
    for _ in range(12):
      length = int(rng.integers(1, 17))
      limit = int(rng.integers(1, 25 - length + 1))
      tokens = rng.integers(0, 250, length).tolist()
      stop_ids = rng.integers(0, 256, 12).tolist()
      requests.append(request(model, tokens, limit, stop_ids=stop_ids))
    outcomes, state = finish(model, requests, 2)
    assert_nothing_is_held(state)
    logits = np.asarray(model.params.target["logits"])
    for each, outcome in zip(requests, outcomes, strict=True):
      token = int(each.prompt[each.prompt_length - 1])
      want = []
      stops = set(np.asarray(each.stop_ids).tolist())
      while not want or (
        len(want) < each.max_new_tokens and token not in stops
      ):
        token = int(logits[token].argmax())
        want.append(token)
      assert outcome.tokens == tuple(want)
      assert outcome.finish_reason == ("stop" if token in stops else "length")
      assert outcome.rounds == len(want)


class TestRowsComeAndGo:
  def test_more_prompts_than_rows(self, scripted, bigram):
    model = scripted(bigram(), draft="none", num_pages=6, shift=1)
    requests = [request(model, [t, t + 1], 1 + t % 9) for t in range(40)]
    together, state = finish(model, requests, 2)
    assert_nothing_is_held(state)
    for each, outcome in zip(requests, together, strict=True):
      alone, _ = finish(model, [each], 2)
      assert outcome.tokens == alone[0].tokens
      assert len(outcome.tokens) == each.max_new_tokens

  def test_events_come_as_rounds_are_read(self, scripted, bigram):
    model = scripted(bigram(), draft="none", num_pages=6)
    requests = [request(model, [t], n) for t, n in ((5, 3), (6, 0), (7, 2))]
    engine = _engine.Engine(model, 2)
    for each in requests:
      engine.submit(each)
    events = []
    while not engine.idle:
      events += engine.advance()
    assert events[0].request == 1  # nothing to do: at once
    assert events[0].generation.finish_reason == "length"
    assert {len(event.text) for event in events[1:]} == {1}
    assert [event.request for event in events[1:]].count(0) == 3
    assert [e.request for e in events if e.generation] == [1, 2, 0]

  def test_batch_is_the_next_power_of_two(self):
    for count, most, rows in (
      (1, 8, 1),
      (0, 8, 1),
      (3, 8, 4),
      (5, 8, 8),
      (9, 8, 8),
      (5, 6, 6),
      (3, 1, 1),
    ):
      assert _generate.batch_for(count, most) == rows

  def test_progress_is_told_once_before_a_compilation(self, scripted, bigram):
    lines = []
    model = scripted(bigram())
    _forget_announcements(model)
    for _ in range(2):
      ldjax.generate(model, [1, 2], max_new_tokens=4, progress=lines.append)
    assert lines == [
      "Compiling the prefill of 64 tokens for 1 rows (seconds)",
      "Compiling the decode step for 1 rows (seconds)",
    ]


class TestNonFinite:
  def test_weights_of_nan(self, tiny_plain):
    broken = dataclasses.replace(
      tiny_plain,
      params=jax.tree.map(
        lambda x: jnp.full_like(x, jnp.nan), tiny_plain.params
      ),
    )
    with pytest.warns(UserWarning, match="the prompt: the logits after 10 tok"):
      result = ldjax.generate(broken, "hello", max_new_tokens=8)
    assert result.finish_reason == "non_finite"
    assert (result.tokens, result.text, result.rounds) == ((), "", 0)
    assert result.mean_accepted == 0.0
    fine = ldjax.generate(tiny_plain, "hello", max_new_tokens=8)
    assert (len(fine.tokens), fine.finish_reason) == (8, "length")

  @pytest.mark.parametrize("value", [np.nan, np.inf])
  def test_the_other_rows_go_on(self, scripted, bigram, value):
    logits = bigram({1: 2, 2: 3})
    fine = scripted(logits, draft="none", num_pages=6)
    logits = logits.copy()
    logits[3, 100] = value
    model = scripted(logits, draft="none", num_pages=6)
    requests = [request(model, [t], 9) for t in (50, 3, 1, 60, 2)]
    with pytest.warns(UserWarning, match="not finite") as caught:
      outcomes, state = finish(model, requests, 2)
    assert len(caught) == 3
    assert_nothing_is_held(state)
    want, _ = finish(fine, requests, 2)
    for i, kept in ((1, 0), (2, 2), (4, 1)):
      assert outcomes[i].finish_reason == "non_finite"
      assert outcomes[i].tokens == want[i].tokens[:kept]
      assert outcomes[i].rounds == kept
    for i in (0, 3):
      assert outcomes[i].finish_reason == "length"
      assert outcomes[i].tokens == want[i].tokens

  def test_a_stream_ends_with_what_there_was(self, scripted, bigram):
    logits = bigram({10: 11, 11: 12})
    logits[12] = np.nan
    stream = ldjax.stream(scripted(logits), [10])
    with pytest.warns(UserWarning, match="after 3 tokens are not finite"):
      assert "".join(stream) == stream.result.text
    assert stream.result.tokens == (11, 12)
    assert stream.result.finish_reason == "non_finite"

  @pytest.mark.parametrize("broken_from", [0, 1, 2])
  def test_trees_that_overflow_are_repeated_plainly(
    self, scripted, bigram, broken_from
  ):
    # A circle of three, so that the draft is right and deep nodes are met.
    logits = bigram({1: 2, 2: 3, 3: 1})
    settings = {"max_new_tokens": 30}
    want = ldjax.generate(scripted(logits), [1], **settings)
    assert want.mean_accepted > 2
    model = scripted(logits, broken_from=broken_from)
    with warnings.catch_warnings():
      warnings.simplefilter("error")
      have = ldjax.generate(model, [1], **settings)
    assert have.tokens == want.tokens
    assert have.finish_reason == "length"
    # Nodes from `broken_from` on are never accepted, so that so many tokens
    # at most come of a round; and one where a plain round has to help.
    assert have.mean_accepted <= max(broken_from, 1)

  def test_trees_that_overflow_among_others(self, scripted, bigram):
    logits = bigram({1: 2, 2: 3, 3: 1})
    logits[200] = np.nan
    prompts, limits = [[1], [200], [2], [1, 200, 3]], [20, 5, 7, 11]
    settings = {"max_new_tokens": limits, "batch_size": 1}
    with pytest.warns(UserWarning, match="prompt 1"):
      want = ldjax.generate(scripted(logits), prompts, **settings)
    with pytest.warns(UserWarning, match="prompt 1"):
      have = ldjax.generate(
        scripted(logits, broken_from=0), prompts, **settings
      )
    assert [r.tokens for r in have] == [r.tokens for r in want]
    assert [r.finish_reason for r in have] == [
      "length",
      "non_finite",
      "length",
      "length",
    ]


class TestCompilations:
  def test_none_after_warm_up(self, tiny):
    def run(prompts, seed, limit, temperature, **more):
      return ldjax.generate(
        tiny,
        prompts,
        max_new_tokens=limit,
        batch_size=1,
        temperature=temperature,
        seed=seed,
        **more,
      )

    _engine.Engine(tiny, 1).compile_ladder()
    run(["hello", [1, 2, 3]], 1, 9, [0.0, 0.7], top_p=0.9)
    with testing.assert_no_recompile():
      run([[5], "0123456789"], 2, [3, 14], 0.0)
      run(["a", "zürich"], [4, 5], 40, [1.3, 0.0], top_k=[3, 9], top_p=0.4)
      run([list(range(16)), [9]], 3, 0, None)
      run([[7], [8]], 3, 1, None, stop_ids=[3, 4])

  def test_none_with_rows_preempted(self, scarce, preempted):
    settings = {"batch_size": 4}
    _engine.Engine(scarce, 4).compile_ladder()
    ldjax.generate(scarce, PROMPTS, max_new_tokens=LIMITS, **settings)
    assert preempted
    preempted.clear()
    with testing.assert_no_recompile():
      ldjax.generate(
        scarce, PROMPTS[::-1], max_new_tokens=36, temperature=0.9, **settings
      )
    assert preempted


class TestInterrupted:
  def test_by_the_keyboard(self, tiny, monkeypatch):
    want = ldjax.generate(tiny, "hello", max_new_tokens=20).tokens
    get = jax.device_get
    for after in (0, 1, 3):
      calls = 0

      def interrupt(x, after=after):
        nonlocal calls
        calls += 1
        if calls > after:
          raise KeyboardInterrupt
        return get(x)

      with monkeypatch.context() as patch:
        patch.setattr(jax, "device_get", interrupt)
        with pytest.raises(KeyboardInterrupt):
          ldjax.generate(tiny, "hello", max_new_tokens=20)
      assert ldjax.generate(tiny, "hello", max_new_tokens=20).tokens == want

  def test_by_leaving_the_loop(self, tiny):
    want = ldjax.generate(tiny, "hello", max_new_tokens=20).tokens
    engine = _engine.Engine(tiny, 1)
    for _ in range(3):
      engine.submit(request(tiny, [1], 20))
    engine.advance()
    assert engine.running == 1
    engine.close()
    assert engine.idle
    assert ldjax.generate(tiny, "hello", max_new_tokens=20).tokens == want

  def test_by_an_error_of_progress(self, scripted, bigram):
    def fail(line):
      raise RuntimeError(line)

    model = scripted(bigram())
    _forget_announcements(model)
    with pytest.raises(RuntimeError, match="Compiling the prefill"):
      ldjax.generate(model, [1], max_new_tokens=3, progress=fail)
