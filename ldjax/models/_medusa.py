"""Medusa heads: guesses of several tokens ahead from one hidden state."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from ldjax import typing
from ldjax.models import _heads, _linear

Array = typing.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaConfig:
  """The shape of a set of Medusa heads.

  Args:
    num_heads: C; head i at position t guesses the token at t + 2 + i.
    num_layers: residual blocks in a head, at least 0.
    hidden_size: E, that of the target.
    vocab_size: W, tokens that the heads can guess.
    shared_output: whether the heads use the target's output matrix instead of
      one each.
    single_output: whether they use one matrix of their own for all.
    target_vocab_size: V, where the heads guess only a part of the target's
      vocabulary; None where W is all of it.

  Raises:
    ValueError: for sizes that no heads can have.
  """

  num_heads: int
  num_layers: int
  hidden_size: int
  vocab_size: int
  shared_output: bool = False
  single_output: bool = False
  target_vocab_size: int | None = None

  kind: ClassVar[str] = "medusa"
  """Name of the family."""

  def __post_init__(self):
    _heads.check_least(self, num_heads=1, num_layers=0, hidden_size=1)
    _heads.check_vocabulary(self)
    if self.shared_output and self.single_output:
      raise ValueError(
        "shared_output and single_output are both set; the output matrix is"
        " either the target's or the heads' own"
      )

  @property
  def depth(self) -> int:
    """D, tokens ahead that are guessed."""
    return self.num_heads

  @property
  def feature_size(self) -> int:
    """X, the width of the target's features."""
    return self.hidden_size

  @property
  def one_output(self) -> bool:
    """Whether one matrix serves all heads."""
    return self.shared_output or self.single_output


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
    self.lm_head = None if config.one_output else make(config.vocab_size, False)

  def __call__(self, feature: Array) -> Array:
    """Returns what the output matrix reads, of features [..., E]."""
    for block in self.blocks:
      feature = feature + jax.nn.silu(block(feature))
    return feature

  def score(self, states: Array) -> Array:
    """Logits [..., W] by the head's own output matrix."""
    assert self.lm_head is not None
    return _linear.linear(
      states, self.lm_head.weight[...], out_dtype=jnp.float32
    )


class MedusaHeads(_heads.Heads):
  """C independent heads on the target's last hidden state.

  They see neither the pending token nor the drafted ones. With
  `shared_output`, `output` holds the target's output matrix, with
  `single_output` their own.

  Args:
    config: their shape.
    dtype: of the parameters and of the computation.
    rngs: for random parameters.

  Example:
    >>> from flax import nnx
    >>> import ldjax
    >>> config = ldjax.models.MedusaConfig(
    ...   num_heads=2, num_layers=1, hidden_size=8, vocab_size=11)
    >>> heads = MedusaHeads(config, rngs=nnx.Rngs(0))
    >>> fn, params = ldjax.models.functionalize_draft(heads)
    >>> fn.depth, sorted(params["heads"][0])
    (2, ['blocks', 'lm_head'])

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
    super().__init__(config, dtype=dtype)
    self.heads = nnx.List(
      MedusaHead(config, dtype=dtype, rngs=rngs)
      for _ in range(config.num_heads)
    )
    self.output = (
      _heads.Output(config, dtype=dtype, rngs=rngs)
      if config.one_output
      else None
    )

  def begin(self, state: Array, pending: Array) -> tuple[_heads.Level, Array]:
    """See `HeadsFn.begin`; all heads are computed here."""
    del pending
    hidden = [head(state) for head in self.heads]
    if self.output is None:
      logits = jnp.stack(
        [head.score(x) for head, x in zip(self.heads, hidden, strict=True)],
        axis=1,
      )
    else:
      # One product for all heads: the matrix is read once.
      logits = self.output(jnp.stack(hidden, axis=1))
    level = _heads.Level(values=logits, first=0, depth=0)
    return level, logits[:, :1]

  def extend(
    self, state: Array, carry: _heads.Level, tokens: Array, parents: Array
  ) -> tuple[_heads.Level, Array]:
    """See `HeadsFn.extend`."""
    del state, tokens, parents
    logits = carry.values
    depth = carry.below(self.config.depth)
    level = _heads.Level(values=logits, first=0, depth=depth)
    return level, logits[:, depth, None]

  def unroll(self, features: Array, tokens: Array) -> Array:
    """See `HeadsFn.unroll`.

    Without a shared output matrix Y is E + 1, see `numbered`.
    """
    del tokens
    states = jnp.stack(
      [head(features.astype(self.dtype)) for head in self.heads], axis=2
    )
    return states if self.output is not None else _heads.numbered(states)

  def score(self, states: Array) -> Array:
    """See `HeadsFn.score`."""
    if self.output is not None:
      return self.output(states)
    return _heads.score_numbered([head.score for head in self.heads], states)
