"""Fused parameters: the same numbers of fewer products, and the same laws."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldjax import assemble, decoding, models, sampling, testing

_TINY = testing.tiny_model()
_FAMILIES = {
  "Qwen2": {"qkv_bias": True},
  "Gemma 3": {
    "norm_offset": 1.0,
    "output_norms": True,
    "qk_norm": True,
    "activation": "gelu_tanh",
  },
  "GPT-2": {
    "norm": "layer",
    "mlp_gate": False,
    "mlp_bias": True,
    "qkv_bias": True,
    "learned_positions": True,
  },
}


def _model(**changes):
  """A configuration with random norms and biases, and its parameters."""
  config = dataclasses.replace(_TINY.config, **changes)
  shapes = models.abstract_params(config)
  rng = np.random.default_rng(0)
  return config, jax.tree.map(
    lambda x: jnp.asarray(0.4 * rng.normal(size=x.shape), x.dtype), shapes
  )


def _forward(config, params):
  target, _ = models.functionalize(models.abstract_model(config))
  init_cache = assemble.cache_factory(config, max_len=8, page_size=4)

  def run(params):
    tokens = jnp.array([[3, 5, 7, 2]], jnp.int32)
    parents = jnp.array([[-1, 0, 0, 1]], jnp.int32)
    positions = jnp.array([[0, 1, 1, 2]], jnp.int32)
    view = init_cache(1).view()
    out = target.forward(params, tokens, positions, parents, view)
    return target.score(params, out.hidden).logits

  return run


def _products(run, params):
  text = str(jax.make_jaxpr(run)(params))
  return text.count("dot_general[")


@pytest.mark.parametrize("family", _FAMILIES)
def test_fused_parameters_give_the_same_logits(family):
  config, params = _model(**_FAMILIES[family])
  fused_config, fused = models.fuse(config, params)
  assert fused_config.fused == models.possible_fusions(config)
  assert models.possible_fusions(fused_config) == ()
  got = _forward(fused_config, fused)
  want = _forward(config, params)
  np.testing.assert_allclose(
    jax.jit(got)(fused), jax.jit(want)(params), rtol=1e-4, atol=1e-4
  )
  # Three products become one and two become one; a product stands in the
  # program once a platform, and once more for a single row.
  saved = 2 + ("gate_up" in fused_config.fused)
  a_product = _products(
    lambda p: models.linear(jnp.ones((4, 24)), p["weight"]),
    params["layers"][0]["self_attn"]["o_proj"],
  )
  assert (
    _products(want, params) - _products(got, fused)
    == saved * a_product * config.num_layers
  )
  # The parameters are those that such a module has.
  assert jax.tree.map(jnp.shape, fused) == jax.tree.map(
    jnp.shape, models.abstract_params(fused_config)
  )


def test_parts_alone_and_refusals():
  config, params = _model()
  for part in models.possible_fusions(config):
    once, some = models.fuse(config, params, [part])
    rest, whole = models.fuse(once, some)
    assert set(rest.fused) == {"qkv", "gate_up", "norms"}
    np.testing.assert_allclose(
      jax.jit(_forward(rest, whole))(whole),
      jax.jit(_forward(config, params))(params),
      rtol=1e-4,
      atol=1e-4,
    )
    with pytest.raises(ValueError, match=f"'{part}' can't be fused"):
      models.fuse(once, some, [part])
  with pytest.raises(ValueError, match="'heads' can't be fused"):
    models.fuse(config, params, ["heads"])
  for changes, match in (
    ({"fused": ("heads",)}, "known are 'qkv'"),
    ({"fused": ("norms",), "norm": "layer"}, "RMS norms"),
    ({"fused": ("gate_up",), "mlp_gate": False}, "has no gate"),
  ):
    with pytest.raises(ValueError, match=match):
      dataclasses.replace(config, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["w8a8", "bfloat16"])
def test_no_draft_changes_a_token(precision):
  config, params = models.fuse(_TINY.config, _TINY.params)
  layers = jax.tree.map(
    lambda x: models.narrow(x, precision) if x.ndim == 2 else x,
    params["layers"],
  )
  params = {**params, "layers": layers}
  target, _ = models.functionalize(models.abstract_model(config))
  testing.assert_lossless(
    target,
    params,
    decoding.ngram(3),
    (),
    _TINY.init_cache,
    [[1, 2, 3, 1, 2, 3, 1, 2], [30, 0]],
    max_len=_TINY.max_len,
    sampling=sampling.make_sampling(2, temperature=[0.0, 1.0], seed=[1, 2]),
  )
