"""Published drafts whose weights, set by hand, say what the target will say.

The target's layers add nothing and its embedding is the unit matrix: its next
token is a permutation of the current one, whatever came before.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldjax import decoding, memory, models

V = E = 16
D = 3
NEXT = np.random.default_rng(0).permutation(V)
TURN = np.zeros((V, E), np.float32)
TURN[NEXT, np.arange(V)] = 20
"""[V, E]: row NEXT[t] is 20 at t."""
TARGET = models.TransformerConfig(
  vocab_size=V,
  hidden_size=E,
  intermediate_size=4,
  num_layers=5,
  num_heads=1,
  num_kv_heads=1,
  head_dim=4,
  max_position_embeddings=256,
)
LAYER = {
  "depth": D,
  "hidden_size": E,
  "intermediate_size": 4,
  "num_heads": 2,
  "num_kv_heads": 2,
  "head_dim": 8,
  "vocab_size": V,
}
UNIT, NONE = np.eye(E), np.zeros((E, E))


def zeros(shapes):
  """Parameters of zeros, norms of ones."""
  return jax.tree_util.tree_map_with_path(
    lambda path, like: (jnp.ones if "norm" in str(path[-2]) else jnp.zeros)(
      like.shape, like.dtype
    ),
    shapes,
  )


def put(params, path, matrix):
  *outer, last = path.split(".")
  where = functools.reduce(
    lambda node, key: node[int(key) if key.isdecimal() else key], outer, params
  )
  assert where[last].shape == np.shape(matrix), path
  where[last] = jnp.asarray(matrix, jnp.float32)


def eagle():
  """The entry's token goes through as it is."""
  config = models.EagleConfig(**LAYER, shared_output=True, normed=False)
  return config, {"fc.weight": np.concatenate([UNIT, NONE], axis=1)}


def eagle3():
  """Attention brings the entry's own token, and takes the feature away."""
  # Constant queries and keys: their product is greatest at distance 0, and
  # e^-20 of it at every other one.
  both = np.concatenate([np.full((E, E), 13 / E**0.5), NONE], axis=1)
  # A normed row of the embedding is E ** 0.5 long, a feature 10.
  value = np.concatenate([UNIT, -UNIT], axis=1) * 10 / E**0.5
  return models.Eagle3Config(**LAYER), {
    "fc.weight": np.concatenate([10 * UNIT, NONE, NONE], axis=1),
    "layer.self_attn.q_proj.weight": both,
    "layer.self_attn.k_proj.weight": both,
    "layer.self_attn.v_proj.weight": value,
    "layer.self_attn.o_proj.weight": UNIT,
    "output.weight": TURN,
  }


def medusa():
  """The head of depth d turns the feature's token d + 2 times."""
  config = models.MedusaConfig(
    num_heads=D, num_layers=1, hidden_size=E, vocab_size=V
  )
  weights, turned = {}, NEXT
  for d in range(D):
    turned = NEXT[turned]
    matrix = np.zeros((V, E), np.float32)
    matrix[turned, np.arange(V)] = 20
    weights[f"heads.{d}.lm_head.weight"] = matrix
  return config, weights


def hydra():
  """Each head reads the last token."""
  config = models.HydraMlpConfig(
    num_heads=D, num_layers=2, hidden_size=E, vocab_size=V
  )
  weights = {}
  for d in range(D):
    last = np.concatenate([NONE] * (d + 1) + [UNIT], axis=1)
    weights[f"heads.{d}.blocks.0.res_connection.weight"] = last
    weights[f"heads.{d}.lm_head.weight"] = TURN
  return config, weights


@pytest.mark.parametrize(
  "make",
  [
    eagle3,
    pytest.param(eagle, marks=pytest.mark.slow),
    pytest.param(hydra, marks=pytest.mark.slow),
    pytest.param(medusa, marks=pytest.mark.slow),
  ],
)
def test_right_for_ever(toy, make):
  # vllm#14649: one stale entry in the draft's cache would cost acceptance.
  config, weights = make()
  layers = models.feature_layers(config, TARGET.num_layers)
  assert layers == ((2, 2, 2) if make is eagle3 else ())
  target, shapes = models.functionalize(
    models.abstract_model(TARGET, feature_layers=layers)
  )
  params = zeros(shapes)
  put(params, "embed_tokens.weight", UNIT)
  put(params, "lm_head.weight", TURN)
  own = zeros(models.abstract_draft(config))
  for path, matrix in weights.items():
    put(own, path, matrix)

  max_len = 9 + 50 * (D + 1) + D + 2
  heads, _ = models.functionalize_draft(config, max_len=max_len)
  draft = decoding.static_tree(heads, decoding.TokenTree.chain(D))
  decoder = decoding.speculative(
    target,
    draft,
    lambda batch: memory.PagedKVCache.create(
      batch=batch, max_len=max_len, num_layers=5, num_kv_heads=1, head_dim=4
    ),
    max_len=max_len,
    chunk=4,
  )
  params = decoding.DecoderParams(params, models.borrow(config, own, params))
  # A prompt of one token, of a whole chunk and of several.
  prompts = ((3,), (1, 2, 3, 4), (5, 0, 1, 7, 15, 2, 2, 9, 4))
  state = toy.init(decoder, params, prompts, max_new_tokens=201)
  state, rounds = toy.trace(decoder, params, state, 50)
  assert (rounds.count == D + 1).all()
  for prompt, text in zip(prompts, toy.texts(state), strict=True):
    token, want = prompt[-1], []
    for _ in range(201):
      token = int(NEXT[token])
      want.append(token)
    assert text == want
