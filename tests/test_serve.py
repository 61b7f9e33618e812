"""A server: any arrivals, any thread, the texts of `generate`."""

import asyncio
import threading
import time

import jax
import numpy as np
import pytest

import ldjax
from ldjax import _engine, _serve, testing

PROMPTS = ["hello", "abc ab", "zürich", "x", "Why?", "ab ab ab a", "q"]
SETTINGS = [
  ldjax.Settings(max_new_tokens=limit, temperature=temperature, seed=seed)
  for limit, temperature, seed in (
    (12, None, 0),
    (5, 1.0, 1),
    (20, 0.7, 2),
    (0, None, 0),
    (1, 1.0, 4),
    (9, None, 5),
    (15, 1.0, 6),
  )
]


@pytest.fixture(scope="module")
def alone(tiny_plain):
  return [
    ldjax.generate(tiny_plain, prompt, settings)
    for prompt, settings in zip(PROMPTS, SETTINGS, strict=True)
  ]


def _serve_all(server):
  return {ticket.number: ticket.result() for ticket in server}


def _tokens(results):
  return [results[i].tokens for i in sorted(results)]


class TestTexts:
  @pytest.mark.parametrize(
    "batch_size", [pytest.param(1, marks=pytest.mark.slow), 2]
  )
  def test_are_those_of_generate(self, tiny, alone, batch_size):
    pairs = list(zip(PROMPTS, SETTINGS, strict=True))
    with ldjax.serve(tiny, pairs, batch_size=batch_size) as server:
      results = _serve_all(server)
    assert _tokens(results) == [one.tokens for one in alone]
    assert [results[i].text for i in range(7)] == [one.text for one in alone]

  def test_whenever_they_come(self, tiny, alone):
    waiting = list(range(7))
    order = []
    with ldjax.serve(tiny, batch_size=2) as server:

      def more(count):
        for _ in range(min(count, len(waiting))):
          number = waiting.pop(0)
          server.submit(PROMPTS[number], SETTINGS[number])

      more(1)
      for ticket in server:
        order.append(ticket.number)
        assert ticket.done
        assert ticket.result().tokens == alone[ticket.number].tokens
        assert (ticket.prompt, ticket.settings) == (
          PROMPTS[ticket.number],
          SETTINGS[ticket.number],
        )
        more(2)
    assert sorted(order) == list(range(7))

  def test_pieces_as_they_come(self, tiny, alone):
    pieces = {i: [] for i in range(7)}
    with ldjax.serve(tiny, batch_size=2) as server:
      for i, (prompt, settings) in enumerate(
        zip(PROMPTS, SETTINGS, strict=True)
      ):
        server.submit(prompt, settings, on_text=pieces[i].append)
      list(server)
    assert ["".join(pieces[i]) for i in range(7)] == [a.text for a in alone]
    assert len(pieces[2]) > 2

  def test_several_samples(self, tiny):
    settings = ldjax.Settings(
      num_samples=3, temperature=1.0, max_new_tokens=6, seed=4
    )
    want = ldjax.generate(tiny, "hello", settings, batch_size=2)
    with ldjax.serve(tiny, [("hello", settings)], batch_size=2) as server:
      [ticket] = server
    assert [one.tokens for one in ticket.result()] == [
      one.tokens for one in want
    ]
    with pytest.raises(ValueError, match="num_samples is 3"):
      ldjax.serve(tiny).submit("a", settings, on_text=print)


class TestOrder:
  def test_nobody_overtakes(self, scripted, bigram):
    # All rows are as long, so that they end in the order of arrival.
    model = scripted(bigram(), draft="none")
    with ldjax.serve(model, batch_size=2) as server:
      for i in range(9):
        server.submit([i + 1], max_new_tokens=5)
      assert [ticket.number for ticket in server] == list(range(9))

  def test_a_preempted_row_comes_before_who_is_newer(
    self, scripted, bigram, monkeypatch
  ):
    model = scripted(bigram(), draft="none", num_pages=6)
    read, resumed = _engine.Engine._read_prompt, []

    def checked(engine, at, row):
      if row.waiting:
        resumed.append(row.index)
      else:
        assert not any(each.waiting for each in engine.rows if each)
      read(engine, at, row)

    monkeypatch.setattr(_engine.Engine, "_read_prompt", checked)
    rng = np.random.default_rng(0)
    with ldjax.serve(model, batch_size=3) as server:
      for _ in range(25):
        length, limit = rng.integers(1, 9), rng.integers(1, 16)
        server.submit([1] * int(length), max_new_tokens=limit)
      assert len(list(server)) == 25
    assert resumed, "the pool was large enough; the test says nothing"

  def test_iterables_are_drawn_from_as_rows_come_free(self, tiny):
    drawn = []

    def prompts():
      for i in range(8):
        drawn.append(i)
        yield [i + 1], ldjax.Settings(max_new_tokens=4)

    with ldjax.serve(tiny, prompts(), batch_size=2) as server:
      next(server)
      assert len(drawn) < 8
      assert len(list(server)) == 7


