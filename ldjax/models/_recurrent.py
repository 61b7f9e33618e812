"""A recurrent draft: one small cell, run once for each token ahead."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from ldjax import typing
from ldjax.models import _heads, _layers, _linear

Array = typing.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentConfig:
  """The shape of a recurrent draft.

  Args:
    depth: D, tokens ahead that it guesses.
    num_layers: residual blocks in the cell, at least 0.
    target_size: E, width of the target's features and embeddings.
    hidden_size: R, width of the draft's own state.
    intermediate_size: F, width inside a block.
    vocab_size: W, tokens that it can guess.
    target_vocab_size: V, where it guesses only a part of the target's
      vocabulary; None where W is all of it.
    output_rank: r, to score by a product of [W, r] and [r, R]; None for one
      matrix.
    shared_output: whether it scores by the target's output matrix instead of
      one of its own; a projection [E, R] stands before it unless R is E.
    rms_norm_eps: added to the mean square in every norm.

  Raises:
    ValueError: for sizes that no draft can have.
  """

  depth: int
  num_layers: int
  target_size: int
  hidden_size: int
  intermediate_size: int
  vocab_size: int
  target_vocab_size: int | None = None
  output_rank: int | None = None
  shared_output: bool = False
  rms_norm_eps: float = 1e-5

  kind: ClassVar[str] = "recurrent"
  """Name of the family."""

  def __post_init__(self):
    _heads.check_least(
      self,
      depth=1,
      num_layers=0,
      target_size=1,
      hidden_size=1,
      intermediate_size=1,
    )
    _heads.check_vocabulary(self)
    _heads.check_eps(self)

  @property
  def feature_size(self) -> int:
    """X, the width of the target's features."""
    return self.target_size


class Block(nnx.Module):
  """x + down(silu(gate(norm(x))) * up(norm(x)))."""

  def __init__(
    self,
    config: RecurrentConfig,
    *,
    dtype: jax.typing.DTypeLike,
    rngs: nnx.Rngs,
  ):
    def make(inputs, outputs):
      return _linear.Linear(
        inputs, outputs, use_bias=False, dtype=dtype, rngs=rngs
      )

    width, inside = config.hidden_size, config.intermediate_size
    self.norm = _layers.RMSNorm(width, eps=config.rms_norm_eps, dtype=dtype)
    self.gate_proj = make(width, inside)
    self.up_proj = make(width, inside)
    self.down_proj = make(inside, width)

  def __call__(self, x: Array) -> Array:
    y = self.norm(x)
    return x + self.down_proj(jax.nn.silu(self.gate_proj(y)) * self.up_proj(y))


class RecurrentDraft(_heads.Heads):
  """h_d = cell(h_(d-1), token at depth d), from h_(-1) of the feature.

  The state is normed, the projected embedding of the token is added, and the
  blocks follow. All depths use the same weights: what a step reads from memory
  is one cell and one output matrix, whatever the depth.

  Args:
    config: its shape.
    dtype: of the parameters and of the computation.
    rngs: for random parameters.

  Example:
    >>> from flax import nnx
    >>> import ldjax
    >>> config = ldjax.models.RecurrentConfig(
    ...   depth=3, num_layers=1, target_size=24, hidden_size=16,
    ...   intermediate_size=20, vocab_size=11, target_vocab_size=31)
    >>> draft = RecurrentDraft(config, rngs=nnx.Rngs(0))
    >>> fn, params = ldjax.models.functionalize_draft(draft)
    >>> fn.vocab_size, params["embed"]["weight"].shape
    (11, (31, 24))

  Source: Cheng et al. 2024, "Recurrent drafter for fast speculative decoding
  in large language models" (the recurrence; the cell here is another).
  """

  def __init__(
    self,
    config: RecurrentConfig,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    rngs: nnx.Rngs,
  ):
    super().__init__(config, dtype=dtype)
    outer, width = config.target_size, config.hidden_size

    def norm(size):
      return _layers.RMSNorm(size, eps=config.rms_norm_eps, dtype=dtype)

    def project():
      return _linear.Linear(
        outer, width, use_bias=False, dtype=dtype, rngs=rngs
      )

    self.embed = _heads.TargetEmbedding(
      _heads.embed_rows(config), outer, dtype=dtype, rngs=rngs
    )
    self.feature_norm, self.feature_proj = norm(outer), project()
    self.embed_norm, self.embed_proj = norm(outer), project()
    self.state_norm = norm(width)
    self.blocks = nnx.List(
      Block(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)
    )
    self.norm = norm(width)
    self.output = _heads.Output(config, dtype=dtype, rngs=rngs)

  def _start(self, features: Array) -> Array:
    return self.feature_proj(self.feature_norm(features.astype(self.dtype)))

  def _read(self, tokens: Array) -> Array:
    return self.embed_proj(self.embed_norm(self.embed(tokens, self.dtype)))

  def _cell(self, before: Array, read: Array) -> Array:
    state = self.state_norm(before) + read
    for block in self.blocks:
      state = block(state)
    return state

  def begin(self, state: Array, pending: Array) -> tuple[_heads.Level, Array]:
    """See `HeadsFn.begin`."""
    hidden = self._cell(self._start(state), self._read(pending))[:, None]
    level = _heads.Level(values=hidden, first=0, depth=0)
    return level, self.score(hidden)

  def extend(
    self, state: Array, carry: _heads.Level, tokens: Array, parents: Array
  ) -> tuple[_heads.Level, Array]:
    """See `HeadsFn.extend`."""
    del state
    carry.below(self.config.depth)
    hidden = self._cell(carry.of_parents(parents), self._read(tokens))
    return carry.followed_by(hidden), self.score(hidden)

  def unroll(self, features: Array, tokens: Array) -> Array:
    """See `HeadsFn.unroll`."""
    read = self._read(tokens)
    hidden, states = self._start(features), []
    for d in range(self.config.depth):
      hidden = self._cell(hidden, _heads.ahead(read, 1 + d))
      states.append(hidden)
    return jnp.stack(states, axis=2)

  def score(self, states: Array) -> Array:
    """See `HeadsFn.score`."""
    return self.output(self.norm(states))
