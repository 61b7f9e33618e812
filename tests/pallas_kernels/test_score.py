"""Scoring without logits against all of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from ldjax import pallas_kernels, sampling
from ldjax.pallas_kernels import _blocks, _limits
from ldjax.pallas_kernels._score import _mosaic_tpu, _reference, _xla

_SUMMARIZE = {
  "xla": _xla.summarize,
  "tpu_plain": functools.partial(_mosaic_tpu.summarize, interpret=True),
  "tpu_nan": functools.partial(
    _mosaic_tpu.summarize, interpret=pltpu.InterpretParams()
  ),
}
_STATIC = ("k", "soft_cap", "blocks")
_definition = jax.jit(_reference.summarize, static_argnames=("k", "soft_cap"))


def _problem(rows, vocab, width, dtype="float32", mapped=False):
  rng = np.random.default_rng(vocab)
  hidden = rng.normal(size=(rows, width)).astype(np.float32)
  weight = rng.normal(size=(vocab, width)).astype(np.float32)
  weight[vocab // 2] = weight[3]  # a tie in another tile
  ids = rng.permutation(2 * vocab)[:vocab].astype(np.int32)
  noise = _reference.Noise(
    key=jnp.stack([sampling.sequence_key(seed) for seed in range(rows)]),
    position=jnp.arange(rows, dtype=jnp.int32) + 70_000,
    temperature=jnp.linspace(0.3, 2.0, rows, dtype=jnp.float32),
    token_ids=jnp.asarray(ids) if mapped else None,
  )
  return jnp.asarray(hidden, dtype), jnp.asarray(weight, dtype), noise


@pytest.mark.parametrize("backend", _SUMMARIZE)
@pytest.mark.parametrize(
  ("rows", "vocab", "width", "dtype", "k", "listed", "soft_cap", "mapped"),
  [
    (5, 509, 24, "float32", 3, None, None, False),
    (1, 384, 17, "float32", 8, 8, 3.0, True),  # a whole number of tiles
    (19, 301, 40, "bfloat16", 130, 3, None, True),  # two tiles of rows
  ],
)
def test_equals_the_definition(
  backend, rows, vocab, width, dtype, k, listed, soft_cap, mapped
):
  problem = _problem(rows, vocab, width, dtype, mapped)
  if listed is not None:
    problem = (*problem, jnp.int32(listed))
  settings = {"k": k, "soft_cap": soft_cap}
  want = _definition(*problem, **settings)
  blocks = _blocks.ScoreBlocks(vocab_tile=128, hidden_rows=16)
  got = jax.jit(_SUMMARIZE[backend], static_argnames=_STATIC)(
    *problem, blocks=blocks, **settings
  )
  # Products of E normal numbers in fp32 (bf16 ones are exact in it), whose
  # order of summation differs.
  np.testing.assert_allclose(got.logits, want.logits, rtol=0, atol=2e-5)
  np.testing.assert_allclose(got.lse, want.lse, rtol=0, atol=2e-5)
  known = slice(None, listed)
  np.testing.assert_array_equal(got.entry[:, known], want.entry[:, known])
  np.testing.assert_array_equal(got.noisy, want.noisy)
  np.testing.assert_allclose(got.noisy_logit, want.noisy_logit, atol=2e-5)


@pytest.mark.parametrize("backend", _SUMMARIZE)
def test_ties_go_to_the_lower_entry(backend):
  hidden = jnp.ones((2, 4))
  weight = jnp.zeros((300, 4)).at[jnp.array([7, 130, 299])].set(1.0)
  got = _SUMMARIZE[backend](
    hidden,
    weight,
    None,
    k=5,
    soft_cap=None,
    blocks=_blocks.ScoreBlocks(vocab_tile=128),
  )
  assert got.entry.tolist() == [[7, 130, 299, 0, 1]] * 2
  assert got.noisy is None


def _settings(rows, **changes):
  return sampling.make_sampling(rows, seed=list(range(rows)), **changes)


@pytest.mark.parametrize(
  ("changes", "exact"),
  [
    ({}, True),
    ({"temperature": 1.0}, True),
    ({"temperature": 0.7, "top_k": 5}, True),
    ({"temperature": 0.7, "top_k": 8}, False),  # a tie may follow the eighth
    ({"temperature": 0.7, "top_k": 9}, False),
    ({"temperature": 0.7, "top_k": 10**6}, True),
    ({"temperature": 0.7, "top_p": 0.9}, False),
    ({"temperature": 0.7, "min_p": 0.1}, False),
    ({"banned_ids": [3]}, False),
    ({"repetition_penalty": 1.5}, False),
    ({"min_new_tokens": 2}, False),
  ],
)
def test_the_token_is_the_one_that_all_logits_give(changes, exact):
  rows, vocab = 23, 401
  hidden, weight, noise = _problem(rows, vocab, 16)
  given = _settings(rows, **changes)
  got = pallas_kernels.score(
    hidden, weight, k=8, sampling=given, position=noise.position
  )
  assert (np.asarray(got.exact) == exact).all()
  if exact:
    logits = _reference.logits_of(hidden, weight, None)
    want = sampling.draw(logits, given, noise.position)
    np.testing.assert_array_equal(got.token, want)


def test_a_tie_at_the_cut_is_seen():
  """Five equal logits under a top-k of 2: all may be drawn."""
  weight = jnp.zeros((300, 1)).at[jnp.arange(5) * 60].set(1.0)
  hidden = jnp.ones((200, 1))
  given = _settings(200, temperature=1.0, top_k=2)
  position = jnp.zeros((200,), jnp.int32)
  settings = {"sampling": given, "position": position}
  got = pallas_kernels.score(hidden, weight, k=6, **settings)
  assert got.exact.all()
  want = sampling.draw(hidden @ weight.T, given, position)
  np.testing.assert_array_equal(got.token, want)
  assert len(set(got.token.tolist())) == 5
  assert not pallas_kernels.score(hidden, weight, k=4, **settings).exact.any()


def test_noise_follows_the_target_id_of_a_trimmed_vocabulary():
  rows, vocab = 13, 97
  hidden, weight, noise = _problem(rows, vocab, 16, mapped=True)
  ids = np.asarray(noise.token_ids)
  given = _settings(rows, temperature=1.3)
  got = pallas_kernels.score(
    hidden,
    weight,
    k=2,
    token_ids=noise.token_ids,
    sampling=given,
    position=noise.position,
  )
  # As if the ids that are left out had no chance.
  logits = np.full((rows, 2 * vocab), -np.inf, np.float32)
  logits[:, ids] = _reference.logits_of(hidden, weight, None)
  want = sampling.draw(jnp.asarray(logits), given, noise.position)
  np.testing.assert_array_equal(got.token, want)
  np.testing.assert_array_equal(got.ids[:, 0], logits.argmax(-1))


@pytest.mark.parametrize("k", [0, -1, 12])
def test_a_k_out_of_range(k):
  with pytest.raises(ValueError, match=f"k is {k}; it must be 1 to the 11"):
    pallas_kernels.score(jnp.ones((1, 2)), jnp.ones((11, 2)), k=k)


def test_sampling_without_a_position():
  with pytest.raises(ValueError, match="sampling and position both"):
    pallas_kernels.score(
      jnp.ones((1, 2)), jnp.ones((11, 2)), sampling=_settings(1)
    )


def test_a_named_backend_is_not_replaced():
  half = jnp.ones((1, 2), jnp.float16)
  weight = jnp.ones((11, 2), jnp.float16)
  assert pallas_kernels.score(half, weight).ids.tolist() == [[0]]
  with pytest.raises(ValueError, match="the dtype is float16; it takes"):
    pallas_kernels.score(half, weight, implementation="mosaic_tpu")
  with pytest.raises(ValueError, match="implementation is 'triton'"):
    pallas_kernels.score(half, weight, implementation="triton")


def test_lowers_for_every_platform():
  shapes = [
    jax.ShapeDtypeStruct((3, 128), jnp.bfloat16),
    jax.ShapeDtypeStruct((10_007, 128), jnp.bfloat16),
    jax.ShapeDtypeStruct((3,), jnp.int32),
  ]

  def run(hidden, weight, position):
    return pallas_kernels.score(
      hidden, weight, k=4, sampling=_settings(3), position=position
    )

  traced = jax.jit(run).trace(*shapes)
  for platform in ("cpu", "cuda", "tpu"):
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert ("tpu_custom_call" in text) == (platform == "tpu")
    assert "tensor<3x10007xf32>" not in text
  assert _limits.limits("score", "mosaic_tpu").platform == "tpu"
