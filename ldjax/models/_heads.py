"""What the families of draft heads have in common."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, struct

from ldjax import _base, typing
from ldjax.models import _linear

Array = typing.Array


class Borrowed(nnx.Variable):
  """A matrix of the target's, neither trained nor stored with the draft."""


class TokenIds(nnx.Variable):
  """The target's id of each entry of a draft's vocabulary, never trained."""


def check_least(config: Any, **least: int) -> None:
  """Raises ValueError for a field of `config` below its least value."""
  for field, limit in least.items():
    if getattr(config, field) < limit:
      raise ValueError(
        f"{field} is {getattr(config, field)}; it must be at least {limit}"
      )


def check_eps(config: Any) -> None:
  """Raises ValueError for a `rms_norm_eps` that no norm can have."""
  if not 0 < config.rms_norm_eps < math.inf:
    raise ValueError(
      f"rms_norm_eps is {config.rms_norm_eps}; it must be above 0 and finite"
    )


def check_vocabulary(config: Any) -> None:
  """Raises ValueError for sizes of vocabularies and output that do not fit."""
  check_least(config, vocab_size=1)
  whole = config.target_vocab_size
  if whole is not None and whole < config.vocab_size:
    raise ValueError(
      f"vocab_size is {config.vocab_size}, but the target_vocab_size that it is"
      f" a part of is {whole}; it can be at most that"
    )
  rank = getattr(config, "output_rank", None)
  if rank is None:
    return
  if config.shared_output:
    raise ValueError(
      f"output_rank is {rank} and shared_output is set; the output matrix is"
      " either the draft's own or the target's, leave out one of them"
    )
  if not 1 <= rank <= min(config.hidden_size, config.vocab_size):
    raise ValueError(
      f"output_rank is {rank}; with hidden_size {config.hidden_size} and"
      f" vocab_size {config.vocab_size} it can be 1 to"
      f" {min(config.hidden_size, config.vocab_size)}"
    )


def embed_rows(config: Any) -> int:
  """V, rows of the target's embedding."""
  return config.target_vocab_size or config.vocab_size


def target_width(config: Any) -> int:
  """E, the width of the target that a draft is made for.

  Args:
    config: of the draft.

  Example:
    >>> import ldjax
    >>> target_width(ldjax.models.MedusaConfig(
    ...   num_heads=2, num_layers=1, hidden_size=8, vocab_size=11))
    8
  """
  return getattr(config, "target_size", config.hidden_size)


class TargetEmbedding(nnx.Module):
  """The target's embedding [V, E], borrowed."""

  def __init__(
    self,
    vocab_size: int,
    size: int,
    *,
    dtype: jax.typing.DTypeLike,
    rngs: nnx.Rngs,
  ):
    self.weight = Borrowed(
      jax.random.normal(rngs.params(), (vocab_size, size), dtype)
    )

  def __call__(self, tokens: Array, dtype: jax.typing.DTypeLike) -> Array:
    # The tokens of invalid nodes are -1: any row will do, nobody reads it.
    return self.weight[...].at[tokens].get(mode="clip").astype(dtype)


class Output(nnx.Module):
  """Logits of states, by one of three layouts.

  The target's rows (`shared_output`): `weight` [W, E] borrowed, behind
  `project` [E, R] where the state has another width. Low rank: `up` [W, r]
  behind `down` [r, R]. Else `weight` [W, R].
  """

  def __init__(
    self,
    config: Any,
    *,
    dtype: jax.typing.DTypeLike,
    rngs: nnx.Rngs,
  ):
    width, vocab = config.hidden_size, config.vocab_size
    rank = getattr(config, "output_rank", None)

    def make(inputs, outputs):
      return _linear.Linear(
        inputs, outputs, use_bias=False, dtype=dtype, rngs=rngs
      )

    shared = config.shared_output
    outer = target_width(config) if shared else width
    low = rank is not None
    self.project = make(width, outer) if outer != width else None
    self.down = make(width, rank) if low else None
    self.up = make(rank, vocab) if low else None
    if low:
      self.weight = None
    elif shared:
      self.weight = Borrowed(make(outer, vocab).weight[...])
    else:
      self.weight = make(outer, vocab).weight

  def __call__(self, states: Array) -> Array:
    """Returns logits [..., W] float32 of states [..., R]."""
    for layer in (self.project, self.down):
      if layer is not None:
        states = layer(states)
    matrix = self.weight if self.up is None else self.up.weight
    assert matrix is not None
    weight = matrix[...]
    return _linear.linear(
      states.astype(weight.dtype), weight, out_dtype=jnp.float32
    )


