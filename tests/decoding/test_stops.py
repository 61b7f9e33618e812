"""Every way for a row to end, at every place in a run."""

import jax.numpy as jnp
import numpy as np
import pytest

from ldjax import decoding, testing

Status = decoding.Status
K = 4


@pytest.fixture(scope="module")
def plain(toy):
  return toy.decoder()


@pytest.fixture(scope="module")
def wide(toy):
  return toy.decoder(testing.scripted_draft(K))


@pytest.fixture(scope="module")
def greedy(toy):
  return [toy.greedy(prompt, toy.max_len) for prompt in toy.prompts]


def _cut(text, stops, limit):
  """What is left of a text: up to a stop id, and no more than `limit`."""
  for index, token in enumerate(text[:limit]):
    if token in stops:
      return text[: index + 1], Status.STOPPED
  return text[:limit], Status.LENGTH


def _check(toy, state, texts, want):
  assert texts == [text for text, _ in want]
  assert state.status.tolist() == [status for _, status in want]
  assert state.emitted.tolist() == [len(text) for text, _ in want]
  # The last token was never read: its key and value are not committed.
  assert state.cache.length.tolist() == [
    len(p) + len(text) - 1 if text else 0
    for p, (text, _) in zip(toy.prompts, want, strict=True)
  ]


@pytest.mark.parametrize("shift", [0, 1], ids=["oracle", "always wrong"])
def test_stop_id_at_every_index(toy, plain, wide, greedy, shift):
  script = toy.script(greedy, shift=shift)
  seen = set()
  for k in range(20):
    stops = (greedy[0][k],)
    want = [_cut(text, stops, 20) for text in greedy]
    for decoder, draft in ((plain, ()), (wide, script)):
      texts, state = toy.run(
        decoder, toy.params(draft), max_new_tokens=20, stop_ids=stops
      )
      _check(toy, state, texts, want)
    seen.add(len(want[0][0]))
  assert len(seen) > 10  # distinct places, all of K's residues among them


def test_several_stop_ids(toy, wide, greedy):
  script = toy.script(greedy)
  for stops in ((7, 3, 7), range(16), (greedy[1][5], greedy[2][9], 31, 999)):
    want = [_cut(text, set(stops), 24) for text in greedy]
    texts, state = toy.run(
      wide, toy.params(script), max_new_tokens=24, stop_ids=stops
    )
    _check(toy, state, texts, want)


def test_stop_ids_of_each_row(toy, wide, greedy):
  stops = [(greedy[0][3],), (), (greedy[2][8], 5), (greedy[3][0],)]
  texts, state = toy.run(
    wide,
    toy.params(toy.script(greedy)),
    max_new_tokens=20,
    stop_ids=np.stack([decoding.stop_ids_row(s) for s in stops]),
  )
  want = [_cut(t, s, 20) for t, s in zip(greedy, stops, strict=True)]
  _check(toy, state, texts, want)


def test_refused_stop_id_does_not_stop(toy, wide, greedy):
  # A draft that always proposes the stop id; the target never draws it.
  eos = next(t for t in range(toy.V) if all(t not in g for g in greedy))
  script = jnp.full((len(toy.prompts), toy.max_len), eos, jnp.int32)
  texts, state = toy.run(
    wide, toy.params(script), max_new_tokens=20, stop_ids=(eos,)
  )
  assert texts == [g[:20] for g in greedy]
  assert state.status.tolist() == [Status.LENGTH] * len(toy.prompts)


@pytest.mark.parametrize("limit", range(-1, K + 3))
def test_exactly_so_many_tokens(toy, plain, wide, greedy, limit):
  want = [_cut(text, (), max(limit, 0)) for text in greedy]
  for decoder, draft in ((plain, ()), (wide, toy.script(greedy))):
    texts, state = toy.run(decoder, toy.params(draft), max_new_tokens=limit)
    _check(toy, state, texts, want)


def test_limits_of_each_row(toy, wide, greedy):
  limits = [0, 5, 1, 17]
  texts, state = toy.run(
    wide, toy.params(toy.script(greedy)), max_new_tokens=limits
  )
  want = [_cut(t, (), n) for t, n in zip(greedy, limits, strict=True)]
  _check(toy, state, texts, want)


