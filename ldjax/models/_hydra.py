"""Hydra heads: Medusa heads that see the tokens drafted before them."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from ldjax import typing
from ldjax.models import _heads, _layers, _linear

Array = typing.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class HydraConfig:
  """The shape of a set of Hydra heads.

  Args:
    num_heads: C; head i at position t guesses the token at t + 2 + i.
    num_layers: residual blocks in a head, at least 0.
    target_size: E, width of the target's features and embeddings.
    hidden_size: R, width of a head.
    vocab_size: W, tokens that the heads can guess.
    target_vocab_size: V, where they guess only a part of the target's
      vocabulary; None where W is all of it.
    output_rank: r, to score by a product of [W, r] and [r, R]; None for one
      matrix.
    shared_output: whether they score by the target's output matrix instead of
      one of their own; a projection [E, R] stands before it unless R is E.
    rms_norm_eps: added to the mean square in every norm.

  Raises:
    ValueError: for sizes that no heads can have.
  """

  num_heads: int
  num_layers: int
  target_size: int
  hidden_size: int
  vocab_size: int
  target_vocab_size: int | None = None
  output_rank: int | None = None
  shared_output: bool = False
  rms_norm_eps: float = 1e-5

  kind: ClassVar[str] = "hydra"
  """Name of the family."""

  def __post_init__(self):
    _heads.check_least(
      self, num_heads=1, num_layers=0, target_size=1, hidden_size=1
    )
    _heads.check_vocabulary(self)
    _heads.check_eps(self)

  @property
  def depth(self) -> int:
    """D, tokens ahead that are guessed."""
    return self.num_heads

  @property
  def feature_size(self) -> int:
    """X, the width of the target's features."""
    return self.target_size


class HydraHead(nnx.Module):
  """A projection, then x + silu(linear(x)), `num_layers` times."""

  def __init__(
    self,
    config: HydraConfig,
    depth: int,
    *,
    dtype: jax.typing.DTypeLike,
    rngs: nnx.Rngs,
  ):
    def make(inputs):
      return _linear.Linear(
        inputs, config.hidden_size, use_bias=True, dtype=dtype, rngs=rngs
      )

    # The feature, and the embeddings of the pending token and `depth` more.
    self.input_proj = make(config.target_size * (2 + depth))
    self.blocks = nnx.List(
      make(config.hidden_size) for _ in range(config.num_layers)
    )

  def __call__(self, x: Array) -> Array:
    x = self.input_proj(x)
    for block in self.blocks:
      x = x + jax.nn.silu(block(x))
    return x


class _PathHeads(_heads.Heads):
  """Heads of which each reads the feature and the tokens of the path so far.

  A class of them has `embed` and `heads`, and says how a head scores.
  """

  embed: _heads.TargetEmbedding
  heads: nnx.List

  def _start(self, features: Array) -> Array:
    """What all heads read of the target's features."""
    return features.astype(self.dtype)

  def _read(self, tokens: Array) -> Array:
    """What all heads read of a token."""
    return self.embed(tokens, self.dtype)

  def _guess(self, depth: int, seen: Array) -> Array:
    """Logits [..., W] of the head of a depth, of what it reads."""
    raise NotImplementedError

  def begin(self, state: Array, pending: Array) -> tuple[_heads.Level, Array]:
    """See `HeadsFn.begin`."""
    inputs = [self._start(state), self._read(pending)]
    seen = jnp.concatenate(inputs, axis=-1)[:, None]
    level = _heads.Level(values=seen, first=0, depth=0)
    return level, self._guess(0, seen)

  def extend(
    self, state: Array, carry: _heads.Level, tokens: Array, parents: Array
  ) -> tuple[_heads.Level, Array]:
    """See `HeadsFn.extend`."""
    del state
    depth = carry.below(self.config.depth)
    inputs = [carry.of_parents(parents), self._read(tokens)]
    seen = jnp.concatenate(inputs, axis=-1)
    return carry.followed_by(seen), self._guess(depth, seen)

  def unroll(self, features: Array, tokens: Array) -> Array:
    """See `HeadsFn.unroll`."""
    read = self._read(tokens)
    seen, states = self._start(features), []
    for d, head in enumerate(self.heads):
      seen = jnp.concatenate([seen, _heads.ahead(read, 1 + d)], axis=-1)
      states.append(head(seen))
    return jnp.stack(states, axis=2)


class HydraHeads(_PathHeads):
  """C heads on the target's last hidden state and the tokens since.

  The head of depth d reads the feature and the embeddings of the pending token
  and of the d tokens drafted on the path, all normed. One output matrix serves
  all heads.

  Args:
    config: their shape.
    dtype: of the parameters and of the computation.
    rngs: for random parameters.

  Example:
    >>> from flax import nnx
    >>> import ldjax
    >>> config = ldjax.models.HydraConfig(
    ...   num_heads=2, num_layers=1, target_size=8, hidden_size=6,
    ...   vocab_size=11)
    >>> heads = HydraHeads(config, rngs=nnx.Rngs(0))
    >>> fn, params = ldjax.models.functionalize_draft(heads)
    >>> params["heads"][1]["input_proj"]["weight"].shape
    (6, 24)

  Source: Ankner et al. 2024, "Hydra: sequentially-dependent draft heads for
  Medusa decoding".
  """

  def __init__(
    self,
    config: HydraConfig,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    rngs: nnx.Rngs,
  ):
    super().__init__(config, dtype=dtype)
    width = config.target_size

    def norm(size):
      return _layers.RMSNorm(size, eps=config.rms_norm_eps, dtype=dtype)

    self.embed = _heads.TargetEmbedding(
      _heads.embed_rows(config), width, dtype=dtype, rngs=rngs
    )
    self.feature_norm, self.embed_norm = norm(width), norm(width)
    self.heads = nnx.List(
      HydraHead(config, depth, dtype=dtype, rngs=rngs)
      for depth in range(config.num_heads)
    )
    self.norm = norm(config.hidden_size)
    self.output = _heads.Output(config, dtype=dtype, rngs=rngs)

  def _start(self, features: Array) -> Array:
    return self.feature_norm(features.astype(self.dtype))

  def _read(self, tokens: Array) -> Array:
    return self.embed_norm(self.embed(tokens, self.dtype))

  def _guess(self, depth: int, seen: Array) -> Array:
    return self.score(self.heads[depth](seen))

  def score(self, states: Array) -> Array:
    """See `HeadsFn.score`."""
    return self.output(self.norm(states))


