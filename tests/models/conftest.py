"""The whole transformer once more, in NumPy and float64."""

import math

import numpy as np
import pytest

from ldjax import models


def _wide(tree):
  if isinstance(tree, dict):
    return {key: _wide(value) for key, value in tree.items()}
  return None if tree is None else np.asarray(tree).astype(np.float64)


def _linear(params, x):
  out = x @ params["weight"].T
  return out + params["bias"] if "bias" in params else out


def _norm(config, params, x):
  if config.norm == "layer":
    x = x - x.mean(-1, keepdims=True)
  x = x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps)
  return x * (params["weight"] + (config.norm_offset or 0)) + params.get(
    "bias", 0
  )


def _silu(x):
  return x / (1 + np.exp(-x))


def _act(config, x):
  if config.activation == "silu":
    return _silu(x)
  inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
  return 0.5 * x * (1 + np.tanh(inner))


def _cap(x, cap):
  return x if cap is None else cap * np.tanh(x / cap)


def _frequencies(config, near):
  """As the reference code of Llama 3.1 has it, by wavelengths."""
  half = config.head_dim // 2
  theta, scaling = config.rope_theta, config.rope_scaling
  if near and config.rope_local_theta is not None:
    theta, scaling = config.rope_local_theta, None
  out = []
  for i in range(half):
    frequency = 1 / theta ** (2 * i / config.head_dim)
    if isinstance(scaling, models.LinearRopeScaling):
      frequency /= scaling.factor
    elif isinstance(scaling, models.RopeFactors):
      frequency /= scaling.factors[i]
    elif scaling is not None:
      original = scaling.original_max_position_embeddings
      wavelength = 2 * math.pi / frequency
      if wavelength > original / scaling.low_freq_factor:
        frequency /= scaling.factor
      elif wavelength >= original / scaling.high_freq_factor:
        smooth = (original / wavelength - scaling.low_freq_factor) / (
          scaling.high_freq_factor - scaling.low_freq_factor
        )
        frequency *= (1 - smooth) / scaling.factor + smooth
    out.append(frequency)
  return np.array(out)


def _rotate(x, positions, config, near):
  """Pairs (i, i + H/2) as complex numbers."""
  half = config.head_dim // 2
  angle = positions[:, None] * _frequencies(config, near)[None]
  turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[:, None]
  if isinstance(config.rope_scaling, models.RopeFactors):
    turned = turned * config.rope_scaling.attention_factor
  return np.concatenate([turned.real, turned.imag], axis=-1)


def _forward(config, params, tokens, positions, mask):
  params = _wide(params)
  size, width = len(tokens), config.head_dim
  positions = np.asarray(positions, np.float64)
  x = params["embed_tokens"]["weight"][np.asarray(tokens)]
  x = x * config.embed_scale
  if config.learned_positions:
    x = x + params["embed_positions"]["weight"][positions.astype(int)]
  entering, keys_values = [], []
  for index in range(config.num_layers):
    layer = params["layers"][index]
    attention, mlp = layer["self_attn"], layer["mlp"]
    window = config.windows[index] if config.windows else None
    sight = mask
    if window is not None:
      sight = mask & (positions[None] > positions[:, None] - window)
    entering.append(x)
    y = _norm(config, layer["input_layernorm"], x)
    query, key, value = (
      _linear(attention[name], y).reshape(size, -1, width)
      for name in ("q_proj", "k_proj", "v_proj")
    )
    if config.qk_norm:
      query = _norm(config, attention["q_norm"], query)
      key = _norm(config, attention["k_norm"], key)
    if index not in config.nope_layers and not config.learned_positions:
      query = _rotate(query, positions, config, window is not None)
      key = _rotate(key, positions, config, window is not None)
    keys_values.append(np.concatenate([key, value], axis=-1))
    heads = []
    for head in range(config.num_heads):
      shared = head * config.num_kv_heads // config.num_heads
      scale = config.query_scale or 1 / math.sqrt(width)
      scores = scale * query[:, head] @ key[:, shared].T
      scores = _cap(scores, config.attn_soft_cap)
      scores = np.where(sight, scores, -np.inf)
      weights = np.exp(scores - scores.max(-1, keepdims=True))
      weights /= weights.sum(-1, keepdims=True)
      heads.append(weights @ value[:, shared])
    y = _linear(attention["o_proj"], np.concatenate(heads, axis=-1))
    if config.output_norms:
      y = _norm(config, layer["attention_output_norm"], y)
    x = x + y
    y = _norm(config, layer["post_attention_layernorm"], x)
    up = _linear(mlp["up_proj"], y)
    if config.mlp_gate:
      up = _act(config, _linear(mlp["gate_proj"], y)) * up
    else:
      up = _act(config, up)
    y = _linear(mlp["down_proj"], up)
    if config.output_norms:
      y = _norm(config, layer["mlp_output_norm"], y)
    x = x + y
  hidden = _norm(config, params["norm"], x)
  output = "embed_tokens" if config.tie_word_embeddings else "lm_head"
  return {
    "logits": _cap(hidden @ params[output]["weight"].T, config.final_soft_cap),
    "hidden": hidden,
    "entering": entering,
    "block_kv": keys_values,
  }


@pytest.fixture(scope="session")
def config():
  """A shape in which no two sizes are equal that could be mistaken."""
  return models.TransformerConfig(
    vocab_size=37,
    hidden_size=22,
    intermediate_size=41,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=6,  # not 22 / 6
    max_position_embeddings=64,
  )


@pytest.fixture(scope="session")
def numpy_forward():
  """forward(config, params, tokens[S], positions[S], mask[S, S]) -> dict."""
  return _forward


@pytest.fixture(scope="session")
def numpy_heads():
  """heads(params, feature[B, E], num_heads) -> logits [B, C, V]."""

  def heads(params, feature, num_heads):
    params, out = _wide(params), []
    shared = params.get("output")
    for index in range(num_heads):
      # A head of nothing but the shared output has no parameters.
      head = params.get("heads", {}).get(index, {})
      x = np.asarray(feature, np.float64)
      for block in sorted(head.get("blocks", {})):
        x = x + _silu(_linear(head["blocks"][block], x))
      out.append(_linear(head["lm_head"] if shared is None else shared, x))
    return np.stack(out, axis=1)

  return heads
