"""Penalties, bans and log-probabilities along a tree, against plain NumPy."""

import collections

import jax.numpy as jnp
import numpy as np
import pytest

from ldjax import decoding, sampling, testing

SCALE = 6 / (997 * 31)
NEW = 20
NEUTRAL = {
  "repetition_penalty": 1.0,
  "frequency_penalty": 0.0,
  "presence_penalty": 0.0,
  "banned_ids": [],
  "min_new_tokens": 0,
}
ROWS = (
  {"repetition_penalty": 1.7, "frequency_penalty": 0.5},
  {"presence_penalty": 2.5, "min_new_tokens": 7},
  {"frequency_penalty": -1.5},  # brings tokens back
  {"banned_ids": [28, 29, 30, 11], "repetition_penalty": 1.2},
)
STOPS = (5, 17)


def _settings():
  rows = [{**NEUTRAL, **row} for row in ROWS]
  return {name: [row[name] for row in rows] for name in NEUTRAL}


def _expected(toy, prompt, row):
  """Text and log-probabilities, one token at a time."""
  settings = {**NEUTRAL, **row}
  text, logprobs = list(prompt), []
  while len(logprobs) < NEW:
    raw = toy.ranks(text) * SCALE
    emitted = collections.Counter(text[len(prompt) :])
    logits = raw.copy()
    for token in range(toy.V):
      if token in text:
        logits[token] /= settings["repetition_penalty"]  # none is below 0
      logits[token] -= settings["frequency_penalty"] * emitted[token]
      if emitted[token]:
        logits[token] -= settings["presence_penalty"]
      early = len(logprobs) < settings["min_new_tokens"]
      if token in settings["banned_ids"] or (early and token in STOPS):
        logits[token] = -np.inf
    second, best = np.sort(logits)[-2:]
    assert best - second > 1e-5, "a near tie: take another row"
    text.append(int(np.argmax(logits)))
    logprobs.append(raw[text[-1]] - np.log(np.exp(raw).sum()))
    if text[-1] in STOPS:
      break
  return text[len(prompt) :], logprobs


@pytest.fixture(scope="module")
def expected(toy):
  return [
    _expected(toy, prompt, row)
    for prompt, row in zip(toy.prompts, ROWS, strict=True)
  ]


def test_the_settings_matter(toy, expected):
  for prompt, (text, _) in zip(toy.prompts, expected, strict=True):
    assert text != toy.greedy(prompt, len(text))
  assert expected[2][0] != _expected(toy, toy.prompts[2], {})[0]
  # Without min_new_tokens row 1 would stop early, or the row says nothing.
  early = {**ROWS[1], "min_new_tokens": 0}
  assert len(_expected(toy, toy.prompts[1], early)[0]) <= 7


@pytest.mark.parametrize("name", ["plain", "right", "wrong", "random tree"])
def test_same_text_and_logprobs_as_numpy(toy, expected, name):
  want = [text for text, _ in expected]
  script = ()
  if name == "plain":
    draft = decoding.root_only()
  elif name == "random tree":
    draft = testing.random_tree_draft(9, 3, toy.V)
  else:
    # Right, so that four deep nodes have paths of their own to look at.
    draft = testing.scripted_draft(4)
    script = toy.script(want, shift=name == "wrong")
  decoder = toy.decoder(draft)
  params = toy.params(script)
  state = toy.init(
    decoder,
    params,
    sampling_=sampling.make_sampling(4, logprobs=True, **_settings()),
    max_new_tokens=NEW,
    stop_ids=STOPS,
  )
  # The first token's was in the round of the prefill.
  texts = [[text[0]] for text in toy.texts(state)]
  logprobs = [[] for _ in want]
  while np.asarray(state.live).any():
    state, one = toy.programs(decoder).step(params, state)
    for row in range(4):
      count = int(one.count[row])
      texts[row] += one.tokens[row, :count].tolist()
      logprobs[row] += one.logprobs[row, :count].tolist()
      assert not np.asarray(one.logprobs[row, count:]).any()
  assert texts == want
  for have, (_, logprob) in zip(logprobs, expected, strict=True):
    np.testing.assert_allclose(have, logprob[1:], atol=1e-5, rtol=0)
  if name == "right":
    assert int(state.rounds.sum()) < sum(map(len, want)) / 2


def test_logprobs_of_the_rows_that_ask(toy):
  decoder = toy.decoder()
  params = toy.params()
  state = toy.init(
    decoder,
    params,
    sampling_=sampling.make_sampling(4, logprobs=[True, False, False, True]),
  )
  _, one = toy.programs(decoder).step(params, state)
  assert (np.asarray(one.logprobs[:, 0]) < 0).tolist() == [
    True,
    False,
    False,
    True,
  ]


def test_nothing_left_to_draw_is_a_fault():
  scores = decoding.Scores(jnp.zeros((2, 1, 3), jnp.float32))
  walk = decoding.accept(
    scores,
    decoding.Candidates(
      jnp.full((2, 1), -1, jnp.int32), jnp.full((2, 1), -1, jnp.int32)
    ),
    sampling.make_sampling(2, banned_ids=[[0, 1, 2], [0, 1]]),
    sampling.History(
      jnp.zeros((2, 4), jnp.int32),
      jnp.ones((2,), jnp.int32),
      jnp.ones((2,), jnp.int32),
    ),
    depth=0,
    stop_ids=jnp.full((2, 1), -1, jnp.int32),
    remaining=jnp.ones((2,), jnp.int32),
  )
  assert walk.finite.tolist() == [False, True]
  assert walk.count.tolist() == [0, 1]
  assert walk.tokens[1, 0] == 2
