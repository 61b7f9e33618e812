"""A target that ldjax knows nothing of, and the law of what it emits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ldjax import decoding, memory, sampling, testing

V = 8
BATCH = 300


class Bigram(nnx.Module):
  """Logits that depend on the last token only: no attention, no ldjax."""

  def __init__(self, rngs):
    self.table = nnx.Embed(V, V, rngs=rngs)

  def __call__(self, tokens):
    return 4.0 * self.table(jnp.clip(tokens, 0, V - 1))


_graphdef, _state = nnx.split(Bigram(nnx.Rngs(5)))
PARAMS = nnx.to_pure_dict(_state)


def _forward(params, tokens, positions, parents, view):
  del positions, parents
  hidden = nnx.merge(_graphdef, params)(tokens)
  # It needs no keys, but the cache's shape must be answered.
  nothing = jnp.zeros((*tokens.shape, 1, 2), view.pages[0].dtype)
  return decoding.TargetOutput(hidden, hidden, (nothing,))


TARGET = decoding.TargetFn(
  _forward, lambda params, hidden: decoding.Scores(hidden)
)


def _init_cache(batch):
  return memory.PagedKVCache.create(
    batch=batch,
    max_len=420,
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
    page_size=60,
  )


DRAFT = testing.random_tree_draft(16, 3, V)
DECODER = decoding.speculative(TARGET, DRAFT, _init_cache, max_len=420, chunk=1)


@functools.cache
def _run():
  return (
    jax.jit(DECODER.init),
    jax.jit(functools.partial(decoding.decode, DECODER), donate_argnums=1),
  )


def _texts(params, count, **setting):
  init, run = _run()
  state = init(
    decoding.DecoderParams(params),
    jnp.full((BATCH, 1), 3),
    jnp.ones((BATCH,), jnp.int32),
    sampling=sampling.make_sampling(BATCH, seed=range_list(BATCH), **setting),
    max_new_tokens=jnp.full((BATCH,), count),
  )
  state = run(decoding.DecoderParams(params), state)
  # Trees of sixteen nodes over eight tokens guess right often.
  mean = float(state.emitted.sum() / state.rounds.sum())
  return np.asarray(state.tokens)[:, : count + 1], mean


def range_list(count):
  return list(range(count))


def _law(logits, temperature=1.0, top_k=0, top_p=1.0):
  """Temperature, then top-k, then top-p of what is left, by sorting."""
  logits = logits.astype(np.float64) / temperature
  order = np.argsort(-logits)
  probability = np.exp(logits[order] - logits.max())
  probability[top_k or V :] = 0
  probability /= probability.sum()
  probability[np.cumsum(probability) - probability >= top_p] = 0
  law = np.zeros(V)
  law[order] = probability / probability.sum()
  return law


@pytest.mark.slow
@pytest.mark.parametrize(
  "setting",
  [
    {"temperature": 1.0},
    {"temperature": 2.0},
    {"temperature": 0.5, "top_k": 2},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 2.0, "top_k": 5, "top_p": 0.8},
  ],
  ids=str,
)
def test_emitted_tokens_follow_the_targets_law(setting):
  # EAGLE#329, lattice#388: 300 rows of 400 tokens under a tree draft.
  text, mean = _texts(PARAMS, 400, **setting)
  assert mean > 1.3
  table = 4.0 * np.asarray(PARAMS["table"]["embedding"])
  law = np.stack([_law(row, **setting) for row in table])
  pairs = np.zeros((V, V))
  np.add.at(pairs, (text[:, :-1].ravel(), text[:, 1:].ravel()), 1)
  assert pairs.sum() == BATCH * 400
  expected = pairs.sum(1, keepdims=True) * law
  # Nothing outside the truncated support, ever.
  assert (pairs[expected == 0] == 0).all()
  # Of pairs (64 cells): about 0.4 * sqrt(64 / 120000) = 0.009 by chance.
  assert 0.5 * np.abs(pairs - expected).sum() / pairs.sum() < 0.02
  marginal = np.abs(pairs.sum(0) - expected.sum(0)).sum() / pairs.sum()
  assert 0.5 * marginal < 0.01


@pytest.mark.slow
def test_every_token_of_the_support_appears():
  # mistral.rs#2424: the speculative path returned the argmax. 300 seeds, four
  # tokens of which the least likely has probability 0.1.
  row = np.full((V,), -50.0, np.float32)
  row[[1, 4, 6, 7]] = np.log([0.4, 0.3, 0.2, 0.1])
  params = {"table": {"embedding": jnp.asarray(np.tile(row / 4.0, (V, 1)))}}
  text, mean = _texts(params, 6, temperature=1.0)
  assert mean > 1.1
  for column in text[:, 1:].T:  # prefill's token, and those of every round
    tokens, counts = np.unique(column, return_counts=True)
    assert tokens.tolist() == [1, 4, 6, 7]
    # Five standard deviations of a binomial count.
    chance = np.array([0.4, 0.3, 0.2, 0.1])
    deviation = np.sqrt(BATCH * chance * (1 - chance))
    assert (np.abs(counts - BATCH * chance) < 5 * deviation).all()


def test_greedy_follows_the_argmax():
  text, _ = _texts(PARAMS, 30)
  best = np.asarray(PARAMS["table"]["embedding"]).argmax(-1)
  want = [3]
  for _ in range(30):
    want.append(int(best[want[-1]]))
  assert (text == want).all()
