"""Splitting: plain dicts, and one function a configuration."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ldjax import memory, models, testing

_HEADS = models.MedusaConfig(
  num_heads=3, num_layers=2, hidden_size=22, vocab_size=37
)


def _target(config, seed=0, **options):
  return models.functionalize(
    models.Transformer(config, rngs=nnx.Rngs(seed), **options)
  )


@pytest.mark.slow
def test_one_function_a_configuration(config):
  def function(config=config, **options):
    return models.functionalize(models.abstract_model(config, **options))[0]

  target = function()
  assert _target(config, seed=1)[0] is target
  assert function(dataclasses.replace(config)) is target
  # Arrays carry their dtype; the function is the same and jit tells apart.
  assert function(dtype=jnp.bfloat16) is target
  for other in (
    dataclasses.replace(config, rope_theta=5.0),
    dataclasses.replace(config, tie_word_embeddings=True),
  ):
    assert function(other) is not target
  features = function(feature_layers=(1,))
  assert features is not target
  assert function(feature_layers=(0,)) is not features
  assert function(feature_layers=[1]) is features


def _is_plain(tree):
  if type(tree) is dict:
    return all(_is_plain(value) for value in tree.values())
  return isinstance(tree, jax.Array | jax.ShapeDtypeStruct)


def test_parameters_are_plain_dicts(config):
  _, params = _target(dataclasses.replace(config, qkv_bias=True))
  assert _is_plain(params)
  assert sorted(params) == ["embed_tokens", "layers", "lm_head", "norm"]
  assert sorted(params["layers"]) == [0, 1]
  attention = params["layers"][0]["self_attn"]
  assert sorted(attention) == ["k_proj", "o_proj", "q_proj", "v_proj"]
  assert sorted(attention["q_proj"]) == ["bias", "weight"]
  assert attention["q_proj"]["weight"].shape == (36, 22)
  assert attention["k_proj"]["weight"].shape == (12, 22)
  tied = _target(dataclasses.replace(config, tie_word_embeddings=True))[1]
  assert "lm_head" not in tied


def test_abstract_parameters_have_the_same_shapes(config):
  config = dataclasses.replace(config, tie_word_embeddings=True, mlp_bias=True)
  abstract = models.abstract_params(config, jnp.bfloat16)
  assert _is_plain(abstract)
  real = _target(config, dtype=jnp.bfloat16)[1]
  want = jax.tree.map(lambda x: (x.shape, x.dtype), real)
  assert jax.tree.map(lambda x: (x.shape, x.dtype), abstract) == want


def test_a_second_model_of_the_shape_compiles_nothing(config):
  cache = memory.DenseKVCache.create(
    batch=1, max_len=8, num_layers=2, num_kv_heads=2, head_dim=6
  )
  block = np.array([[0, 1]], np.int32)
  parents = np.array([[-1, 0]], np.int32)
  (target, one), (again, two) = _target(config, seed=3), _target(config, seed=4)
  run = jax.jit(target.forward)
  first = run(one, block, block, parents, cache.view()).hidden
  args = (two, block, block, parents, cache.view())
  with testing.assert_no_recompile():
    # Another jit of the same function: the cache is keyed by the function.
    second = jax.jit(again.forward)(*args).hidden.block_until_ready()
  assert not np.array_equal(first, second)


def test_heads_are_split_alike():
  def split(config=_HEADS, seed=0, dtype=jnp.float32):
    return models.functionalize_draft(
      models.MedusaHeads(config, dtype=dtype, rngs=nnx.Rngs(seed))
    )

  fn, params = split()
  assert _is_plain(params)
  assert split(seed=1)[0] is fn
  # Only a draft with a cache of its own has a length.
  assert models.functionalize_draft(_HEADS, max_len=8)[0] is fn
  assert (fn.depth, fn.vocab_size, fn.feature_size) == (3, 37, 22)
  assert fn.token_ids(params) is None
  assert fn.init(params, 5).dtype == jnp.float32
  narrow, shapes = models.functionalize_draft(_HEADS, jnp.bfloat16)
  assert narrow is split(dtype=jnp.bfloat16)[0]
  assert narrow is not fn
  assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {
    jnp.dtype(jnp.bfloat16)
  }
  assert narrow.init(params, 5).dtype == jnp.bfloat16
  shared = dataclasses.replace(_HEADS, shared_output=True)
  assert split(shared)[0] is not fn


def test_heads_of_another_dtype_are_refused():
  heads = models.MedusaHeads(_HEADS, rngs=nnx.Rngs(0))
  with pytest.raises(ValueError, match=r"dtype is bfloat16.* in float32"):
    models.functionalize_draft(heads, jnp.bfloat16)
  assert models.functionalize_draft(heads, jnp.float32)[0].depth == 3


def _all_logits(fn, params, feature):
  """[B, C, V] of one round of heads that see no token."""

  @jax.jit
  def run(params, feature):
    batch = feature.shape[0]
    carry, logits = fn.begin(params, feature, jnp.zeros((batch,), jnp.int32))
    found = [logits]
    for d in range(1, fn.depth):
      node = jnp.full((batch, 1), d - 1, jnp.int32)
      carry, logits = fn.extend(params, feature, carry, node, node)
      found.append(logits)
    return jnp.concatenate(found, axis=1)

  return run(params, feature)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("num_layers", [0, 1, 2])
def test_heads_equal_numpy(numpy_heads, shared, num_layers):
  config = dataclasses.replace(
    _HEADS, shared_output=shared, num_layers=num_layers
  )
  fn, params = models.functionalize_draft(
    models.MedusaHeads(config, rngs=nnx.Rngs(5))
  )
  rng = np.random.default_rng(5)
  for head in params.get("heads", {}).values():
    for block in head.get("blocks", {}).values():
      block["bias"] = jnp.asarray(rng.normal(size=22), jnp.float32)
  feature = rng.normal(size=(5, 22)).astype(np.float32)
  got = _all_logits(fn, params, feature)
  assert (got.shape, got.dtype) == ((5, 3, 37), jnp.float32)
  # Three sums of 22 terms of unit size, 2^-24 each.
  np.testing.assert_allclose(
    got, numpy_heads(params, feature, 3), rtol=0, atol=1e-5
  )


def test_bfloat16_heads_score_in_float32(numpy_heads):
  fn, params = models.functionalize_draft(
    models.MedusaHeads(_HEADS, dtype=jnp.bfloat16, rngs=nnx.Rngs(6))
  )
  feature = jnp.asarray(
    np.random.default_rng(6).normal(size=(5, 22)).astype(np.float32)
  ).astype(jnp.bfloat16)
  got = _all_logits(fn, params, feature)
  assert got.dtype == jnp.float32
  want = numpy_heads(params, np.asarray(feature).astype(np.float64), 3)
  # Six roundings of 2^-9 on the way, of numbers of size 4 at most.
  np.testing.assert_allclose(got, want, rtol=0, atol=6 * 2.0**-9 * 4)
  # Not rounded to bf16 at the end.
  assert not np.array_equal(got, got.astype(jnp.bfloat16).astype(np.float32))
