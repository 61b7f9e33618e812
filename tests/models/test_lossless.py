"""Law 1 for what distinguishes the families: no draft changes a token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ldjax import assemble, decoding, models, sampling, testing

# Longer than the windows, shorter, and of one token.
_PROMPTS = ([1, 2, 3, 1, 2, 3, 1, 2, 9, 4, 4], [30, 0], [7])
_MAX_LEN = 40

_FAMILIES = {
  "Mistral": {"windows": (4, 4)},
  "Qwen2": {"qkv_bias": True, "windows": (None, 3)},
  "Qwen3": {"qk_norm": True, "head_dim": 8, "tie_word_embeddings": True},
  "SmolLM3": {"nope_layers": (1,), "tie_word_embeddings": True},
  "everything at once": {
    "qkv_bias": True,
    "qk_norm": True,
    "nope_layers": (1,),
    "windows": (1, 5),
  },
  "Gemma 1": {
    "norm_offset": 1.0,
    "embed_scale": 22**0.5,
    "activation": "gelu_tanh",
    "tie_word_embeddings": True,
  },
  "Gemma 2": {
    "norm_offset": 1.0,
    "embed_scale": 3.0,
    "activation": "gelu_tanh",
    "output_norms": True,
    "tie_word_embeddings": True,
    "query_scale": 0.6,
    "attn_soft_cap": 2.0,
    "final_soft_cap": 5.0,
    "windows": (4, None),
  },
  "Gemma 3": {
    "norm_offset": 1.0,
    "activation": "gelu_tanh",
    "output_norms": True,
    "qk_norm": True,
    "windows": (4, None),
    "rope_theta": 300.0,
    "rope_local_theta": 20.0,
    "rope_scaling": models.LinearRopeScaling(factor=8.0),
  },
  "Phi-3": {
    "windows": (6, 6),
    "rope_scaling": models.RopeFactors(
      factors=(1.1, 1.5, 2.5), attention_factor=1.3
    ),
  },
  "GPT-2": {
    "learned_positions": True,
    "norm": "layer",
    "activation": "gelu_tanh",
    "mlp_gate": False,
    "qkv_bias": True,
    "o_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": True,
  },
}


@pytest.fixture(
  scope="module",
  params=[pytest.param(name, marks=pytest.mark.slow) for name in _FAMILIES],
)
def family(request, config):
  config = dataclasses.replace(config, **_FAMILIES[request.param])
  target, params = models.functionalize(
    models.Transformer(config, rngs=nnx.Rngs(0))
  )
  rng = np.random.default_rng(0)
  # Norms of one and biases of zero would hide what happens to them.
  params = jax.tree.map(
    lambda x: x + jnp.asarray(0.2 * rng.normal(size=x.shape), x.dtype), params
  )
  init_cache = assemble.cache_factory(config, max_len=_MAX_LEN, page_size=4)
  return config, target, params, init_cache


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
  "kind",
  ["random trees", "n-gram"],
)
def test_no_draft_changes_a_token(family, kind, temperature):
  config, target, params, init_cache = family
  # Trees and chains deeper than any of the windows.
  draft = (
    testing.random_tree_draft(17, 7, config.vocab_size)
    if kind == "random trees"
    else decoding.ngram(7)
  )
  testing.assert_lossless(
    target,
    params,
    draft,
    (),
    init_cache,
    _PROMPTS,
    max_len=_MAX_LEN,
    max_new_tokens=24,
    sampling=sampling.make_sampling(3, temperature=temperature, seed=[1, 2, 3]),
  )


@pytest.mark.slow
def test_a_perfect_draft_is_accepted_under_windows(family):
  """The target's own text, eight tokens a round: nothing is refused."""
  _, target, params, init_cache = family
  plain, _ = testing.decode_tokens(
    decoding.autoregressive(target, init_cache, max_len=_MAX_LEN),
    decoding.DecoderParams(params),
    _PROMPTS,
    max_new_tokens=24,
  )
  script = np.zeros((len(_PROMPTS), _MAX_LEN), np.int32)
  for row, (prompt, text) in enumerate(zip(_PROMPTS, plain, strict=True)):
    script[row, : len(prompt) + 24] = [*prompt, *text]
  got, state = testing.decode_tokens(
    decoding.speculative(
      target, testing.scripted_draft(7), init_cache, max_len=_MAX_LEN
    ),
    decoding.DecoderParams(params, jnp.asarray(script)),
    _PROMPTS,
    max_new_tokens=24,
  )
  assert got == plain
  # The first token comes with the prompt, the other 23 by eights.
  assert state.rounds.tolist() == [1 + 3] * len(_PROMPTS)
