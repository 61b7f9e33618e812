"""Refused shapes, and rotary frequencies against published values."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from ldjax import models
from ldjax.models import _layers


@pytest.mark.parametrize(
  "field",
  [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position_embeddings",
  ],
)
def test_sizes_below_one(config, field):
  for value in (0, -3):
    with pytest.raises(ValueError, match=f"{field} is {value}; .* at least 1"):
      dataclasses.replace(config, **{field: value})


def test_heads_that_do_not_divide(config):
  with pytest.raises(ValueError, match=r"num_heads \(6\) .* \(4\)"):
    dataclasses.replace(config, num_kv_heads=4)
  with pytest.raises(ValueError, match=r"head_dim is 7; .* even"):
    dataclasses.replace(config, head_dim=7)


@pytest.mark.parametrize(
  ("field", "value", "least"),
  [("num_heads", 0, 1), ("num_layers", -1, 0), ("hidden_size", 0, 1)],
)
def test_heads_of_no_size(field, value, least):
  sizes = {"num_heads": 2, "num_layers": 1, "hidden_size": 5, "vocab_size": 7}
  with pytest.raises(ValueError, match=f"{field} is {value}; .* {least}"):
    models.MedusaConfig(**{**sizes, field: value})


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"windows": (4,)}, "windows has 1 entries for 2 layers"),
    ({"windows": (4, 0)}, "windows holds 0"),
    ({"windows": (None, -3)}, "windows holds -3"),
    ({"nope_layers": (2,)}, r"nope_layers is \(2,\); .* layers 0 to 1"),
    ({"nope_layers": (-1,)}, r"nope_layers is \(-1,\)"),
    ({"nope_layers": (1, 0)}, "each to be named once and in order"),
    ({"nope_layers": (0, 0)}, "each to be named once and in order"),
    ({"norm": "batch"}, "norm is 'batch'; it must be one of 'rms', 'layer'"),
    ({"activation": "relu"}, "activation is 'relu'"),
    ({"attn_soft_cap": 0.0}, r"attn_soft_cap is 0\.0; it must be above 0"),
    ({"final_soft_cap": math.inf}, "final_soft_cap is inf"),
    ({"query_scale": -1.0}, r"query_scale is -1\.0"),
    ({"embed_scale": math.nan}, "embed_scale is nan"),
    ({"rope_local_theta": 0.0}, r"rope_local_theta is 0\.0"),
    ({"norm": "layer", "qk_norm": True}, "these belong to 'rms'"),
    ({"norm": "layer", "norm_offset": 1.0}, "these belong to 'rms'"),
    ({"learned_positions": True, "nope_layers": (0,)}, "so leave it out"),
    (
      {"rope_scaling": models.RopeFactors(factors=(1.0, 2.0))},
      "2 factors; head_dim 6 asks for 3",
    ),
    (
      {"rope_scaling": models.RopeFactors(factors=(1.0, 2.0, 0.0))},
      "all above 0",
    ),
  ],
)
def test_layers_that_do_not_fit(config, changes, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(config, **changes)


def test_no_window_has_one_spelling(config):
  assert dataclasses.replace(config, windows=(None, None)) == config
  assert config.window(1) is None
  half = dataclasses.replace(config, windows=(None, 5))
  assert (half.window(0), half.window(1)) == (None, 5)


def test_equal_shapes_are_one_key(config):
  same = dataclasses.replace(config)
  assert same == config
  assert hash(same) == hash(config)
  assert dataclasses.replace(config, rope_theta=5.0) != config


def _llama(config, head_dim, factor):
  return dataclasses.replace(
    config,
    head_dim=head_dim,
    rope_theta=500000.0,
    rope_scaling=models.RopeScaling(
      factor=factor,
      low_freq_factor=1.0,
      high_freq_factor=4.0,
      original_max_position_embeddings=8192,
    ),
  )


def test_frequencies_of_llama_3(config):
  # Llama-3.1-8B and Llama-3.2-1B; values of the published formula.
  large = models.rotary_frequencies(_llama(config, 128, 8.0))
  assert len(large) == 64
  np.testing.assert_allclose(
    large[28:31], [3.21144599e-3, 2.16657076e-3, 1.37189357e-3], rtol=1e-8
  )
  # Short waves stay, long ones stretch by the whole factor.
  assert large[0] == 1.0
  np.testing.assert_allclose(large[20], 500000 ** (-20 / 64), rtol=1e-12)
  np.testing.assert_allclose(large[63], 500000 ** (-63 / 64) / 8, rtol=1e-12)
  small = models.rotary_frequencies(_llama(config, 64, 32.0))
  assert len(small) == 32
  np.testing.assert_allclose(small[15], 1.29054793e-3, rtol=1e-8)
  np.testing.assert_allclose(small[31], 500000 ** (-31 / 32) / 32, rtol=1e-12)


def test_angles_are_exact_at_any_position(config):
  config = dataclasses.replace(config, head_dim=16)
  positions = np.array(
    [[0, 1, 255, 256, 257], [1001, 4099, 8191, 32749, 2**17]]
  )
  cos, sin = _layers.rotary_angles(config, jnp.asarray(positions))
  angle = positions[..., None] * 10000.0 ** (-np.arange(8) / 8)
  # An angle is two fp32 roundings away, 2^-23 of its size, which is the
  # position's for the fastest pair; sines are as good as their angles.
  tolerance = 2.0**-23 * np.maximum(np.abs(angle), 1)
  assert cos.dtype == jnp.float32
  assert (np.abs(cos - np.cos(angle)) <= tolerance).all()
  assert (np.abs(sin - np.sin(angle)) <= tolerance).all()


def test_a_turn_by_hand():
  x = jnp.array([[[[1.0, 2.0, 3.0, 4.0]]]])
  cos = jnp.array([[[0.0, math.cos(math.pi / 6)]]])
  sin = jnp.array([[[1.0, math.sin(math.pi / 6)]]])
  half, root = 0.5, math.sqrt(3) / 2
  want = [-3.0, 2 * root - 4 * half, 1.0, 4 * root + 2 * half]
  np.testing.assert_allclose(
    _layers.rotate(x, cos, sin)[0, 0, 0], want, rtol=0, atol=1e-6
  )


def test_one_spelling_for_one_model(config):
  assert dataclasses.replace(config, query_scale=6**-0.5) == config
  assert dataclasses.replace(config, rope_local_theta=5.0) == config
  windows = {"windows": (4, None)}
  local = dataclasses.replace(config, rope_local_theta=5.0, **windows)
  assert local != dataclasses.replace(config, **windows)
  assert hash(local) == hash(dataclasses.replace(local))


def test_frequencies_of_each_kind(config):
  """Worked by hand: heads of six have frequencies b^0, b^(-1/3), b^(-2/3)."""
  config = dataclasses.replace(
    config,
    rope_theta=1000.0,
    rope_local_theta=8.0,
    windows=(4, None),
    rope_scaling=models.LinearRopeScaling(factor=4.0),
  )
  for layer, want in ((0, [1, 0.5, 0.25]), (1, [0.25, 0.025, 0.0025])):
    got = models.rotary_frequencies(config, layer)
    np.testing.assert_allclose(got, want, rtol=1e-12)
  factors = models.RopeFactors(factors=(1.0, 2.0, 5.0), attention_factor=1.5)
  config = dataclasses.replace(config, windows=(), rope_scaling=factors)
  np.testing.assert_allclose(
    models.rotary_frequencies(config), [1, 0.05, 0.002], rtol=1e-12
  )
  cos, sin = _layers.rotary_angles(config, jnp.arange(3, dtype=jnp.int32))
  np.testing.assert_allclose(cos[0], [1.5] * 3)
  np.testing.assert_allclose(sin[2, 0], 1.5 * math.sin(2), rtol=1e-6)


def test_odd_heads_without_rotary_embedding(config):
  odd = dataclasses.replace(config, head_dim=7, learned_positions=True)
  assert odd.head_dim == 7