@struct.dataclass(kw_only=True)
class Level:
  """The nodes that the next call's nodes stand on."""

  values: Array
  """[B, n, Y], what each of them hands to its children."""
  first: int = struct.field(pytree_node=False)
  """The number of the first of them."""
  depth: int = struct.field(pytree_node=False)
  """How deep they stand; the root at 0."""

  def below(self, depth: int) -> int:
    """The depth of the next level, if guesses reach so far.

    Args:
      depth: D, that of the draft.

    Raises:
      ValueError: if they do not, naming both numbers.
    """
    if self.depth + 1 >= depth:
      raise ValueError(
        f"a guess of {self.depth + 2} tokens ahead is asked for; this draft"
        f" guesses {depth}, so grow the tree to depth {depth} at most"
      )
    return self.depth + 1

  def of_parents(self, parents: Array) -> Array:
    """The values [B, m, Y] of the nodes `parents` [B, m]."""
    return jax.vmap(lambda x, at: x.at[at].get(mode="clip"))(
      self.values, parents - self.first
    )

  def followed_by(self, values: Array) -> "Level":
    """The next level, of nodes with `values` [B, m, Y]."""
    return Level(
      values=values,
      first=self.first + self.values.shape[1],
      depth=self.depth + 1,
    )


def ahead(x: Array, by: int) -> Array:
  """x [B, S, ...] with entry t from position t + by, zero past the end."""
  by = min(by, x.shape[1])
  pad = [(0, 0)] * x.ndim
  pad[1] = (0, by)
  return jnp.pad(x[:, by:], pad)


def numbered(states: Array) -> Array:
  """States with the number of their head, by whose matrix they are scored.

  Args:
    states: [..., C, E], one of each head.

  Returns:
    [..., C, E + 1], the last entry is the number.
  """
  number = jnp.arange(states.shape[-2], dtype=jnp.int32).astype(states.dtype)
  number = jnp.broadcast_to(number[:, None], (*states.shape[:-1], 1))
  return jnp.concatenate([states, number], axis=-1)


def score_numbered(
  scores: Sequence[Callable[[Array], Array]], states: Array
) -> Array:
  """Logits [..., W] of what `numbered` gave.

  Args:
    scores: one for each head, [..., E] -> [..., W].
    states: [..., E + 1], of any heads.
  """
  states, number = states[..., :-1], states[..., -1:]
  logits = scores[0](states)
  for index, score in enumerate(scores[1:], 1):
    logits = jnp.where(number == index, score(states), logits)
  return logits


class Heads(nnx.Module):
  """Heads whose state is the feature of the last committed position.

  Args:
    config: of the family.
    dtype: of the parameters and of the computation.
  """

  observes_all = False
  """See `DraftFn.observes_all`."""

  def __init__(self, config: Any, *, dtype: jax.typing.DTypeLike):
    self.config = config
    self.dtype = jnp.dtype(dtype)
    self.token_ids = (
      None
      if config.target_vocab_size is None
      else TokenIds(jnp.arange(config.vocab_size, dtype=jnp.int32))
    )

  @staticmethod
  def empty(config: Any, dtype: Any, batch: int, max_len: int | None) -> Any:
    """The state of B rows that know nothing."""
    del max_len
    return jnp.zeros((batch, config.feature_size), dtype)

  @staticmethod
  def release(state: Any, mask: Array) -> Any:
    """Forgets the rows where `mask` [B] is true."""
    return jnp.where(mask[:, None], 0, state)

  def observe(self, state: Any, observation: _base.Observation) -> Any:
    """The state after positions were committed."""
    return _base.last_observed(observation, state)
