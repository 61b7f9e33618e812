"""Draws made without logits against the logits themselves."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldjax import decoding, pallas_kernels, sampling, testing

B, NEW = 4, 12
TINY = testing.tiny_model()
PROMPTS = testing.pad_prompts([[1, 2, 3], [7, 7], [9, 4, 9, 4, 9], [30]])
DRAFT = testing.random_tree_draft(7, 3, 31)
# Added to all logits: where they are asked for nothing is emitted.
BLIND = {"logits": jnp.float32(jnp.nan), "draws": jnp.int32(0)}
SEEING = {"logits": jnp.float32(0.0), "draws": jnp.int32(0)}
# Added to all drawn tokens, which in row 2 are not exact then.
WRONG = {"logits": jnp.float32(0.0), "draws": jnp.int32(1)}


def _forward(params, *arrays):
  return TINY.target.forward(params[0], *arrays)


def _score(params, hidden):
  logits = TINY.target.score(params[0], hidden).logits
  return decoding.Scores(logits + params[1]["logits"])


def _draw(params, hidden, given, position, wanted):
  draws = TINY.target.draw(params[0], hidden, given, position, wanted)
  shift = params[1]["draws"]
  wrong = (shift > 0) & (jnp.arange(B)[:, None] == 2)
  return draws._replace(
    tokens=(draws.tokens + shift) % 31, exact=draws.exact & ~wrong
  )


BY_DRAWS = decoding.TargetFn(_forward, _score, _draw, ("cpu",))


def _decoder(target):
  return decoding.speculative(
    target, DRAFT, TINY.init_cache, max_len=TINY.max_len
  )


_trace = jax.jit(decoding.trace, static_argnums=(0, 3))
_init = jax.jit(functools.partial(_decoder(TINY.target).init, stop_ids=[5]))


def _run(added=None, *, limit=(NEW,) * B, broken=1.0, **settings):
  """The state after some rounds, and the rounds.

  By logits where `added` is None. The prompts are read by logits in any case.
  """
  weights = decoding.DecoderParams(TINY.params)
  state = _init(
    weights,
    *PROMPTS,
    sampling=sampling.make_sampling(B, seed=list(range(B)), **settings),
    max_new_tokens=jnp.array(limit),
  )
  params = jax.tree.map(lambda x: x * broken, TINY.params)
  if added is None:
    decoder, weights = _decoder(TINY.target), decoding.DecoderParams(params)
  else:
    decoder = _decoder(BY_DRAWS)
    weights = decoding.DecoderParams((params, added))
  return _trace(decoder, weights, state, NEW)


def _same_text(one, other):
  np.testing.assert_array_equal(one[0].tokens, other[0].tokens)
  np.testing.assert_array_equal(one[0].status, other[0].status)


def test_the_text_is_that_of_the_logits():
  settings = {
    "temperature": [0.0, 1.3, 0.7, 2.0],
    "top_k": [None, None, 3, 30],
    "logprobs": True,
  }
  by_logits = _run(**settings)
  by_draws = _run(BLIND, **settings)
  _same_text(by_draws, by_logits)
  assert int(by_draws[0].emitted.sum()) > 2 * B
  np.testing.assert_array_equal(by_draws[1].path, by_logits[1].path)
  # A log-sum-exp of 31 numbers in another order.
  np.testing.assert_allclose(
    by_draws[1].logprobs, by_logits[1].logprobs, rtol=0, atol=1e-5
  )


@pytest.mark.parametrize(
  "settings",
  [
    {"temperature": 1.0, "top_p": [1.0, 1.0, 0.6, 1.0]},
    {"temperature": 1.0, "min_p": [0.0, 0.0, 0.0, 0.1]},
    {"repetition_penalty": [1.0, 1.5, 1.0, 1.0]},
    {"banned_ids": [[], [], [], [3]]},
    {"min_new_tokens": [0, 0, 2, 0]},
  ],
)
def test_one_row_that_needs_all_logits_takes_the_batch_there(settings):
  _same_text(_run(SEEING, **settings), _run(**settings))
  blind, _ = _run(BLIND, **settings)
  assert blind.emitted.tolist() == [1] * B


def test_only_rows_that_draw_are_asked_what_they_need():
  settings = {
    "limit": (0, NEW, NEW, NEW),
    "temperature": 1.0,
    "top_p": [0.5, 1.0, 1.0, 1.0],  # of a row that has ended
    "min_new_tokens": [0, 0, 1, 0],  # which the prompt's end emitted
  }
  _same_text(_run(BLIND, **settings), _run(**settings))


def test_a_draw_that_is_not_exact_is_not_taken():
  _same_text(_run(WRONG), _run())


def test_logits_that_are_not_finite():
  state, rounds = _run(SEEING, broken=jnp.nan, temperature=0.8)
  assert not np.asarray(state.finite).any()
  assert not np.asarray(rounds.count).any()


def _step_text(target, platform):
  decoder = _decoder(target)
  weights = decoding.DecoderParams(TINY.params)
  state = jax.eval_shape(lambda w: decoder.empty(w, 2), weights)
  step = jax.jit(decoder.step).trace(weights, state)
  return step.lower(lowering_platforms=(platform,)).as_text()


def test_a_cpu_s_program_is_the_one_without_draws():
  found = []
  for target in (TINY.target, TINY.target._replace(draw=None)):
    text = _step_text(target, "cpu")
    operations = collections.Counter(re.findall(r"stablehlo\.(\w+)", text))
    for name in ("case", "return", "constant"):  # one case of one branch
      del operations[name]
    found.append(operations)
  assert found[0] == found[1]
  assert 'kernel_name = "score"' in _step_text(TINY.target, "tpu")


def test_a_tpu_draws_without_logits():
  tiny = testing.tiny_model(vocab_size=331)
  arrays = (
    jnp.zeros((2, 7, tiny.config.hidden_size)),
    sampling.make_sampling(2),
    jnp.zeros((2, 7), jnp.int32),
    jnp.ones((2,), bool),
  )
  draw = jax.jit(tiny.target.draw).trace(tiny.params, *arrays)
  text = draw.lower(lowering_platforms=("tpu",)).as_text()
  assert 'kernel_name = "score"' in text
  assert not re.search(r"tensor<(2x7|14)x331xf32>", text)
  with pallas_kernels.without_kernels():
    assert tiny.target.draw(tiny.params, *arrays) is None
