"""Drafts that come with ldjax, behind the contract of `DraftFn`."""

import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from ldjax import _base, typing
from ldjax.decoding import _tree

Array = typing.Array


class Heads(Protocol):
  """What `medusa` needs to know of draft heads (`models.HeadsFn` fits)."""

  @property
  def num_heads(self) -> int:
    """C, tokens ahead that are guessed."""

  @property
  def vocab_size(self) -> int:
    """V."""

  @property
  def feature_size(self) -> int:
    """X, the width of the target's features."""

  @property
  def dtype(self) -> Any:
    """Of the features."""

  def apply(self, params: Any, feature: Array, /) -> Array:
    """Returns logits [B, C, V] float32 of features [B, X]."""

  def __hash__(self) -> int: ...


def _keep(draft_params, draft_state, *_):
  del draft_params
  return draft_state


def _stateless_init(draft_params, batch):
  del draft_params, batch
  return ()


def _chain_parents(batch: int, size: int) -> Array:
  parents = jnp.arange(-1, size - 1, dtype=jnp.int32)
  return jnp.broadcast_to(parents[None], (batch, size))


def root_only(draft: _base.DraftFn | None = None) -> _base.DraftFn:
  """A draft that proposes nothing, so that a round is one plain step.

  Args:
    draft: whose state to keep up to date meanwhile, so that a state can move
      between this draft and that one; None for no state.

  Example:
    >>> root_only().size
    1
  """
  if draft is not None and draft.size == 1:
    return draft
  return _root_only(draft)


@functools.lru_cache(maxsize=64)
def _root_only(draft: _base.DraftFn | None) -> _base.DraftFn:
  def propose(draft_params, draft_state, context):
    del draft_params
    batch = context.length.shape[0]
    tokens = jnp.full((batch, 1), -1, jnp.int32)
    return _base.Candidates(tokens, _chain_parents(batch, 1)), draft_state

  if draft is None:
    return _base.DraftFn(
      _stateless_init, propose, _keep, lambda state, mask: state, 1, 0
    )
  return draft._replace(propose=propose, size=1, depth=0)


def ngram(depth: int = 3, max_match: int = 4) -> _base.DraftFn:
  """Drafts what followed the longest, then latest, repeat of the text's end.

  It needs no weights and no training, and runs on the device inside the step.
  A repeat that runs into the end of the text is taken to go on repeating.

  Args:
    depth: tokens to draft, at least 1.
    max_match: longest suffix to compare, in tokens, at least 1.

  Raises:
    ValueError: for a depth or match below 1.

  Example:
    >>> import jax.numpy as jnp
    >>> from ldjax import decoding, sampling
    >>> draft = ngram(3)
    >>> context = decoding.DraftContext(
    ...   jnp.array([[5, 6, 7, 8, 5, 6, 0, 0]]), jnp.array([6]),
    ...   sampling.make_sampling(1))
    >>> candidates, _ = draft.propose((), (), context)
    >>> candidates.tokens.tolist()
    [[-1, 7, 8, 5]]

  Source: Saxena 2023, "Prompt lookup decoding"; Yang et al. 2023 (LLMA).
  """
  for name, value in (("depth", depth), ("max_match", max_match)):
    if value < 1:
      raise ValueError(f"{name} is {value}; it must be at least 1")
  return _ngram(depth, max_match)


@functools.lru_cache(maxsize=64)
def _ngram(depth: int, max_match: int) -> _base.DraftFn:
  def continuation(tokens, length):
    place = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    matching = place < length - 1
    matched = jnp.zeros_like(place)
    for back in range(min(max_match, tokens.shape[0])):
      wanted = tokens.at[length - 1 - back].get(mode="clip")
      # roll() wraps around; entries from before the text do not count.
      matching &= (jnp.roll(tokens, back) == wanted) & (place >= back)
      matching &= length - 1 - back >= 0
      matched += matching.astype(jnp.int32)
    # Longest match first, latest among equals; neither product overflows
    # below 2**31 / max_match positions.
    score = jnp.where(matched > 0, matched * tokens.shape[0] + place, -1)
    found = jnp.argmax(score).astype(jnp.int32)
    period = jnp.maximum(length - 1 - found, 1)
    ahead = found + 1 + jnp.arange(depth, dtype=jnp.int32) % period
    drafted = tokens.at[ahead].get(mode="fill", fill_value=-1)
    return jnp.where(score[found] >= 0, drafted, -1)

  def propose(draft_params, draft_state, context):
    del draft_params
    batch = context.length.shape[0]
    drafted = jax.vmap(continuation)(context.tokens, context.length)
    tokens = jnp.concatenate(
      [jnp.full((batch, 1), -1, jnp.int32), drafted], axis=1
    )
    parents = _chain_parents(batch, depth + 1)
    return _base.Candidates(tokens, parents), draft_state

  return _base.DraftFn(
    _stateless_init,
    propose,
    _keep,
    lambda state, mask: state,
    depth + 1,
    depth,
  )