class TestCancel:
  def test_running_waiting_and_done(self, scripted, bigram):
    model = scripted(bigram(), draft="none")
    want = ldjax.generate(model, [1], max_new_tokens=40)
    with ldjax.serve(model, batch_size=1) as server:
      texts = []

      def say(text):
        texts.append(text)
        if len("".join(texts)) > 3:
          running.cancel()

      running = server.submit([1], max_new_tokens=40, on_text=say)
      waiting = server.submit([2], max_new_tokens=4)
      last = server.submit([3], max_new_tokens=4)
      waiting.cancel()
      waiting.cancel()
      order = [ticket.number for ticket in server]
    assert order == [1, 0, 2]
    assert waiting.result().finish_reason == "cancelled"
    assert waiting.result().tokens == ()
    cut = running.result()
    assert cut.finish_reason == "cancelled"
    assert 3 < len(cut.tokens) < 40
    assert cut.tokens == want.tokens[: len(cut.tokens)]
    assert cut.text == "".join(texts)
    assert last.result().finish_reason == "length"
    last.cancel()  # too late, and no harm
    assert list(server) == []
    assert server.stats.cancelled == 2

  def test_leaving_the_block_ends_what_is_left(self, tiny):
    with ldjax.serve(tiny, batch_size=2) as server:
      server.submit([1], max_new_tokens=1)
      tickets = [server.submit([1], max_new_tokens=100) for _ in range(5)]
      assert next(server).number == 0
    assert {t.result(0).finish_reason for t in tickets} == {"cancelled"}
    with pytest.raises(RuntimeError, match="the server is closed"):
      server.submit("a")
    # They have come to an end as well, and are given like all others.
    assert {ticket.number for ticket in server} == {t.number for t in tickets}


class TestThreads:
  def test_arrivals_from_many_threads(self, tiny, alone):
    results = {}
    with ldjax.serve(tiny, batch_size=2, keep_open=True) as server:
      worker = threading.Thread(target=lambda: list(server))
      worker.start()

      def ask(number):
        time.sleep(0.01 * (number % 3))
        ticket = server.submit(PROMPTS[number], SETTINGS[number])
        results[number] = ticket.result(120)

      threads = [threading.Thread(target=ask, args=(i,)) for i in range(7)]
      for thread in threads:
        thread.start()
      for thread in threads:
        thread.join()
      server.close()
      worker.join(60)
      assert not worker.is_alive()
    assert _tokens(results) == [one.tokens for one in alone]

  def test_two_threads_share_the_work(self, tiny, alone):
    pairs = zip(PROMPTS, SETTINGS, strict=True)
    with ldjax.serve(tiny, pairs, batch_size=2) as server:
      parts = [[], []]
      threads = [
        threading.Thread(target=lambda part=part: part.extend(server))
        for part in parts
      ]
      for thread in threads:
        thread.start()
      for thread in threads:
        thread.join()
    results = {t.number: t.result() for part in parts for t in part}
    assert _tokens(results) == [one.tokens for one in alone]

  def test_waiting_can_time_out(self, tiny):
    with ldjax.serve(tiny) as server:
      ticket = server.submit("a", max_new_tokens=2)
      assert not ticket.done
      with pytest.raises(TimeoutError):
        ticket.result(0.01)

  def test_coroutines(self, tiny, alone):
    async def main():
      with ldjax.serve(tiny, batch_size=2, keep_open=True) as server:

        async def work():
          return [ticket.number async for ticket in server]

        async def ask(number):
          await asyncio.sleep(0.01 * (number % 3))
          return await server.submit(PROMPTS[number], SETTINGS[number])

        worker = asyncio.create_task(work())
        results = await asyncio.gather(*map(ask, range(7)))
        server.close()
        assert sorted(await worker) == list(range(7))
        return results

    results = asyncio.run(main())
    assert [one.tokens for one in results] == [one.tokens for one in alone]


