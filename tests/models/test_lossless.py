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
  prompt = _PROMPTS[0]
  plain, _ = testing.decode_tokens(
    decoding.autoregressive(target, init_cache, max_len=_MAX_LEN),
    decoding.DecoderParams(params),
    [prompt],
    max_new_tokens=24,
  )
  script = np.zeros((1, _MAX_LEN), np.int32)
  script[0, : len(prompt) + 24] = [*prompt, *plain[0]]
  got, state = testing.decode_tokens(
    decoding.speculative(
      target, testing.scripted_draft(7), init_cache, max_len=_MAX_LEN
    ),
    decoding.DecoderParams(params, jnp.asarray(script)),
    [prompt],
    max_new_tokens=24,
  )
  assert got == plain
  # The first token comes with the prompt, the other 23 by eights.
  assert int(state.rounds[0]) == 1 + 3