@dataclasses.dataclass(frozen=True, kw_only=True)
class HydraMlpConfig:
  """The shape of a set of published Hydra heads, of the architecture "mlp".

  Args:
    num_heads: C; head i at position t guesses the token at t + 2 + i.
    num_layers: blocks in a head, at least 1.
    hidden_size: E, width of the target's features and embeddings.
    vocab_size: V, that of the target.
    output_bias: whether the output matrices carry a bias.

  Raises:
    ValueError: for sizes that no heads can have.
  """

  num_heads: int
  num_layers: int
  hidden_size: int
  vocab_size: int
  output_bias: bool = True

  kind: ClassVar[str] = "hydra-mlp"
  """Name of the family."""
  shared_output: ClassVar[bool] = False
  """Each head scores by an output matrix of its own."""
  target_vocab_size: ClassVar[int | None] = None
  """They guess all tokens."""

  def __post_init__(self):
    _heads.check_least(
      self, num_heads=1, num_layers=1, hidden_size=1, vocab_size=1
    )

  @property
  def depth(self) -> int:
    """D, tokens ahead that are guessed."""
    return self.num_heads

  @property
  def feature_size(self) -> int:
    """X, the width of the target's features."""
    return self.hidden_size


class ReducingBlock(nnx.Module):
  """res_connection(x) + silu(linear(x)), from a wide x to E."""

  def __init__(
    self,
    inputs: int,
    outputs: int,
    *,
    dtype: jax.typing.DTypeLike,
    rngs: nnx.Rngs,
  ):
    def make():
      return _linear.Linear(
        inputs, outputs, use_bias=True, dtype=dtype, rngs=rngs
      )

    self.res_connection, self.linear = make(), make()

  def __call__(self, x: Array) -> Array:
    return self.res_connection(x) + jax.nn.silu(self.linear(x))


class HydraMlpHead(nnx.Module):
  """A reducing block, then x + silu(linear(x)), then an output matrix."""

  def __init__(
    self,
    config: HydraMlpConfig,
    depth: int,
    *,
    dtype: jax.typing.DTypeLike,
    rngs: nnx.Rngs,
  ):
    width = config.hidden_size

    def make(outputs, use_bias):
      return _linear.Linear(
        width, outputs, use_bias=use_bias, dtype=dtype, rngs=rngs
      )

    # The feature, and the embeddings of the pending token and `depth` more.
    first = ReducingBlock((2 + depth) * width, width, dtype=dtype, rngs=rngs)
    self.blocks = nnx.List(
      [first, *(make(width, True) for _ in range(config.num_layers - 1))]
    )
    self.lm_head = make(config.vocab_size, config.output_bias)

  def __call__(self, x: Array) -> Array:
    """Returns what the output matrix reads, of inputs [..., (2 + d) E]."""
    first, *others = self.blocks
    x = first(x)
    for block in others:
      x = x + jax.nn.silu(block(x))
    return x

  def score(self, states: Array) -> Array:
    """Logits [..., V] float32."""
    bias = self.lm_head.bias
    return _linear.linear(
      states,
      self.lm_head.weight[...],
      None if bias is None else bias[...],
      out_dtype=jnp.float32,
    )


class HydraMlpHeads(_PathHeads):
  """C heads on the target's last hidden state and the tokens since.

  The published form: the head of depth d reads the feature and the embeddings
  of the pending token and of the d tokens drafted on the path as they are, and
  each head has an output matrix of its own.

  Args:
    config: their shape.
    dtype: of the parameters and of the computation.
    rngs: for random parameters.

  Example:
    >>> from flax import nnx
    >>> import ldjax
    >>> config = ldjax.models.HydraMlpConfig(
    ...   num_heads=2, num_layers=1, hidden_size=8, vocab_size=11)
    >>> heads = HydraMlpHeads(config, rngs=nnx.Rngs(0))
    >>> fn, params = ldjax.models.functionalize_draft(heads)
    >>> params["heads"][1]["blocks"][0]["linear"]["weight"].shape
    (8, 24)

  Source: Ankner et al. 2024, "Hydra: sequentially-dependent draft heads for
  Medusa decoding", and its reference code.
  """

  def __init__(
    self,
    config: HydraMlpConfig,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    rngs: nnx.Rngs,
  ):
    super().__init__(config, dtype=dtype)
    self.embed = _heads.TargetEmbedding(
      config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs
    )
    self.heads = nnx.List(
      HydraMlpHead(config, depth, dtype=dtype, rngs=rngs)
      for depth in range(config.num_heads)
    )

  def _guess(self, depth: int, seen: Array) -> Array:
    head = self.heads[depth]
    return head.score(head(seen))

  def unroll(self, features: Array, tokens: Array) -> Array:
    """See `HeadsFn.unroll`; Y is E + 1, see `numbered`."""
    return _heads.numbered(super().unroll(features, tokens))

  def score(self, states: Array) -> Array:
    """See `HeadsFn.score`."""
    return _heads.score_numbered([head.score for head in self.heads], states)
