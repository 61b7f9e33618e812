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

  Args:
    size: of the last axis.
    eps: added to the mean square.
    dtype: of the weight.
    offset: see `TransformerConfig.norm_offset`.
    scaled: whether it has a weight.

  Source: Zhang and Sennrich 2019.
  """

  def __init__(
    self,
    size: int,
    *,
    eps: float,
    dtype: jax.typing.DTypeLike,
    offset: float | None = None,
    scaled: bool = True,
  ):
    self.eps = eps
    self.offset = offset
    self.weight = (
      nnx.Param(jnp.full((size,), 1 - (offset or 0.0), dtype))
      if scaled
      else None
    )

  def __call__(self, x: Array) -> Array:
    wide = x.astype(jnp.float32)
    mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    normed = wide * jax.lax.rsqrt(mean + self.eps)
    if self.weight is None:
      return normed.astype(x.dtype)
    if self.offset is None:
      return normed.astype(x.dtype) * jnp.broadcast_to(
        self.weight[...], x.shape
      )
    weight = self.weight[...].astype(jnp.float32) + self.offset
    return (normed * jnp.broadcast_to(weight, x.shape)).astype(x.dtype)


class LayerNorm(nnx.Module):
  """Norm by mean and variance, with a bias, computed in float32.

  Source: Ba et al. 2016.
  """

  def __init__(self, size: int, *, eps: float, dtype: jax.typing.DTypeLike):
    self.eps = eps
    self.weight = nnx.Param(jnp.ones((size,), dtype))
    self.bias = nnx.Param(jnp.zeros((size,), dtype))

  def __call__(self, x: Array) -> Array:
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    normed = wide * jax.lax.rsqrt(variance + self.eps)
    weight, bias = (
      jnp.broadcast_to(each[...].astype(jnp.float32), x.shape)
      for each in (self.weight, self.bias)
    )
    return (normed * weight + bias).astype(x.dtype)


def make_norm(
  config: _config.TransformerConfig,
  size: int,
  dtype: jax.typing.DTypeLike,
  *,
  before_product: bool = False,
) -> RMSNorm | LayerNorm:
  """The norm that a configuration asks for.

  Args:
    config: of the model.
    size: of the last axis.
    dtype: of the weight.
    before_product: whether matrices that can hold its weight come next.
  """
  if config.norm == "layer":
    return LayerNorm(size, eps=config.rms_norm_eps, dtype=dtype)
  return RMSNorm(
    size,
    eps=config.rms_norm_eps,
    dtype=dtype,
    offset=config.norm_offset,
    scaled=not (before_product and "norms" in config.fused),
  )


class Embedding(nnx.Module):
  """Token id, or position, -> row of a matrix [V, E]."""

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


def _activate(x: Array, kind: str) -> Array:
  if kind == "silu":
    return jax.nn.silu(x)
  # Of bf16 numbers the polynomial inside would lose bits.
  wide = jax.nn.gelu(x.astype(jnp.float32), approximate=True)
  return wide.astype(x.dtype)


class MLP(nnx.Module):
  """Gated, down(act(gate(x)) * up(x)), or else down(act(up(x))).

  Source: Shazeer 2020, "GLU variants improve transformer"; Hendrycks and
  Gimpel 2016 (GELU, by its tanh form).
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

    width, wide = config.hidden_size, config.intermediate_size
    self.activation = config.activation
    self.fused = "gate_up" in config.fused
    if self.fused:
      self.gate_up_proj = make(width, 2 * wide)
    else:
      self.gate_proj = make(width, wide) if config.mlp_gate else None
      self.up_proj = make(width, wide)
    self.down_proj = make(wide, width)

  def __call__(self, x: Array) -> Array:
    if self.fused:
      gate, up = jnp.split(self.gate_up_proj(x), 2, axis=-1)
    elif self.gate_proj is None:
      return self.down_proj(_activate(self.up_proj(x), self.activation))
    else:
      gate, up = self.gate_proj(x), self.up_proj(x)
    return self.down_proj(_activate(gate, self.activation) * up)


def _stretch(frequency: float, scaling: _config.RopeScaling) -> float:
  turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
  # 0 at and below `low_freq_factor` turns, 1 at and above the high one.
  keep = (turns - scaling.low_freq_factor) / (
    scaling.high_freq_factor - scaling.low_freq_factor
  )
  keep = min(max(keep, 0.0), 1.0)
  return keep * frequency + (1 - keep) * frequency / scaling.factor


def rotary_frequencies(
  config: _config.TransformerConfig, layer: int = 0
) -> list[float]:
  """Radians a position turns each pair of a head by, [H/2] floats.

  Args:
    config: of the model.
    layer: of it; they differ only if `rope_local_theta` is set.

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
  theta, scaling = config.rotation(layer)
  plain = [theta ** (-i / half) for i in range(half)]
  match scaling:
    case None:
      return plain
    case _config.LinearRopeScaling():
      return [frequency / scaling.factor for frequency in plain]
    case _config.RopeFactors():
      return [x / by for x, by in zip(plain, scaling.factors, strict=True)]
  return [_stretch(frequency, scaling) for frequency in plain]


def rotary_angles(
  config: _config.TransformerConfig, positions: Array, layer: int = 0
) -> tuple[Array, Array]:
  """Cosines and sines, each [..., H/2] float32, of int32 positions [...]."""
  frequency = jnp.asarray(rotary_frequencies(config, layer), jnp.float32)
  wide = positions.astype(jnp.float32)[..., None]
  shape = (*positions.shape, frequency.shape[0])
  angle = jnp.broadcast_to(wide, shape) * jnp.broadcast_to(frequency, shape)
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  _, scaling = config.rotation(layer)
  if isinstance(scaling, _config.RopeFactors):
    cos, sin = (x * scaling.attention_factor for x in (cos, sin))
  return cos, sin


def rotate(x: Array, cos: Array, sin: Array) -> Array:
  """Turns x [R, T, heads, H], whose pairs are (i, i + H/2), by its angles."""
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  cos, sin = cos[..., None, :], sin[..., None, :]
  turned = jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  )
  return turned.astype(x.dtype)
