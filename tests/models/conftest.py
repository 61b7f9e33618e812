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


def _norm(params, x, eps):
  return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * params["weight"]


def _silu(x):
  return x / (1 + np.exp(-x))


def _frequencies(config):
  """As the reference code of Llama 3.1 has it, by wavelengths."""
  half = config.head_dim // 2
  out = []
  for i in range(half):
    frequency = 1 / config.rope_theta ** (2 * i / config.head_dim)
    scaling = config.rope_scaling
    if scaling is not None:
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


def _rotate(x, positions, config):
  """Pairs (i, i + H/2) as complex numbers."""
  half = config.head_dim // 2
  angle = positions[:, None] * _frequencies(config)[None]
  turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[:, None]
  return np.concatenate([turned.real, turned.imag], axis=-1)


def _forward(config, params, tokens, positions, mask):
  params = _wide(params)
  size, width = len(tokens), config.head_dim
  positions = np.asarray(positions, np.float64)
  x = params["embed_tokens"]["weight"][np.asarray(tokens)]
  entering, keys_values = [], []
  for index in range(config.num_layers):
    layer = params["layers"][index]
    attention, mlp = layer["self_attn"], layer["mlp"]
    window = config.windows[index] if config.windows else None
    sight = mask
    if window is not None:
      sight = mask & (positions[None] > positions[:, None] - window)
    entering.append(x)
    y = _norm(layer["input_layernorm"], x, config.rms_norm_eps)
    query, key, value = (
      _linear(attention[name], y).reshape(size, -1, width)
      for name in ("q_proj", "k_proj", "v_proj")
    )
    if config.qk_norm:
      query = _norm(attention["q_norm"], query, config.rms_norm_eps)
      key = _norm(attention["k_norm"], key, config.rms_norm_eps)
    if index not in config.nope_layers:
      query = _rotate(query, positions, config)
      key = _rotate(key, positions, config)
    keys_values.append(np.concatenate([key, value], axis=-1))
    heads = []
    for head in range(config.num_heads):
      shared = head * config.num_kv_heads // config.num_heads
      scores = query[:, head] @ key[:, shared].T / math.sqrt(width)
      scores = np.where(sight, scores, -np.inf)
      weights = np.exp(scores - scores.max(-1, keepdims=True))
      weights /= weights.sum(-1, keepdims=True)
      heads.append(weights @ value[:, shared])
    x = x + _linear(attention["o_proj"], np.concatenate(heads, axis=-1))
    y = _norm(layer["post_attention_layernorm"], x, config.rms_norm_eps)
    y = _silu(_linear(mlp["gate_proj"], y)) * _linear(mlp["up_proj"], y)
    x = x + _linear(mlp["down_proj"], y)
  hidden = _norm(params["norm"], x, config.rms_norm_eps)
  output = "embed_tokens" if config.tie_word_embeddings else "lm_head"
  return {
    "logits": hidden @ params[output]["weight"].T,
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
