"""A tree whose shape is fixed, filled by draft heads."""

import functools

import jax.numpy as jnp
import numpy as np

from ldjax import _base, typing
from ldjax.decoding import _draft, _largest, _tree

Array = typing.Array


def to_target(ids: Array | None, guesses: Array) -> Array:
  """Token ids of the target, of entries of the draft's vocabulary."""
  guesses = guesses.astype(jnp.int32)
  return guesses if ids is None else ids[guesses]


def static_tree(heads: _base.HeadsFn, tree: _tree.TokenTree) -> _base.DraftFn:
  """Fills a tree of fixed shape with the best guesses of draft heads.

  The heads are asked once a depth, and only about nodes that have children.

  Args:
    heads: for example of `models.functionalize_draft`.
    tree: its ranks say which of the guesses after its parent stands at a node.

  Returns:
    `DraftFn` over the heads' own state, with `tree.size` nodes.

  Raises:
    ValueError: if the tree is deeper than the heads guess, or ranks a token
      beyond their vocabulary; both numbers are named.

  Example:
    >>> from ldjax import decoding, models
    >>> heads, _ = models.functionalize_draft(models.MedusaConfig(
    ...   num_heads=2, num_layers=1, hidden_size=8, vocab_size=11))
    >>> draft = static_tree(heads, decoding.TokenTree.product([3, 2]))
    >>> draft.size, draft.depth
    (10, 2)

  Source: Cai et al. 2024 (Medusa).
  """
  if tree.depth > heads.depth:
    raise ValueError(
      f"the tree is {tree.depth} deep but the draft guesses {heads.depth}"
      f" tokens ahead; give a tree no deeper than {heads.depth}"
    )
  widest = max(tree.ranks) + 1
  if widest > heads.vocab_size:
    raise ValueError(
      f"the tree ranks {widest} tokens but the draft knows"
      f" {heads.vocab_size}; give a tree with ranks below {heads.vocab_size}"
    )
  return _static_tree(heads, tree)


@functools.lru_cache(maxsize=64)
def _static_tree(heads: _base.HeadsFn, tree: _tree.TokenTree) -> _base.DraftFn:
  if tree.depth == 0:
    return _draft.over_heads(heads)
  size, parents, ranks = tree.size, tree.parents, tree.ranks
  levels = [
    [node for node in range(size) if tree.depths[node] == depth]
    for depth in range(tree.depth + 1)
  ]
  inner = [[node for node in level if node in parents] for level in levels]
  # Heads number the nodes that they are asked about, in that order.
  asked = [node for level in inner for node in level]
  # Tokens are found level by level; a tree may list its nodes otherwise.
  found_at = np.argsort([node for level in levels for node in level])[1:] - 1

  def rows_of(values, batch):
    row = jnp.array(values, jnp.int32)
    return jnp.broadcast_to(row[None], (batch, row.shape[0]))

  def propose(draft_params, draft_state, context):
    batch = context.length.shape[0]
    ids = heads.token_ids(draft_params)
    carry, logits = heads.begin(
      draft_params, draft_state, _draft.pending(context)
    )
    found: list[Array] = []
    for depth, above in enumerate(inner[:-1]):
      if depth:
        places = [levels[depth].index(node) for node in above]
        stand = rows_of([asked.index(parents[node]) for node in above], batch)
        carry, logits = heads.extend(
          draft_params,
          draft_state,
          carry,
          found[-1][:, np.array(places)],
          stand,
        )
      level = levels[depth + 1]
      widest = max(ranks[node] for node in level) + 1
      _, best = _largest.largest(logits, widest)
      best = jnp.broadcast_to(best, (batch, len(above), widest))
      chosen = [above.index(parents[i]) * widest + ranks[i] for i in level]
      guesses = best.reshape(batch, len(above) * widest)[:, np.array(chosen)]
      found.append(to_target(ids, guesses))
    tokens = jnp.concatenate(found, axis=1)[:, found_at]
    return _draft.with_root(tokens, rows_of(parents[1:], batch)), draft_state

  return _draft.over_heads(heads, propose, size, tree.depth)
