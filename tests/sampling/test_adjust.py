"""Penalties and bans against a loop over tokens, and values by hand."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldjax import sampling

V, S = 11, 13


def _expected(logits, tokens, prompt_length, length, settings, stop_ids):
  """One row, in float64, token by token."""
  past = tokens[:length].tolist()
  emitted = collections.Counter(past[prompt_length:])
  out = []
  for token, value in enumerate(logits.astype(np.float64)):
    if token in past:
      repetition = settings["repetition_penalty"]
      value = value / repetition if value > 0 else value * repetition
    times = emitted[token]
    value -= settings["frequency_penalty"] * times
    value -= settings["presence_penalty"] * (times > 0)
    early = length - prompt_length < settings["min_new_tokens"]
    if token in settings["banned_ids"] or (early and token in stop_ids):
      value = -np.inf
    out.append(value)
  return out


@pytest.mark.parametrize("seed", range(4))
def test_rows_of_all_kinds(seed):
  rng = np.random.default_rng(seed)
  batch = 5
  logits = rng.standard_normal((batch, V), np.float32) * 3
  tokens = rng.integers(0, V, (batch, S))
  prompt_length = rng.integers(1, 5, batch)
  length = prompt_length + rng.integers(0, 8, batch)
  stop_ids = rng.integers(0, V, (batch, 2))
  rows = [
    {
      "repetition_penalty": float(rng.choice([1.0, 1.3, 0.7])),
      "presence_penalty": float(rng.choice([0.0, 0.5, -2.0])),
      "frequency_penalty": float(rng.choice([0.0, 0.25, -1.0])),
      "banned_ids": rng.choice(V, rng.integers(0, 4), replace=False).tolist(),
      "min_new_tokens": int(rng.integers(0, 6)),
    }
    for _ in range(batch)
  ]
  settings = {name: [row[name] for row in rows] for name in rows[0]}
  have = jax.jit(sampling.adjust)(
    jnp.asarray(logits),
    sampling.make_sampling(batch, **settings),
    sampling.History(
      jnp.asarray(tokens, jnp.int32),
      jnp.asarray(prompt_length, jnp.int32),
      jnp.asarray(length, jnp.int32),
    ),
    jnp.asarray(stop_ids, jnp.int32),
  )
  want = [
    _expected(
      logits[i], tokens[i], prompt_length[i], length[i], rows[i], stop_ids[i]
    )
    for i in range(batch)
  ]
  # A division, a product and two differences of numbers below 40.
  np.testing.assert_allclose(have, want, atol=40 * 4 * 2**-24, rtol=0)


def _plain(batch):
  return sampling.History(
    jnp.zeros((batch, S), jnp.int32),
    jnp.ones((batch,), jnp.int32),
    jnp.full((batch,), 9, jnp.int32),
  )


def test_without_settings_every_bit_stays():
  logits = jnp.asarray(
    np.random.default_rng(0).standard_normal((3, V), np.float32)
  )
  logits = logits.at[0, 3].set(-jnp.inf).at[1, 2].set(-0.0)
  stop_ids = jnp.full((3, 2), 4, jnp.int32)
  for settings in ({}, {"repetition_penalty": [1.0, 2.0, 1.0]}):
    have = sampling.adjust(
      logits, sampling.make_sampling(3, **settings), _plain(3), stop_ids
    )
    for row in (0, 2):
      assert (
        np.asarray(have[row]).tobytes() == np.asarray(logits[row]).tobytes()
      )


def test_ids_past_the_vocabulary_and_unused_entries_change_nothing():
  history = sampling.History(
    jnp.array([[V + 5, 2, -1, 7]]), jnp.array([1]), jnp.array([2])
  )
  have = sampling.adjust(
    jnp.ones((1, V)),
    sampling.make_sampling(1, frequency_penalty=1.0, banned_ids=[V + 3]),
    history,
    jnp.array([[-1]]),
  )
  assert have[0].tolist() == [1, 1, 0, *[1] * (V - 3)]


def test_minus_infinity_and_nan_go_through():
  logits = jnp.array([[-jnp.inf, jnp.nan, 1.0, -2.0]])
  history = sampling.History(
    jnp.array([[0, 1, 2, 3]]), jnp.array([4]), jnp.array([4])
  )
  have = sampling.adjust(
    logits,
    sampling.make_sampling(1, repetition_penalty=2.0),
    history,
    jnp.array([[-1]]),
  )
  np.testing.assert_array_equal(have, [[-np.inf, np.nan, 0.5, -4.0]])


class TestMinP:
  def test_by_hand(self):
    logits = jnp.log(jnp.array([[0.5, 0.25, 0.125, 0.125]] * 4))
    p = jnp.array([0.0, 0.5, 0.51, 1.0])
    mask = sampling.min_p_mask(logits, p)
    assert mask.sum(-1).tolist() == [4, 2, 1, 1]

  def test_ties_with_the_best_stay(self):
    mask = sampling.min_p_mask(jnp.array([[3.0, 3.0, 1.0]]), jnp.array([1.0]))
    assert mask.tolist() == [[True, True, False]]

  def test_what_is_cut_stays_cut(self):
    logits = jnp.array([[0.0, -jnp.inf]])
    for p in (0.0, 0.5):
      mask = sampling.min_p_mask(logits, jnp.array([p]))
      assert mask.tolist() == [[True, False]]

  def test_comes_after_the_temperature(self):
    logits = jnp.array([[0.0, -1.0, -2.0]])
    # At T=2 the shares are 1, e^-0.5, e^-1: 0.5 keeps the first two.
    kept = sampling.warp(
      logits, sampling.make_sampling(1, temperature=2.0, min_p=0.5)
    )
    assert jnp.isfinite(kept).tolist() == [[True, True, False]]


def test_samples_have_keys_of_their_own_and_the_first_is_the_plain_one():
  keys = [
    sampling.make_sampling(1, seed=7, sample=i).key.tolist() for i in range(3)
  ]
  assert keys[0] == sampling.make_sampling(1, seed=7).key.tolist()
  assert len({str(key) for key in keys}) == 3


def test_keys_of_host_and_device_agree():
  seed = 2**40 + 17
  words = np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)
  key = jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")
  for sample in (0, 5):
    one = sampling.host_sampling(1, seed=seed, sample=sample).key
    two = sampling.host_sampling(1, seed=key, sample=sample).key
    assert isinstance(one, np.ndarray)
    np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"min_p": 1.5}, "min_p is 1.5"),
    ({"min_p": float("nan")}, "min_p is nan"),
    ({"repetition_penalty": 0.0}, "repetition_penalty is 0"),
    ({"repetition_penalty": float("inf")}, "repetition_penalty is inf"),
    ({"presence_penalty": float("nan")}, "presence_penalty is nan"),
    ({"frequency_penalty": 1e9}, "frequency_penalty is 1000000000"),
    ({"banned_ids": [3, -1]}, "banned id -1"),
    ({"banned_ids": range(65)}, "65 banned ids; a row can have at most 64"),
    ({"banned_ids": [[1], [2]]}, "banned_ids has 2 entries for 1 rows"),
    ({"min_new_tokens": -1}, "min_new_tokens is -1"),
    ({"min_new_tokens": 1.5}, "min_new_tokens is 1.5"),
    ({"logprobs": "yes"}, "logprobs is 'yes'"),
  ],
)
def test_errors(settings, message):
  with pytest.raises(ValueError, match=message):
    sampling.make_sampling(1, **settings)