class TestFaults:
  def test_a_bad_request_is_refused_where_it_is_made(self, tiny):
    with ldjax.serve(tiny, batch_size=2) as server:
      good = server.submit("hello", max_new_tokens=3)
      for bad, settings, message in (
        ("hello", {"top_k": -1}, "top_k is -1"),
        ([7] * 257, {}, "257 tokens long"),
        ([], {}, "is empty"),
      ):
        with pytest.raises(ValueError, match=message):
          server.submit(bad, **settings)
      with pytest.raises(TypeError, match="did you mean top_k"):
        server.submit("a", topk=3)
      assert [ticket.number for ticket in server] == [good.number]
    with pytest.raises(ValueError, match="batch_size is 0"):
      ldjax.serve(tiny, batch_size=0)

  def test_a_bad_entry_of_the_iterable_is_told_and_the_rest_is_served(
    self, tiny
  ):
    with ldjax.serve(tiny, [[1], [999], [2]], batch_size=2) as server:
      with pytest.raises(ValueError, match="token 999"):
        next(server)
      assert len(list(server)) == 2

  def test_a_callback_that_fails_ends_its_own_request(self, tiny):
    def fail(text):
      raise OSError("the client is gone")

    with ldjax.serve(tiny, batch_size=2) as server:
      bad = server.submit("hello", max_new_tokens=30, on_text=fail)
      good = server.submit("hello", max_new_tokens=12)
      assert {ticket.number for ticket in server} == {0, 1}
      assert len(good.result().tokens) == 12
      with pytest.raises(OSError, match="the client is gone"):
        bad.result()

  def test_what_breaks_the_server_reaches_those_who_wait(
    self, tiny, monkeypatch
  ):
    def fail(engine):
      raise MemoryError("no room")

    with ldjax.serve(tiny) as server:
      ticket = server.submit("hello")
      monkeypatch.setattr(_engine.Engine, "_enqueue_step", fail)
      with pytest.raises(MemoryError):
        next(server)
      with pytest.raises(MemoryError):
        ticket.result(1)

  @pytest.mark.parametrize("after", [0, 1, 3, 6])
  def test_the_keyboard_loses_nothing(self, tiny, alone, monkeypatch, after):
    get, calls = jax.device_get, 0

    def interrupt(x):
      nonlocal calls
      calls += 1
      if calls == after + 1:
        raise KeyboardInterrupt
      return get(x)

    pieces = {i: [] for i in range(7)}
    with ldjax.serve(tiny, batch_size=2) as server:
      for i, (prompt, settings) in enumerate(
        zip(PROMPTS, SETTINGS, strict=True)
      ):
        server.submit(prompt, settings, on_text=pieces[i].append)
      served = []
      monkeypatch.setattr(jax, "device_get", interrupt)
      with pytest.raises(KeyboardInterrupt):
        served.extend(server)
      served += list(server)
      results = {ticket.number: ticket.result() for ticket in served}
    # Those that had ended before are not served twice.
    done = [i for i in range(7) if i not in results]
    for i in results:
      assert results[i].tokens == alone[i].tokens
      assert "".join(pieces[i]) == alone[i].text
    assert after or not done


def test_statistics(scripted, bigram):
  model = scripted(bigram(), draft="none")
  with ldjax.serve(model, batch_size=2) as server:
    before = server.stats
    assert (before.rows, before.running, before.waiting) == (2, 0, 0)
    assert (before.tokens_per_second, before.mean_rows_in_use) == (0.0, 0.0)
    for i in range(3):
      server.submit([i], max_new_tokens=6)
    assert server.stats.waiting == 3
    next(server)
    list(server)
    stats = server.stats
  assert isinstance(stats, ldjax.ServerStats)
  assert (stats.waiting, stats.running, stats.finished) == (0, 0, 3)
  assert (stats.tokens, stats.cancelled) == (18, 0)
  assert stats.tokens_per_second == pytest.approx(18 / stats.busy_s)
  assert 0 < stats.mean_wait_s <= stats.max_wait_s
  # 5 rounds after the first token with both rows, then 5 with one.
  assert 1.0 < stats.mean_rows_in_use < 2.0


def test_no_recompile_after_warm_up(tiny):
  def run():
    with ldjax.serve(tiny, batch_size=2) as server:
      for i, prompt in enumerate(PROMPTS):
        server.submit(
          prompt,
          max_new_tokens=9,
          seed=i,
          temperature=i % 2,
          frequency_penalty=i % 3,
          stop="z" * (i + 1),
          logprobs=i > 3,
        )
      return list(server)

  run()
  with testing.assert_no_recompile():
    assert len(run()) == 7
  assert _serve.serve is ldjax.serve