def last_observed(observation: _base.Observation, previous: Array) -> Array:
  """The feature of each row's last committed position.

  Args:
    observation: with features [R, C, X].
    previous: [B, X], what was known before.

  Returns:
    [B, X]; rows of which nothing was committed keep what they had.
  """
  last = jnp.maximum(observation.count - 1, 0)
  newest = jnp.take_along_axis(
    observation.features, last[:, None, None], axis=1
  )[:, 0]
  batch = previous.shape[0]
  rows = jnp.where(observation.count > 0, observation.rows, batch)
  return previous.at[rows].set(newest.astype(previous.dtype), mode="drop")


def medusa(heads: Heads, tree: _tree.TokenTree) -> _base.DraftFn:
  """Fills a static tree with the best guesses of independent heads.

  Args:
    heads: for example `models.HeadsFn`; head i guesses depth i + 1.
    tree: its ranks say which of a head's guesses stands at a node.

  Raises:
    ValueError: if the tree is deeper than there are heads, or ranks a token
      beyond the vocabulary; both numbers are named.

  Example:
    >>> from flax import nnx
    >>> from ldjax import decoding, models
    >>> fn, params = models.functionalize_heads(models.MedusaHeads(
    ...   models.MedusaConfig(
    ...     num_heads=2, num_layers=1, hidden_size=8, vocab_size=11),
    ...   rngs=nnx.Rngs(0)))
    >>> draft = medusa(fn, decoding.TokenTree.product([3, 2]))
    >>> draft.size, draft.depth
    (10, 2)

  Source: Cai et al. 2024 (Medusa).
  """
  if tree.depth > heads.num_heads:
    raise ValueError(
      f"the tree is {tree.depth} deep but there are {heads.num_heads} heads;"
      " give a tree no deeper than the heads"
    )
  widest = max(tree.ranks) + 1
  if widest > heads.vocab_size:
    raise ValueError(
      f"the tree ranks {widest} tokens but the heads know {heads.vocab_size}"
    )
  return _medusa(heads, tree, widest)


@functools.lru_cache(maxsize=64)
def _medusa(heads: Any, tree: _tree.TokenTree, widest: int) -> _base.DraftFn:
  # Node i > 0 takes guess `ranks[i]` of head `depths[i] - 1`.
  head = tuple(depth - 1 for depth in tree.depths[1:])

  def init(draft_params, batch):
    del draft_params
    return jnp.zeros((batch, heads.feature_size), heads.dtype)

  def propose(draft_params, draft_state, context):
    batch = context.length.shape[0]
    root = jnp.full((batch, 1), -1, jnp.int32)
    if head:
      logits = heads.apply(draft_params, draft_state)
      _, best = lax.top_k(logits, widest)
      drafted = best[
        :, jnp.array(head, jnp.int32), jnp.array(tree.ranks[1:], jnp.int32)
      ]
      tokens = jnp.concatenate([root, drafted.astype(jnp.int32)], axis=1)
    else:
      tokens = root
    parents = jnp.broadcast_to(
      jnp.array(tree.parents, jnp.int32)[None], (batch, tree.size)
    )
    return _base.Candidates(tokens, parents), draft_state

  def observe(draft_params, draft_state, observation):
    del draft_params
    return last_observed(observation, draft_state)

  return _base.DraftFn(
    init, propose, observe, lambda state, mask: state, tree.size, tree.depth
  )
