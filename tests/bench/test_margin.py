"""How near two forwards may be to a tie: numbers worked by hand."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ldjax
from ldjax import bench, sampling


@pytest.fixture
def margin(monkeypatch):
  """`margin(logits, noise, **settings)`, with noise of the test's choice."""

  def margin(logits, noise=None, **settings):
    if noise is not None:
      fixed = jnp.asarray([noise], jnp.float32)
      monkeypatch.setattr(sampling, "gumbel", lambda key, position, v: fixed)
    return bench.margin(
      np.array(logits, np.float32), sampling.make_sampling(1, **settings), 7
    )

  return margin


class TestGreedy:
  @pytest.mark.parametrize(
    ("logits", "want"),
    [
      ([1.0, 3.0, 2.75], 0.25),
      ([5.0, -1.0, 5.0], 0.0),
      ([-4.0, -3.5], 0.5),
      ([0.0, -math.inf, -1.0], 1.0),
    ],
  )
  def test_gap_of_the_best_two(self, margin, logits, want):
    assert margin(logits) == want

  def test_cuts_do_not_matter(self, margin):
    assert margin([1.0, 3.0, 2.75], top_k=1, top_p=0.01) == 0.25


class TestTemperature:
  def test_gap_of_the_perturbed(self, margin):
    # Halved and with noise: 1.5, 2, 0.
    assert margin([2.0, 4.0, 0.0], [0.5, 0.0, 0.0], temperature=2.0) == 0.5

  def test_noise_turns_the_order(self, margin):
    # 3, 3.25, 0: the second token wins by a quarter.
    assert margin([3.0, 2.0, 0.0], [0.0, 1.25, 0.0], temperature=1.0) == 0.25

  def test_the_noise_is_that_of_the_draw(self):
    rng = np.random.default_rng(0)
    draw = jax.jit(sampling.draw)
    for seed in range(3):
      logits = rng.standard_normal(31).astype(np.float32)
      settings = sampling.make_sampling(1, temperature=0.8, seed=seed)
      position = jnp.array([3 + seed])
      noise = sampling.gumbel(settings.key, position, 31)[0]
      perturbed = logits.astype(np.float64) / 0.8 + np.asarray(noise)
      drawn = draw(jnp.asarray(logits)[None], settings, position)
      assert perturbed.argmax() == int(drawn[0])
      low, high = np.sort(perturbed)[-2:]
      have = bench.margin(logits, settings, 3 + seed)
      assert have == pytest.approx(high - low, abs=1e-5)  # 0.8 in float32


class TestTopK:
  """k = 2 of 3, 2, 1.75, 0: the cut lies between 2 and 1.75."""

  LOGITS = (3.0, 2.0, 1.75, 0.0)

  @pytest.mark.parametrize(
    ("noise", "want"),
    [
      # Perturbed 3, 2, 2.25, 0. The first wins; the second is 1 behind. The
      # third is cut by 0.25 and, were it not, still 0.75 behind.
      ([0.0, 0.0, 0.5, 0.0], 0.75),
      # 3, 2, 3.75, 0: the third would win, but for the 0.25 of the cut.
      ([0.0, 0.0, 2.0, 0.0], 0.25),
      # 3, 4, 1.75, 0: the second wins, and is 0.25 from being cut itself.
      ([0.0, 2.0, 0.0, 0.0], 0.25),
      # 3, 2.875, 1.75, 0: plainly the gap of two that stay.
      ([0.0, 0.875, 0.0, 0.0], 0.125),
      # 3, 2, 1.75, 9: the last would win, and is 2 from the cut; the second
      # is 1 behind.
      ([0.0, 0.0, 0.0, 9.0], 1.0),
    ],
  )
  def test_at_the_cut(self, margin, noise, want):
    assert margin(self.LOGITS, noise, temperature=1.0, top_k=2) == want

  def test_temperature_scales_the_distance_to_the_cut(self, margin):
    # At T = 2: 1.5, 1, 0.875, 0; the third would win and is cut by 0.125.
    have = margin(self.LOGITS, [0, 0, 5, 0], temperature=2.0, top_k=2)
    assert have == 0.125

  def test_nothing_is_cut(self, margin):
    for k in (None, 0, 4, 9):
      have = margin(self.LOGITS, [0, 0.5, 0, 0], temperature=1.0, top_k=k)
      assert have == 0.5


