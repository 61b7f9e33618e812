"""A draft that is right as often as it is told to be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldjax import decoding, optimize, sampling, testing


@pytest.fixture
def said():
  """`said(size, texts, lengths, rate, seed)`: what is drafted, [B, T]."""

  def said(size, texts, lengths, rate, seed=0):
    context = decoding.DraftContext(
      jnp.zeros_like(jnp.asarray(texts, jnp.int32)),
      jnp.asarray(lengths, jnp.int32),
      sampling.make_sampling(len(texts)),
    )
    params = optimize.oracle_params(texts, rate, seed)
    candidates, state = optimize.oracle(size).propose(params, (), context)
    assert state == ()
    np.testing.assert_array_equal(
      candidates.parents, [list(range(-1, size - 1))] * len(texts)
    )
    return np.asarray(candidates.tokens)

  return said


def test_the_truth_and_its_opposite(said):
  texts = np.array([[3, 1, 4, 1, 5, 0], [2, 7, 1, 8, 2, -1]])
  right = said(4, texts, [2, 3], 1.0)
  np.testing.assert_array_equal(right, [[-1, 4, 1, 5], [-1, 8, 2, -1]])
  wrong = said(4, texts, [3, 1], 0.0)
  np.testing.assert_array_equal(wrong, [[-1, 0, 4, 1], [-1, 6, 0, 7]])


def test_nothing_past_the_end(said):
  texts = np.array([[3, 1, 4]])
  np.testing.assert_array_equal(said(4, texts, [2], 1.0), [[-1, 4, -1, -1]])
  np.testing.assert_array_equal(said(3, texts, [3], 1.0), [[-1, -1, -1]])


def test_of_one_node(said):
  np.testing.assert_array_equal(said(1, np.array([[3, 1]]), [1], 1.0), [[-1]])


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.8])
def test_hits_depend_on_row_position_and_seed_alone(said, rate):
  texts = np.full((3, 4001), 5)
  whole = said(4001, texts, [1, 1, 1], rate)[:, 1:] == 5
  # 4,000 coins: five standard deviations are 0.04 at most.
  np.testing.assert_allclose(whole.mean(axis=1), rate, atol=0.04)
  agree = (whole[0] == whole[1]).mean()
  assert agree == pytest.approx(rate**2 + (1 - rate) ** 2, abs=0.04)
  # One position after another, too, is as if drawn alone.
  pairs = (whole[:, 1:] & whole[:, :-1]).mean()
  assert pairs == pytest.approx(rate**2, abs=0.03)
  later = said(8, texts, [1000, 2000, 3000], rate)[:, 1:] == 5
  for row, start in enumerate((999, 1999, 2999)):
    np.testing.assert_array_equal(later[row], whole[row, start : start + 7])
  other = said(4001, texts, [1, 1, 1], rate, seed=1)[:, 1:] == 5
  assert (other[0] == whole[0]).mean() == pytest.approx(agree, abs=0.06)


def test_rates_and_texts_do_not_compile_again():
  assert optimize.oracle(5) is optimize.oracle(5)
  propose = jax.jit(optimize.oracle(5).propose)
  context = decoding.DraftContext(
    jnp.zeros((1, 9), jnp.int32), jnp.array([2]), sampling.make_sampling(1)
  )
  for rate, seed in ((0.5, 0), (0.9, 7)):
    params = optimize.oracle_params([[seed] * 9], rate, seed)
    propose(params, (), context)
  assert propose._cache_size() == 1


@pytest.mark.slow
def test_tokens_a_round_are_the_formula_s():
  tiny = testing.tiny_model(max_len=400)
  prompts = [[1 + i, 2, 3] for i in range(4)]
  [*texts], _ = testing.decode_tokens(
    decoding.autoregressive(tiny.target, tiny.init_cache, max_len=400),
    decoding.DecoderParams(tiny.params),
    prompts,
    max_new_tokens=390,
  )
  known = [p + t + [-1] * 7 for p, t in zip(prompts, texts, strict=True)]
  accepted = testing.assert_lossless(
    tiny.target,
    tiny.params,
    optimize.oracle(4),
    optimize.oracle_params(known, 0.7, seed=5),
    tiny.init_cache,
    prompts,
    max_len=400,
    max_new_tokens=390,
  )
  # Four rows of some 160 rounds with a standard deviation of 1.2 tokens.
  assert accepted == pytest.approx(1 + 0.7 + 0.49 + 0.343, abs=0.2)


@pytest.mark.parametrize(
  ("texts", "rate", "message"),
  [
    ([1, 2], 0.5, r"shape \(2,\)"),
    ([[]], 0.5, r"shape \(1, 0\)"),
    ([[1]], -0.1, "hit_rate is -0.1"),
    ([[1]], 1.1, "hit_rate is 1.1"),
    ([[1]], float("nan"), "hit_rate is nan"),
  ],
)
def test_what_is_refused(texts, rate, message):
  with pytest.raises(ValueError, match=message):
    optimize.oracle_params(texts, rate)


def test_no_size():
  with pytest.raises(ValueError, match="size is 0"):
    optimize.oracle(0)