@pytest.mark.parametrize("limit", [31, 32, 37, 38, 1000, 2**31 - 1])
def test_end_of_the_cache(toy, plain, wide, greedy, limit):
  # Prompts have 3, 9, 2 and 4 tokens of the 40 that a row can have.
  want = [
    _cut(text, (), min(limit, toy.max_len - len(prompt)))
    for prompt, text in zip(toy.prompts, greedy, strict=True)
  ]
  for decoder, draft in ((plain, ()), (wide, toy.script(greedy))):
    texts, state = toy.run(decoder, toy.params(draft), max_new_tokens=limit)
    _check(toy, state, texts, want)
    assert int(state.length.max()) <= toy.max_len


@pytest.mark.slow
def test_cache_of_one_position_less(toy, greedy):
  # The last token's key is never committed, so 39 positions hold 40 tokens.
  decoder = toy.decoder(testing.scripted_draft(K), page_size=3, max_len=39)
  texts, state = toy.run(
    decoder, toy.params(toy.script(greedy)), max_new_tokens=99
  )
  assert state.length.tolist() == [toy.max_len] * len(toy.prompts)
  assert [len(p) + len(t) for p, t in zip(toy.prompts, texts, strict=True)] == [
    toy.max_len
  ] * len(toy.prompts)
  assert texts == [
    g[: toy.max_len - len(p)] for p, g in zip(toy.prompts, greedy, strict=True)
  ]
  assert state.status.tolist() == [Status.LENGTH] * len(toy.prompts)


@pytest.mark.parametrize("shift", [0, 1], ids=["oracle", "always wrong"])
def test_counts_add_up(toy, wide, greedy, shift):
  # vllm#56101, EAGLE#146: the sum over rounds is what was emitted, tokens
  # after a stop id are not counted, and the first token came from prefill.
  params = toy.params(toy.script(greedy, shift=shift))
  stops = (greedy[0][6],)
  start = toy.init(wide, params, max_new_tokens=20, stop_ids=stops)
  end, rounds = toy.trace(wide, params, start, 24)
  want = [_cut(text, stops, 20) for text in greedy]
  _check(toy, end, toy.texts(end), want)
  count = np.asarray(rounds.count)
  assert (count.sum(0) + 1).tolist() == end.emitted.tolist()
  assert ((count > 0).sum(0) + 1).tolist() == end.rounds.tolist()
  for row, (text, status) in enumerate(want):
    emitted = np.asarray(rounds.tokens)[:, row]
    assert emitted[emitted >= 0].tolist() == text[1:]
    # -1 exactly past the count.
    column = np.arange(K + 1)[None]
    assert ((emitted >= 0) == (column < count[:, row, None])).all()
    finished = np.asarray(rounds.finished)[:, row]
    last = np.flatnonzero(count[:, row])[-1]
    assert finished.tolist() == [i >= last for i in range(24)]
    assert rounds.status[-1, row] == status


def test_finished_rows_stay_as_they_are(toy, wide, greedy):
  params = toy.params(toy.script(greedy))
  _, end = toy.run(wide, params, max_new_tokens=[0, 3, 20, 7])
  after, rounds = toy.trace(wide, params, end, 24)
  for name in ("tokens", "length", "status", "rounds", "finite", "limit"):
    np.testing.assert_array_equal(getattr(after, name), getattr(end, name))
  for one, two in zip(
    (*after.cache.pages, after.cache.length, after.cache.block_table),
    (*end.cache.pages, end.cache.length, end.cache.block_table),
    strict=True,
  ):
    np.testing.assert_array_equal(one, two)
  assert not np.asarray(rounds.count).any()
  assert (np.asarray(rounds.tokens) == -1).all()


def test_stop_ids_row_errors():
  assert decoding.stop_ids_row(range(16)).tolist() == list(range(16))
  with pytest.raises(
    ValueError, match="17 stop ids; a row can have at most 16"
  ):
    decoding.stop_ids_row(range(17))
  with pytest.raises(ValueError, match="-2 is negative"):
    decoding.stop_ids_row([4, -2])