class TestTopP:
  """Probabilities 0.5, 0.3, 0.2 and p = 0.6: the third is cut.

  Strictly larger tokens sum to 0, 0.5 and 0.8, so that the second is 0.1 of
  probability within the nucleus and the third 0.2 beyond it.
  """

  LOGITS = tuple(math.log(x) for x in (0.5, 0.3, 0.2))

  @pytest.mark.parametrize(
    ("noise", "want"),
    [
      # The second wins: 0.1 and it would be cut.
      ([0.0, 5.0, 0.0], 0.1),
      # The third would win, were it not for 0.2.
      ([0.0, 0.0, 5.0], 0.2),
      # The second is log(5/3) - 0.45 = 0.0608 behind.
      ([0.0, 0.45, 0.0], math.log(5 / 3) - 0.45),
      # The second is 0.51 behind; the third is cut by 0.2 and 0.92 behind.
      ([0.0, 0.0, 0.0], math.log(5 / 3)),
    ],
  )
  def test_at_the_cut(self, margin, noise, want):
    have = margin(self.LOGITS, noise, temperature=1.0, top_p=0.6)
    assert have == pytest.approx(want, abs=1e-6)  # float32 logits and p

  def test_where_the_logits_are_nearer_than_the_probability(self, margin):
    # 0.4, 0.31, 0.29 with p = 0.6: larger ones sum to 0, 0.4, 0.71. The third
    # would win; it is 0.11 beyond in probability, but only log(31/29) = 0.067
    # below the lowest that stays.
    logits = [math.log(x) for x in (0.4, 0.31, 0.29)]
    have = margin(logits, [0, 0, 5], temperature=1.0, top_p=0.6)
    assert have == pytest.approx(math.log(31 / 29), abs=1e-6)

  def test_after_top_k(self, margin):
    # 0.4, 0.3, 0.2, 0.1 with k = 3 are 4/9, 3/9, 2/9; larger ones sum to 0,
    # 4/9, 7/9. With p = 0.7 the third is cut, by 7/9 - 0.7 = 0.0778.
    logits = [math.log(x) for x in (0.4, 0.3, 0.2, 0.1)]
    have = margin(logits, [0, 0, 5, 0], temperature=1.0, top_k=3, top_p=0.7)
    assert have == pytest.approx(7 / 9 - 0.7, abs=1e-6)


class TestNextLogits:
  def test_is_the_forward_itself(self, tiny):
    tokens = [3 + 7 * i % 250 for i in range(70)]
    column = jnp.arange(70, dtype=jnp.int32)[None]

    @jax.jit
    def direct(params, block):
      view = tiny.init_cache(1).view()
      output = tiny.target.forward(params, block, column, column - 1, view)
      return tiny.target.score(params, output.hidden).logits[0]

    # One block over an empty cache; node i sees nothing past itself.
    block = jnp.asarray([tokens], jnp.int32)
    want = np.asarray(direct(tiny.params.target, block))
    assert want.std() > 1
    for length in (1, 63, 64, 65, 70):
      have = bench.next_logits(tiny, tokens[:length])
      assert have.shape == (262,)
      # Sums in another order, float32: some hundred roundings of 6e-8 on
      # values of about 10.
      np.testing.assert_allclose(have, want[length - 1], atol=1e-4, rtol=0)

  def test_is_what_generate_draws_from(self, tiny, tiny_plain):

    prompt = list(range(5, 15))
    result = ldjax.generate(tiny_plain, prompt, max_new_tokens=3)
    for i, token in enumerate(result.tokens):
      context = [*prompt, *result.tokens[:i]]
      assert int(bench.next_logits(tiny, context).argmax()) == token


class TestIsNearTie:
  @pytest.fixture
  def model(self, scripted, bigram):
    logits = bigram({1: 2, 2: 3, 3: 4})
    logits[3, 9] = logits[3, 4] - 5e-4  # near
    logits[2, 9] = logits[2, 3] - 5e-3  # not near
    return scripted(logits)

  @pytest.mark.parametrize(
    ("one", "other", "want"),
    [
      ([2, 3, 4, 7], [2, 3, 9, 8], True),
      ([2, 3], [2, 9], False),
      ([4], [9], False),
    ],
  )
  def test_where_the_texts_part(self, model, one, other, want):
    settings = ldjax.Settings()
    for pair in ((one, other), (other, one)):
      assert bench.is_near_tie(model, [7, 1], *pair, settings) is want

  def test_noise_decides_at_a_temperature(self, model):
    # The same rows; the noise of the position moves a gap of 5e-4 apart.
    settings = ldjax.Settings(temperature=1.0, seed=3)
    assert not bench.is_near_tie(model, [7, 1], [2, 3, 4], [2, 3, 9], settings)

  def test_the_limit_is_that_of_the_design(self):
    assert bench.NEAR_TIE == 1e-3
