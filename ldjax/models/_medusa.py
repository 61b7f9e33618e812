"""Medusa heads: guesses of several tokens ahead from one hidden state."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from ldjax import typing
from ldjax.models import _linear

Array = typing.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaConfig:
  """The shape of a set of Medusa heads.

  Args:
    num_heads: C; head i at position t guesses the token at t + 2 + i.
    num_layers: residual blocks in a head, at least 0.
    hidden_size: E, that of the target.
    vocab_size: V, that of the target.
    shared_output: whether the heads use the target's output matrix instead of
      one each.

  Raises:
    ValueError: for sizes that no heads can have.
  """

  num_heads: int
  num_layers: int
  hidden_size: int
  vocab_size: int
  shared_output: bool = False

  def __post_init__(self):
    for field, least in (
      ("num_heads", 1),
      ("num_layers", 0),
      ("hidden_size", 1),
      ("vocab_size", 1),
    ):
      if getattr(self, field) < least:
        raise ValueError(
          f"{field} is {getattr(self, field)}; it must be at least {least}"
        )


class MedusaHead(nnx.Module):
  """x + silu(linear(x)), `num_layers` times, then an output matrix."""

  def __init__(
    self,
    config: MedusaConfig,
    *,
    dtype: jax.typing.DTypeLike,
    rngs: nnx.Rngs,
  ):
    def make(outputs, use_bias):
      return _linear.Linear(
        config.hidden_size, outputs, use_bias=use_bias, dtype=dtype, rngs=rngs
      )

    self.blocks = nnx.List(
      make(config.hidden_size, True) for _ in range(config.num_layers)
    )
    self.lm_head = (
      None if config.shared_output else make(config.vocab_size, False)
    )

  def __call__(self, feature: Array) -> Array:
    """Returns [B, V] logits, or [B, E] where the output is shared."""
    for block in self.blocks:
      feature = feature + jax.nn.silu(block(feature))
    if self.lm_head is None:
      return feature
    return _linear.linear(
      feature, self.lm_head.weight[...], out_dtype=jnp.float32
    )


class MedusaHeads(nnx.Module):
  """C independent heads on the target's last hidden state.

  With `shared_output`, `output` holds the target's output matrix [V, E].

  Source: Cai et al. 2024, "Medusa: simple LLM inference acceleration
  framework with multiple decoding heads".
  """

  def __init__(
    self,
    config: MedusaConfig,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.config = config
    self.heads = nnx.List(
      MedusaHead(config, dtype=dtype, rngs=rngs)
      for _ in range(config.num_heads)
    )
    self.output = (
      _linear.Linear(
        config.hidden_size,
        config.vocab_size,
        use_bias=False,
        dtype=dtype,
        rngs=rngs,
      )
      if config.shared_output
      else None
    )

  def __call__(self, feature: Array) -> Array:
    """Returns logits [B, C, V] float32 of features [B, E]."""
    out = jnp.stack([head(feature) for head in self.heads], axis=1)
    if self.output is None:
      return out
    return _linear.linear(out, self.output.weight[...], out_dtype=jnp.float32)
