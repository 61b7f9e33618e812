"""The draft that proposes nothing, and what drafts have in common."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from ldjax import _base, typing

Array = typing.Array


def pending(context: _base.DraftContext) -> Array:
  """The pending token [B] of each row; anything in a row without tokens."""
  last = jnp.maximum(context.length - 1, 0)[:, None]
  return jnp.take_along_axis(context.tokens, last, axis=1)[:, 0]


def with_root(tokens: Array, parents: Array) -> _base.Candidates:
  """Candidates of a tree's nodes besides the root, [B, T - 1] each."""
  root = jnp.full((tokens.shape[0], 1), -1, jnp.int32)
  return _base.Candidates(
    jnp.concatenate([root, tokens.astype(jnp.int32)], axis=1),
    jnp.concatenate([root, parents.astype(jnp.int32)], axis=1),
  )


def _propose_root(draft_params, draft_state, context):
  del draft_params
  nothing = jnp.zeros((context.length.shape[0], 0), jnp.int32)
  return with_root(nothing, nothing), draft_state


_ROOT_ONLY = _base.DraftFn(
  init=lambda draft_params, batch: (),
  propose=_propose_root,
  observe=lambda draft_params, draft_state, observation: draft_state,
  release=lambda draft_state, mask: draft_state,
  size=1,
  depth=0,
  observes_all=False,
)


def root_only(draft: _base.DraftFn | None = None) -> _base.DraftFn:
  """A draft that proposes nothing, so that a round is one plain step.

  Drafts that share their state, as the trees over one `HeadsFn` do, have one
  root-only form.

  Args:
    draft: whose state to keep up to date meanwhile, so that a state can move
      between this draft and that one; None for no state.

  Returns:
    `DraftFn` of size 1.

  Example:
    >>> root_only().size
    1
  """
  if draft is None:
    return _ROOT_ONLY
  if draft.size == 1:
    return draft
  return draft._replace(propose=_propose_root, size=1, depth=0)


def over_heads(
  heads: _base.HeadsFn,
  propose: Callable[..., tuple[_base.Candidates, Any]] = _propose_root,
  size: int = 1,
  depth: int = 0,
) -> _base.DraftFn:
  """A draft over the state of heads; by default the root alone."""
  return _base.DraftFn(
    init=heads.init,
    propose=propose,
    observe=heads.observe,
    release=heads.release,
    size=size,
    depth=depth,
    observes_all=heads.observes_all,
  )
