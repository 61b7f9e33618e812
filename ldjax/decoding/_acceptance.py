"""Accepting is a walk: draw, step to the child that carries it, draw there."""

import jax
import jax.numpy as jnp
from jax import lax

from ldjax import _base, typing
from ldjax import sampling as sampling_lib

Array = typing.Array


def accept(
  scores: _base.Scores,
  candidates: _base.Candidates,
  sampling: sampling_lib.Sampling,
  position: Array,
  *,
  depth: int,
  stop_ids: Array,
  remaining: Array,
) -> _base.Acceptance:
  """Walks down each row's tree along the tokens that the target draws.

  The target's token at a position is drawn once, whatever was proposed, so
  the walk emits the same tokens for every tree. It ends where no child
  carries the drawn token (the bonus token), at a stop id, when `remaining`
  tokens were drawn, or before a node whose logits are not finite.

  Args:
    scores: [B, T, V].
    candidates: [B, T].
    sampling: of B rows.
    position: [B] int32, absolute position of the root.
    depth: D, the most nodes below the root on one path.
    stop_ids: [B, X] int32; -1 where there is none.
    remaining: [B] int32, how many tokens may be drawn; 0 for an idle row.

  Returns:
    `Acceptance` with D + 1 columns.

  Example:
    >>> import jax.numpy as jnp
    >>> from ldjax import decoding, sampling
    >>> logits = jnp.eye(4)[None, [1, 2, 3]] * 9  # node 0 wants 1, 1 wants 2
    >>> walk = accept(
    ...   decoding.Scores(logits),
    ...   decoding.Candidates(
    ...     jnp.array([[-1, 1, 3]]), jnp.array([[-1, 0, 0]])),
    ...   sampling.make_sampling(1), jnp.array([7]), depth=1,
    ...   stop_ids=jnp.array([[-1]]), remaining=jnp.array([5]))
    >>> walk.path.tolist(), walk.tokens.tolist(), walk.count.tolist()
    ([[0, 1]], [[1, 2]], [2])

  Source: Miao et al. 2023 (SpecInfer) for the tree; Daliri, Musco, Suresh
  2024 for the coupling.
  """
  logits, parents = scores.logits, candidates.parents
  batch = logits.shape[0]
  columns = jnp.arange(depth + 1, dtype=jnp.int32)[None]
  # Invalid nodes and the root can never match a drawn token.
  carried = jnp.where(parents < 0, -1, candidates.tokens)

  def body(carry):
    level, node, going, walk = carry
    here = jnp.take_along_axis(logits, node[:, None, None], axis=1)[:, 0]
    # -inf is how a target rules ids out; NaN, +inf or nothing left is not.
    finite = jnp.isfinite(jnp.max(here, axis=-1))
    drawn = sampling_lib.draw(here, sampling, position + level + 1)
    broke = going & ~finite
    going = going & finite
    at = going[:, None] & (columns == level)
    stopped = going & jnp.any(drawn[:, None] == stop_ids, axis=-1)
    walk = _base.Acceptance(
      path=jnp.where(at, node[:, None], walk.path),
      tokens=jnp.where(at, drawn[:, None], walk.tokens),
      count=walk.count + going.astype(jnp.int32),
      stopped=walk.stopped | stopped,
      finite=walk.finite & ~broke,
    )
    child = (parents == node[:, None]) & (carried == drawn[:, None])
    going = going & ~stopped & (walk.count < remaining) & jnp.any(child, -1)
    node = jnp.where(going, jnp.argmax(child, -1).astype(jnp.int32), node)
    return level + 1, node, going, walk

  def condition(carry):
    level, _, going, _ = carry
    return (level <= depth) & jnp.any(going)

  walk = _base.Acceptance(
    path=jnp.zeros((batch, depth + 1), jnp.int32),
    tokens=jnp.full((batch, depth + 1), -1, jnp.int32),
    count=jnp.zeros((batch,), jnp.int32),
    stopped=jnp.zeros((batch,), bool),
    finite=jnp.ones((batch,), bool),
  )
  start = (jnp.int32(0), jnp.zeros((batch,), jnp.int32), remaining > 0, walk)
  with jax.named_scope("accept"):
    return lax.while_loop(condition, body, start)[-1]
