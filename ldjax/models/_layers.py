"""The parts of a decoder block besides its attention."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from ldjax import typing
from ldjax.models import _config, _linear

Array = typing.Array


class RMSNorm(nnx.Module):
  """Root-mean-square norm, computed in float32.

  Source: Zhang and Sennrich 2019.
  """

  def __init__(self, size: int, *, eps: float, dtype: jax.typing.DTypeLike):
    self.eps = eps
    self.weight = nnx.Param(jnp.ones((size,), dtype))

  def __call__(self, x: Array) -> Array:
    wide = x.astype(jnp.float32)
    mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    normed = (wide * jax.lax.rsqrt(mean + self.eps)).astype(x.dtype)
    return normed * jnp.broadcast_to(self.weight[...], x.shape)


class Embedding(nnx.Module):
  """Token id -> row of a matrix [V, E]."""

  def __init__(
    self,
    vocab_size: int,
    size: int,
    *,
    dtype: jax.typing.DTypeLike,
    rngs: nnx.Rngs,
  ):
    self.weight = nnx.Param(
      jax.random.normal(rngs.params(), (vocab_size, size), dtype)
    )

  def __call__(self, tokens: Array) -> Array:
    # The tokens of invalid nodes are -1: any row will do, nobody reads it.
    return self.weight[...].at[tokens].get(mode="clip")


class MLP(nnx.Module):
  """SwiGLU: down(silu(gate(x)) * up(x)).

  Source: Shazeer 2020, "GLU variants improve transformer".
  """

  def __init__(
    self,
    config: _config.TransformerConfig,
    *,
    dtype: jax.typing.DTypeLike,
    rngs: nnx.Rngs,
  ):
    def make(inputs, outputs):
      return _linear.Linear(
        inputs, outputs, use_bias=config.mlp_bias, dtype=dtype, rngs=rngs
      )

    self.gate_proj = make(config.hidden_size, config.intermediate_size)
    self.up_proj = make(config.hidden_size, config.intermediate_size)
    self.down_proj = make(config.intermediate_size, config.hidden_size)

  def __call__(self, x: Array) -> Array:
    return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


def rotary_frequencies(config: _config.TransformerConfig) -> list[float]:
  """Radians a position turns each pair of a head by, [H/2] floats.

  Example:
    >>> import ldjax
    >>> config = ldjax.models.TransformerConfig(
    ...   vocab_size=31, hidden_size=24, intermediate_size=40, num_layers=2,
    ...   num_heads=3, num_kv_heads=1, head_dim=8, max_position_embeddings=64)
    >>> [round(x, 4) for x in rotary_frequencies(config)]
    [1.0, 0.1, 0.01, 0.001]

  Source: Su et al. 2021 (RoFormer); the stretch follows Llama 3.1.
  """
  half = config.head_dim // 2
  plain = [config.rope_theta ** (-i / half) for i in range(half)]
  scaling = config.rope_scaling
  if scaling is None:
    return plain

  def stretch(frequency):
    turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
    # 0 at and below `low_freq_factor` turns, 1 at and above the high one.
    keep = (turns - scaling.low_freq_factor) / (
      scaling.high_freq_factor - scaling.low_freq_factor
    )
    keep = min(max(keep, 0.0), 1.0)
    return keep * frequency + (1 - keep) * frequency / scaling.factor

  return [stretch(frequency) for frequency in plain]


def rotary_angles(
  config: _config.TransformerConfig, positions: Array
) -> tuple[Array, Array]:
  """Cosines and sines, each [..., H/2] float32, of int32 positions [...]."""
  frequency = jnp.asarray(rotary_frequencies(config), jnp.float32)
  wide = positions.astype(jnp.float32)[..., None]
  shape = (*positions.shape, frequency.shape[0])
  angle = jnp.broadcast_to(wide, shape) * jnp.broadcast_to(frequency, shape)
  return jnp.cos(angle), jnp.sin(angle)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
  """Turns x [R, T, heads, H], whose pairs are (i, i + H/2), by its angles."""
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  cos, sin = cos[..., None, :], sin[..., None, :]
  turned = jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  )
  return turned.astype(x.dtype)
