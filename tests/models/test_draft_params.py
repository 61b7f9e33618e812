"""Parameters of drafts: where they begin, what is borrowed, what is trained."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldjax import models, testing

W, V, E = 11, 31, 24
_IDS = np.array([30, 0, 7, 3, 29, 11, 5, 2, 17, 13, 19])
_TRIMMED = {"vocab_size": W, "target_vocab_size": V}
_MEDUSA = models.MedusaConfig(
  num_heads=2, num_layers=1, hidden_size=E, **_TRIMMED
)
_HYDRA = models.HydraConfig(
  num_heads=2, num_layers=1, target_size=E, hidden_size=7, **_TRIMMED
)
_RECURRENT = models.RecurrentConfig(
  depth=2,
  num_layers=1,
  target_size=E,
  hidden_size=7,
  intermediate_size=5,
  **_TRIMMED,
)
_EAGLE = models.EagleConfig(
  depth=2,
  hidden_size=E,
  intermediate_size=40,
  num_heads=3,
  num_kv_heads=1,
  head_dim=8,
  **_TRIMMED,
)
_ALL = [_MEDUSA, _HYDRA, _RECURRENT, _EAGLE]
_NAMES = [config.kind for config in _ALL]


@pytest.fixture(scope="module")
def target():
  return testing.tiny_model(vocab_size=V).params


def _init(config, seed=0, **options):
  if config.target_vocab_size is not None:
    options.setdefault("token_ids", _IDS)
  return models.init_draft(config, jax.random.key(seed), **options)


@pytest.mark.parametrize("config", _ALL, ids=_NAMES)
def test_fresh_parameters_have_the_stored_shapes(config):
  params = _init(config, dtype=jnp.bfloat16)
  shapes = jax.tree.map(lambda x: (x.shape, x.dtype), params)
  wanted = models.abstract_draft(config, jnp.bfloat16)
  assert shapes == jax.tree.map(lambda x: (x.shape, x.dtype), wanted)
  assert "embed" not in params
  np.testing.assert_array_equal(params["token_ids"], _IDS)
  assert params["token_ids"].dtype == jnp.int32
  again, other = (_init(config, seed, dtype=jnp.bfloat16) for seed in (0, 1))
  jax.tree.map(np.testing.assert_array_equal, again, params)
  same = jax.tree.map(lambda x, y: bool((x == y).all()), other, params)
  assert not all(jax.tree.leaves(same))


@pytest.mark.parametrize("rank", [None, 3])
@pytest.mark.parametrize("config", _ALL[1:], ids=_NAMES[1:])
def test_training_begins_with_all_tokens_alike(target, config, rank):
  config = dataclasses.replace(config, output_rank=rank)
  fn, _ = models.functionalize_draft(config, max_len=8)
  params = models.borrow(config, _init(config), target)
  tokens = jnp.array([[1, 2, 3, 4, 5]], jnp.int32)
  features = jnp.asarray(
    np.random.default_rng(0).normal(size=(1, 5, E)), jnp.float32
  )
  states = fn.unroll(params, features, tokens)
  assert np.abs(states).max() > 0.1
  np.testing.assert_array_equal(fn.score(params, states), 0)


def test_medusa_heads_begin_as_the_target(target):
  # A head then says what the target would say of the same feature.
  params = _init(_MEDUSA, target_params=target)
  fn, _ = models.functionalize_draft(_MEDUSA)
  feature = jnp.asarray(
    np.random.default_rng(0).normal(size=(1, 1, E)), jnp.float32
  )
  tokens = jnp.zeros((1, 1), jnp.int32)
  got = fn.score(params, fn.unroll(params, feature, tokens))
  want = np.asarray(feature) @ np.asarray(target["lm_head"]["weight"])[_IDS].T
  for head in range(2):
    np.testing.assert_allclose(got[:, :, head], want, rtol=0, atol=1e-5)
  one, two = (params["heads"][i]["lm_head"]["weight"] for i in range(2))
  assert one is not two


def test_an_eagle_layer_begins_as_the_targets_last(target):
  params = _init(_EAGLE, dtype=jnp.bfloat16, target_params=target)
  jax.tree.map(
    lambda got, want: np.testing.assert_array_equal(
      got, want.astype(jnp.bfloat16)
    ),
    params["layer"],
    target["layers"][1],
  )
  with pytest.raises(ValueError, match="last layer has other parameters"):
    _init(dataclasses.replace(_EAGLE, head_dim=6), target_params=target)


@pytest.mark.parametrize("config", _ALL, ids=_NAMES)
def test_borrowed_parts_are_the_targets_own(target, config):
  own = _init(config)
  params = models.borrow(config, own, target)
  embed = target["embed_tokens"]["weight"]
  if config.kind == "medusa":
    assert params == own
  else:
    assert params["embed"]["weight"] is embed
  # Whole, the output matrix is no copy either; trimmed, its rows are.
  shared = dataclasses.replace(config, shared_output=True)
  params = models.borrow(shared, _init(shared), target)
  matrix = target["lm_head"]["weight"]
  np.testing.assert_array_equal(params["output"]["weight"], matrix[_IDS])
  whole = dataclasses.replace(shared, vocab_size=V, target_vocab_size=None)
  params = models.borrow(whole, _init(whole), target)
  assert params["output"]["weight"] is matrix
  _, wanted = models.functionalize_draft(whole, max_len=8)
  assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, wanted)
  tied = {key: value for key, value in target.items() if key != "lm_head"}
  params = models.borrow(whole, _init(whole), tied)
  assert params["output"]["weight"] is embed


def test_a_target_of_other_sizes_lends_nothing(target):
  for change in ({"target_vocab_size": 30}, {"target_size": 23}):
    config = dataclasses.replace(_RECURRENT, **change)
    with pytest.raises(ValueError, match=r"\(31, 24\).*belongs to another"):
      models.borrow(config, {}, target)
    ids = {"token_ids": np.arange(W)}
    with pytest.raises(ValueError, match=r"\(31, 24\).*belongs to another"):
      _init(config, target_params=target, **ids)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("config", _ALL, ids=_NAMES)
def test_parting_and_joining(target, config, shared):
  config = dataclasses.replace(config, shared_output=shared)
  own = _init(config)
  params = models.borrow(config, own, target)
  trained, frozen = models.partition_draft(config, params)
  joined = models.combine_draft(trained, frozen)
  assert jax.tree.structure(joined) == jax.tree.structure(params)
  for one, two in zip(
    jax.tree.leaves(joined), jax.tree.leaves(params), strict=True
  ):
    assert one is two
  assert {leaf.dtype for leaf in jax.tree.leaves(trained)} == {
    jnp.dtype(jnp.float32)
  }
  names = {"token_ids"} | ({"output"} if shared else set())
  assert set(frozen) == names | (
    set() if config.kind == "medusa" else {"embed"}
  )
  assert set(models.partition_draft(config, own)[1]) == {"token_ids"}


def test_parting_names_what_is_missing():
  params = _init(_RECURRENT)
  del params["blocks"][0]["norm"]
  with pytest.raises(ValueError, match=r"params lack blocks\.0\.norm"):
    models.partition_draft(_RECURRENT, params)


@pytest.mark.parametrize(
  ("ids", "message"),
  [
    (_IDS[:-1], r"int64 of shape \(10,\); vocab_size asks for 11"),
    (_IDS[None], r"shape \(1, 11\)"),
    (_IDS.astype(np.float32), "float32 of shape"),
    (np.where(_IDS == 7, 31, _IDS), "holds 31; the target's ids are 0 to 30"),
    (np.where(_IDS == 7, -1, _IDS), "holds -1; the target's ids are 0 to 30"),
    (np.where(_IDS == 7, 30, _IDS), "holds 30 more than once"),
  ],
)
def test_a_map_of_ids_that_is_none(ids, message):
  with pytest.raises(ValueError, match=message):
    _init(_RECURRENT, token_ids=ids)


def test_a_map_belongs_to_a_trimmed_vocabulary():
  whole = dataclasses.replace(_HYDRA, target_vocab_size=None)
  with pytest.raises(ValueError, match=r"belong together.*is None"):
    _init(whole, token_ids=_IDS)
  with pytest.raises(ValueError, match=r"belong together.*is 31"):
    models.init_draft(_HYDRA, jax.random.key(0))


@pytest.mark.parametrize(
  ("config", "changes", "message"),
  [
    (_MEDUSA, {"vocab_size": 0}, "vocab_size is 0; .* at least 1"),
    (_MEDUSA, {"target_vocab_size": 10}, "vocab_size is 11.*is 10"),
    (_HYDRA, {"num_heads": 0}, "num_heads is 0; .* at least 1"),
    (_HYDRA, {"num_layers": -1}, "num_layers is -1; .* at least 0"),
    (_HYDRA, {"target_size": 0}, "target_size is 0"),
    (_HYDRA, {"output_rank": 8}, "output_rank is 8; .*can be 1 to 7"),
    (_RECURRENT, {"output_rank": 0}, "output_rank is 0; .*can be 1 to 7"),
    (
      _RECURRENT,
      {"output_rank": 2, "shared_output": True},
      "output_rank is 2 and shared_output is set",
    ),
    (_RECURRENT, {"depth": 0}, "depth is 0; .* at least 1"),
    (_RECURRENT, {"intermediate_size": 0}, "intermediate_size is 0"),
    (_RECURRENT, {"rms_norm_eps": 0.0}, r"rms_norm_eps is 0\.0; .* above 0"),
    (_RECURRENT, {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    (_EAGLE, {"depth": 0}, "depth is 0; .* at least 1"),
    (_EAGLE, {"num_kv_heads": 2}, r"num_heads \(3\) .* \(2\)"),
    (_EAGLE, {"head_dim": 7}, "head_dim is 7; .* even"),
    (_EAGLE, {"hidden_size": 0}, "hidden_size is 0"),
  ],
)
def test_refused_sizes(config, changes, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(config, **changes)
