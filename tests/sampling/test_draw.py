"""The law of drawn tokens, and that a draw depends on its position alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldjax import sampling, testing

_LAW = np.array([0.31, 0.02, 0.17, 0.0, 0.23, 0.07, 0.2])
_LOGITS = np.log(np.maximum(_LAW, 1e-300)).astype(np.float32)
_LOGITS[3] = -np.inf  # never drawn

_draw = jax.jit(sampling.draw)
_warp = jax.jit(sampling.warp)


def _warped_law(law, temperature, top_k, top_p):
  """By sorting: sharpen, cut to k, renormalise, cut to p, renormalise."""
  law = np.where(law > 0, law, 0) ** (1 / temperature)
  law /= law.sum()
  if top_k:
    law = np.where(law >= np.sort(law)[-top_k], law, 0)
    law /= law.sum()
  larger = np.array([law[law > x].sum() for x in law])
  law = np.where((larger < top_p) | (law == law.max()), law, 0)
  return law / law.sum()


@jax.jit
def _draws_at(settings, logits, position):
  count = position.shape[0]
  spread = jax.tree.map(
    lambda x: jnp.broadcast_to(x, (count, *x.shape[1:])), settings
  )
  logits = jnp.broadcast_to(logits[None], (count, logits.shape[0]))
  return sampling.draw(logits, spread, position)


def _draws(settings, count):
  """`count` positions of one sequence."""
  return _draws_at(settings, _LOGITS, np.arange(count, dtype=np.int32))


@pytest.mark.parametrize(
  ("temperature", "top_k", "top_p"),
  [
    (1.0, 0, 1.0),
    (0.5, 2, 0.6),
    (2.0, 0, 1.0),
    (0.5, 0, 1.0),
    (1.0, 2, 1.0),
    (1.0, 0, 0.6),
    (2.0, 4, 0.6),
  ],
)
def test_the_law_of_the_draws(temperature, top_k, top_p):
  settings = sampling.make_sampling(
    1, temperature=temperature, top_k=top_k, top_p=top_p, seed=1
  )
  count = 200_000
  drawn = np.asarray(_draws(settings, count))
  seen = np.bincount(drawn, minlength=len(_LAW)) / count
  want = _warped_law(_LAW, temperature, top_k, top_p)
  assert not seen[want == 0].any()
  # The mean distance of a sample this large: under 0.4 * sqrt(7 / n) = 0.0024.
  assert np.abs(seen - want).sum() / 2 < 0.01


def test_settings_are_data():
  count = 101
  make = functools.partial(sampling.make_sampling, 1)
  cases = [
    make(temperature=t, top_k=k, top_p=p, seed=s)
    for t, k, p, s in (
      (0.0, 0, 1.0, 0),
      (1.0, 0, 1.0, 1),
      (0.5, 2, 0.6, 2),
      (2.0, 99, 0.1, 3),
    )
  ]
  _draws(cases[0], count).block_until_ready()
  with testing.assert_no_recompile():
    for settings in cases:
      _draws(settings, count).block_until_ready()


def test_every_token_of_a_small_support_appears():
  # mistral.rs#2424: the argmax came back at every temperature. The chance to
  # miss a token of probability 0.1 in 300 draws is 0.9 ** 300 = 2e-14.
  law = np.array([0.1, 0.0, 0.2, 0.3, 0.4] + [0.0] * 12)
  logits = np.where(law > 0, np.log(np.maximum(law, 1e-9)), -np.inf)
  settings = sampling.make_sampling(300, temperature=1.0, seed=list(range(300)))
  drawn = _draw(
    jnp.broadcast_to(logits.astype(np.float32)[None], (300, 17)),
    settings,
    jnp.full((300,), 6, jnp.int32),
  )
  assert set(np.asarray(drawn).tolist()) == {0, 2, 3, 4}


def test_a_draw_is_the_same_in_any_batch():
  rng = np.random.default_rng(2)
  rows, vocab = 23, 17
  logits = rng.normal(size=(rows, vocab)).astype(np.float32)
  position = rng.integers(0, 500, rows).astype(np.int32)
  options = {
    "temperature": rng.choice([0.0, 0.5, 1.0, 2.0], rows).tolist(),
    "top_k": rng.choice([0, 2, 5, 99], rows).tolist(),
    "top_p": rng.choice([0.3, 0.9, 1.0], rows).tolist(),
    "seed": rng.integers(0, 5, rows).tolist(),
  }
  together = np.asarray(
    _draw(logits, sampling.make_sampling(rows, **options), position)
  )
  order = rng.permutation(rows)
  shuffled = sampling.make_sampling(
    rows, **{name: [v[i] for i in order] for name, v in options.items()}
  )
  np.testing.assert_array_equal(
    _draw(logits[order], shuffled, position[order]), together[order]
  )
  for row in range(rows):
    alone = sampling.make_sampling(
      1, **{name: value[row] for name, value in options.items()}
    )
    drawn = _draw(logits[row][None], alone, position[row][None])
    assert int(drawn[0]) == together[row]


def test_greedy_and_sampled_rows_in_one_batch():
  rows = 300
  logits = np.random.default_rng(3).normal(size=(rows, 17)).astype(np.float32)
  temperature = [0.0 if row % 3 == 0 else 1.0 for row in range(rows)]
  drawn = np.asarray(
    _draw(
      logits,
      sampling.make_sampling(
        rows, temperature=temperature, top_k=3, seed=list(range(rows))
      ),
      jnp.zeros((rows,), jnp.int32),
    )
  )
  best = logits.argmax(-1)
  greedy = np.array(temperature) == 0
  np.testing.assert_array_equal(drawn[greedy], best[greedy])
  assert (drawn[~greedy] != best[~greedy]).any()
  rank = (logits > logits[np.arange(rows), drawn][:, None]).sum(-1)
  assert rank.max() == 2  # top-k 3 holds, and reaches its third token


@pytest.mark.parametrize("temperature", [0, 0.0, None])
def test_no_temperature_is_greedy(temperature):
  logits = np.random.default_rng(4).normal(size=(23, 17)).astype(np.float32)
  settings = sampling.make_sampling(
    23, temperature=temperature, top_k=2, top_p=0.1, seed=9
  )
  np.testing.assert_array_equal(
    _draw(logits, settings, jnp.arange(23, dtype=jnp.int32)), logits.argmax(-1)
  )


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-37, 1e-40, 1e-50])
def test_cold_draws_are_the_argmax(temperature):
  # At 1e-37 the logits over the temperature are past float32's range.
  logits = jnp.array([[100.0, 200.0, 300.0, -np.inf] + [0.0] * 13])
  for options in ({}, {"top_k": 2}, {"top_p": 0.9}):
    settings = sampling.make_sampling(1, temperature=temperature, **options)
    assert _draw(logits, settings, jnp.array([3])).tolist() == [2]


@pytest.mark.parametrize("top_k", [None, 0, 17, 22])
def test_disabled_top_k_changes_nothing(top_k):
  logits = np.random.default_rng(5).normal(size=(23, 17)).astype(np.float32)
  position = jnp.arange(23, dtype=jnp.int32)
  settings = sampling.make_sampling(23, temperature=1.0, top_k=top_k, seed=2)
  np.testing.assert_array_equal(_warp(logits, settings), logits)
  plain = sampling.make_sampling(23, temperature=1.0, seed=2)
  np.testing.assert_array_equal(
    _draw(logits, settings, position), _draw(logits, plain, position)
  )


def test_the_draw_is_gumbel_max():
  """Written out once more, in float64, from the noise itself."""
  logits = np.random.default_rng(6).normal(size=(23, 17)).astype(np.float32)
  position = jnp.arange(40, 63, dtype=jnp.int32)
  settings = sampling.make_sampling(23, temperature=0.5, seed=8)
  noise = np.asarray(sampling.gumbel(settings.key, position, 17), np.float64)
  scores = logits.astype(np.float64) / 0.5 + noise
  top = np.sort(scores, axis=-1)
  assert (top[:, -1] - top[:, -2]).min() > 1e-4  # no near tie in fp32
  np.testing.assert_array_equal(
    _draw(logits, settings, position), scores.argmax(-1)
  )


def test_under_vmap():
  logits = np.random.default_rng(7).normal(size=(3, 5, 17)).astype(np.float32)
  settings = sampling.make_sampling(
    5, temperature=[0.0, 1.0, 1.0, 2.0, 0.5], top_k=[0, 0, 3, 0, 2], seed=3
  )
  position = jnp.arange(5, dtype=jnp.int32)
  mapped = jax.jit(jax.vmap(sampling.draw, in_axes=(0, None, None)))
  got = mapped(logits, settings, position)
  want = [_draw(block, settings, position) for block in logits]
  np.testing.assert_array_equal(got, np.stack(want))
