"""A tree of fixed size whose nodes are the guesses that are likeliest right."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ldjax import _base, typing
from ldjax.decoding import _draft, _largest, _ngram, _static_tree

Array = typing.Array


class _Nodes(NamedTuple):
  """Nodes that may enter the tree, parents before children."""

  tokens: Array
  """[B, n] int32."""
  parents: Array
  """[B, n] int32, places among all such nodes; -1 for the root."""
  scores: Array
  """[B, n] float32, log-probability of the path; -inf for no node."""


def _pick(values: Array, places: Array) -> Array:
  return jnp.take_along_axis(values, places, axis=1)


def _guesses(logits: Array, width: int) -> tuple[Array, Array]:
  """The best entries and log-probabilities [B, n, width] of [B, n, W] logits.

  What is not finite counts as ruled out: a draft may be broken.
  """
  logits = logits.astype(jnp.float32)
  logits = jnp.where(jnp.isfinite(logits), logits, -jnp.inf)
  top, best = _largest.largest(logits, width)
  scores = top - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
  # Where all are ruled out this is -inf - -inf.
  scores = jnp.where(jnp.isfinite(scores), jnp.minimum(scores, 0.0), -jnp.inf)
  return best, scores


def _grow(
  heads: _base.HeadsFn,
  params: Any,
  state: Any,
  pending: Array,
  width: int,
  depth: int,
  room: int,
) -> list[_Nodes]:
  """The heads' candidates, a level at a time.

  A node of depth d stands on d - 1 others, and before it in order of score
  come its better siblings and neighbours: what `room` has no place for is not
  looked at, which changes nothing.
  """
  batch = pending.shape[0]
  ids = heads.token_ids(params)
  carry, logits = heads.begin(params, state, pending)
  asked, first = 1, 0  # nodes of the deepest level, the number of its first
  total = 0  # candidates above the level
  scores = jnp.zeros((batch, 1), jnp.float32)
  places = jnp.full((batch, 1), -1, jnp.int32)
  levels = []
  for level in range(depth):
    each = min(width, heads.vocab_size, room - level)
    best, gained = (
      jnp.broadcast_to(x, (batch, asked, each)) for x in _guesses(logits, each)
    )
    below = (batch, asked * each)
    tokens = _static_tree.to_target(ids, best.reshape(below))
    nodes = _Nodes(
      tokens,
      jnp.repeat(places, each, axis=1),
      (scores[:, :, None] + gained).reshape(below),
    )
    levels.append(nodes)
    if level + 1 < depth:
      asked_above, asked = asked, min(width, room - level - 1, below[1])
      scores, chosen = lax.top_k(nodes.scores, asked)
      places = chosen + total
      total += below[1]
      carry, logits = heads.extend(
        params, state, carry, _pick(tokens, chosen), first + chosen // each
      )
      first += asked_above
  return levels


def _join(levels: list[_Nodes], chain: Array, gained: Array) -> list[_Nodes]:
  """Adds a chain's nodes [B, G] where the heads did not guess the same.

  A node that both guessed keeps the better of the two scores.

  Args:
    levels: candidates of the heads.
    chain: tokens.
    gained: [B] log-probability of each of them.
  """
  batch, size = chain.shape
  at = jnp.full((batch, 1), -1, jnp.int32)
  total = sum(nodes.tokens.shape[1] for nodes in levels)
  joined, parents, scores = list(levels), [], []
  first = 0
  for i in range(size):
    score = gained[:, None] * (i + 1)
    parents.append(at)
    own = jnp.full((batch, 1), total + i, jnp.int32)
    if i < len(levels):
      nodes = levels[i]
      # Off the heads' paths `at` is the parent of none of their nodes.
      hit = (nodes.tokens == chain[:, i, None]) & (nodes.parents == at)
      joined[i] = nodes._replace(
        scores=jnp.where(hit, jnp.maximum(nodes.scores, score), nodes.scores)
      )
      same = jnp.any(hit, axis=1, keepdims=True)
      place = first + jnp.argmax(hit, axis=1, keepdims=True).astype(jnp.int32)
      at = jnp.where(same, place, own)
      first += nodes.tokens.shape[1]
    else:
      same, at = jnp.zeros((batch, 1), bool), own
    scores.append(jnp.where(same, -jnp.inf, score))
  extra = _Nodes(
    chain, jnp.concatenate(parents, axis=1), jnp.concatenate(scores, axis=1)
  )
  return [*joined, extra]


def _keep_best(levels: list[_Nodes], room: int) -> _base.Candidates:
  """The tree of the `room` candidates with the best scores."""
  nodes = _Nodes(
    *(jnp.concatenate(values, axis=1) for values in zip(*levels, strict=True))
  )
  missing = max(room - nodes.tokens.shape[1], 0)
  pad = ((0, 0), (0, missing))
  nodes = _Nodes(
    jnp.pad(nodes.tokens, pad),
    jnp.pad(nodes.parents, pad, constant_values=-1),
    jnp.pad(nodes.scores, pad, constant_values=-jnp.inf),
  )
  # No node scores above its parent, and of equals the earlier one is taken: a
  # node is never taken without its parent.
  _, kept = lax.top_k(nodes.scores, room)
  kept = jnp.sort(kept, axis=1)
  tokens, above, scores = (_pick(values, kept) for values in nodes)
  parents = jnp.sum(kept[:, None, :] <= above[:, :, None], axis=2)
  return _draft.with_root(jnp.where(scores > -jnp.inf, tokens, -1), parents)


def dynamic_tree(
  heads: _base.HeadsFn,
  size: int,
  *,
  width: int = 4,
  depth: int | None = None,
  ngram: _ngram.NgramGuess | None = None,
) -> _base.DraftFn:
  """Grows the tree that the draft itself finds likeliest, anew each round.

  From level to level the `width` nodes of the highest probability are gone on
  from, with the `width` best guesses each; of all those, the `size - 1` of the
  highest probability are the tree. The probability of a node is the product of
  the draft's own along its path.

  With `ngram`, what followed an earlier repeat of the text's end stands beside
  the heads' guesses, node i of the chain at the i-th power of the acceptance
  that the length of the match has; a node that both found is there once, at
  the higher of its probabilities.

  Args:
    heads: for example of `models.functionalize_draft`.
    size: T, nodes of the tree, the root included.
    width: nodes to go on from at each level, and guesses after each of them.
    depth: D, levels to grow; default as many as the heads guess. No more than
      that, or than `size - 1`, are grown in any case.
    ngram: a chain from the text itself to merge in.

  Returns:
    `DraftFn` over the heads' own state. Where guesses are too few for the tree,
    or not finite, nodes hold token -1.

  Raises:
    ValueError: for a size, width or depth below 1.

  Example:
    >>> from ldjax import decoding, models
    >>> heads, _ = models.functionalize_draft(models.MedusaConfig(
    ...   num_heads=3, num_layers=1, hidden_size=8, vocab_size=11))
    >>> draft = dynamic_tree(heads, 8, ngram=decoding.NgramGuess(
    ...   depth=5, max_match=2, acceptance=(0.3, 0.8)))
    >>> draft.size, draft.depth
    (8, 5)

  Source: Li et al. 2024, "EAGLE-2: faster inference of language models with
  dynamic draft trees".
  """
  for name, value in (("size", size), ("width", width), ("depth", depth)):
    if value is not None and value < 1:
      raise ValueError(f"{name} is {value}; it must be at least 1")
  levels = min(heads.depth if depth is None else depth, heads.depth, size - 1)
  return _dynamic_tree(heads, size, width, levels, ngram)


@functools.lru_cache(maxsize=64)
def _dynamic_tree(
  heads: _base.HeadsFn,
  size: int,
  width: int,
  depth: int,
  ngram: _ngram.NgramGuess | None,
) -> _base.DraftFn:
  room = size - 1
  if not room:
    return _draft.over_heads(heads)
  chain_depth = min(ngram.depth, room) if ngram else 0

  def propose(draft_params, draft_state, context):
    pending = _draft.pending(context)
    levels = _grow(
      heads, draft_params, draft_state, pending, width, depth, room
    )
    if ngram:
      chain, matched = _ngram.continuation(
        context.tokens, context.length, chain_depth, ngram.max_match
      )
      levels = _join(levels, chain, ngram.log_acceptance(matched))
    return _keep_best(levels, room), draft_state

  return _draft.over_heads(heads, propose, size, max(depth, chain_depth))
