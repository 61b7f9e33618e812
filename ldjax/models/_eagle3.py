"""An EAGLE-3 draft: one decoder layer over states of three target layers."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from ldjax import typing
from ldjax.models import _eagle_base, _heads, _layers, _linear

Array = typing.Array

_LEAST_LAYERS = 5
"""Of a target: below, layer 2 would come after layer L - 3."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Config(_eagle_base.LayerConfig):
  """The shape of an EAGLE-3 draft.

  Args:
    depth: D, tokens ahead that it guesses.
    hidden_size: E, that of the target.
    intermediate_size: F, the feed-forward width.
    num_heads: N, query heads.
    num_kv_heads: K, key/value heads; divides N.
    head_dim: H.
    vocab_size: W, tokens that it can guess.
    target_vocab_size: V, where it guesses only a part of the target's
      vocabulary; None where W is all of it.
    norm_before_residual: whether the layer adds to the normed feature instead
      of the feature itself.
    qkv_bias: whether q, k and v projections carry a bias.
    rope_theta: base of the rotary frequencies.
    rope_scaling: the `llama3` stretch of them, or None.
    rms_norm_eps: added to the mean square in every norm.

  Raises:
    ValueError: for sizes that no draft can have.
  """

  norm_before_residual: bool = False

  kind: ClassVar[str] = "eagle3"
  """Name of the family."""
  shared_output: ClassVar[bool] = False
  """It scores by an output matrix of its own."""

  @property
  def feature_size(self) -> int:
    """X, the width of the target's features: those of three layers."""
    return 3 * self.hidden_size

  def feature_layers(self, num_layers: int) -> tuple[int, ...]:
    """The target layers whose inputs are its features: 2, L // 2 and L - 3.

    Args:
      num_layers: L, of the target.

    Raises:
      ValueError: for a target with fewer than 5 layers.
    """
    if num_layers < _LEAST_LAYERS:
      raise ValueError(
        f"an EAGLE-3 draft reads the inputs of layers 2, L // 2 and L - 3; the"
        f" target has {num_layers} layers and {_LEAST_LAYERS} are needed"
      )
    return 2, num_layers // 2, num_layers - 3


class Eagle3Draft(_eagle_base.EagleHeads):
  """One decoder layer that goes on from low, middle and high target states.

  The three states of a position become one feature by a projection. An entry
  is a token with the feature of the position before it; the entries begin with
  the second token of a text. Both halves are normed, and queries, keys and
  values are made from them side by side; the layer adds to the feature. Its
  own cache holds the entries of committed positions; a drafted token is
  entered with the layer's output at its parent in place of a feature. The norm
  at the end is for scoring alone.

  Args:
    config: its shape.
    dtype: of the parameters, of the computation and of the cache.
    rngs: for random parameters.

  Example:
    >>> from flax import nnx
    >>> import ldjax
    >>> config = ldjax.models.Eagle3Config(
    ...   depth=3, hidden_size=24, intermediate_size=40, num_heads=3,
    ...   num_kv_heads=1, head_dim=8, vocab_size=11, target_vocab_size=31)
    >>> draft = Eagle3Draft(config, rngs=nnx.Rngs(0))
    >>> fn, params = ldjax.models.functionalize_draft(draft, max_len=64)
    >>> fn.feature_size, config.feature_layers(32)
    (72, (2, 16, 29))

  Source: Li et al. 2025, "EAGLE-3: scaling up inference acceleration of large
  language models via training-time test".
  """

  def __init__(
    self,
    config: Eagle3Config,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    rngs: nnx.Rngs,
  ):
    super().__init__(config, dtype=dtype)
    width = config.hidden_size

    def norm():
      return _layers.RMSNorm(width, eps=config.rms_norm_eps, dtype=dtype)

    self.embed = _heads.TargetEmbedding(
      _heads.embed_rows(config), width, dtype=dtype, rngs=rngs
    )
    self.fc = _linear.Linear(
      config.feature_size, width, use_bias=False, dtype=dtype, rngs=rngs
    )
    self.hidden_norm = norm()
    self.layer = _eagle_base.Layer(
      config.layer, inputs=2 * width, dtype=dtype, rngs=rngs
    )
    self.norm = norm()
    self.output = _heads.Output(config, dtype=dtype, rngs=rngs)

  def _read(self, features: Array) -> Array:
    return self.fc(features.astype(self.dtype))

  def _enter(
    self, tokens: Array, features: Array, numbers: Array
  ) -> tuple[Array, Array, Array]:
    assert self.layer.input_layernorm is not None
    embedded = self.layer.input_layernorm(self.embed(tokens, self.dtype))
    normed = self.hidden_norm(features)
    pair = jnp.concatenate([embedded, normed], axis=-1)
    x = normed if self.config.norm_before_residual else features
    return x, *self._project(pair, numbers)

  def score(self, states: Array) -> Array:
    """See `HeadsFn.score`."""
    return self.output(self.norm(states))
