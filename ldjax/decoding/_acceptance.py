"""Accepting is a walk: draw, step to the child that carries it, draw there."""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from ldjax import _base, typing
from ldjax import sampling as sampling_lib

Array = typing.Array
Rule: TypeAlias = Callable[..., _base.Acceptance]
"""What `accept` is: same arguments, same result."""


def _logprob(logits: Array, token: Array, wanted: Array) -> Array:
  """log softmax(logits [B, V])[token [B]], 0 in rows where nobody asks."""

  def compute():
    chosen = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
    value = chosen - jax.nn.logsumexp(logits, axis=-1)
    return jnp.where(wanted, value, 0.0)

  return lax.cond(
    jnp.any(wanted), compute, lambda: jnp.zeros(token.shape, jnp.float32)
  )


Opinion: TypeAlias = Callable[
  [Array, sampling_lib.History], tuple[Array, Array, Array]
]
"""(node [B], the past there) -> the token drawn there, its log-probability,
whether the logits were finite; [B] each."""


def _by_logits(
  logits: Array, sampling: sampling_lib.Sampling, stop_ids: Array
) -> Opinion:
  def opinion(node, past):
    raw = jnp.take_along_axis(logits, node[:, None, None], axis=1)[:, 0]
    here = sampling_lib.adjust(raw, sampling, past, stop_ids)
    # -inf is how an id is ruled out; NaN, +inf or nothing left is a fault.
    finite = jnp.isfinite(jnp.max(here, axis=-1))
    drawn = sampling_lib.draw(here, sampling, past.length)
    return drawn, _logprob(raw, drawn, sampling.logprobs), finite

  return opinion


def _by_draws(draws: _base.Draws, wanted: Array) -> Opinion:
  def opinion(node, past):
    del past

    def there(x):
      return jnp.take_along_axis(x, node[:, None], axis=1)[:, 0]

    logprob = jnp.where(wanted, there(draws.logprobs), 0.0)
    return there(draws.tokens), logprob, there(draws.finite)

  return opinion


def accept(
  scores: _base.Scores | _base.Draws,
  candidates: _base.Candidates,
  sampling: sampling_lib.Sampling,
  history: sampling_lib.History,
  *,
  depth: int,
  stop_ids: Array,
  remaining: Array,
) -> _base.Acceptance:
  """Walks down each row's tree along the tokens that the target draws.

  The target's token at a position is drawn once, whatever was proposed, so
  the walk emits the same tokens for every tree. It ends where no child
  carries the drawn token (the bonus token), at a stop id, when `remaining`
  tokens were drawn, or before a node whose logits are not finite. A penalty
  at a node sees the history and the node's own path.

  Args:
    scores: [B, T, V]; or `Draws` [B, T], each made for the position that its
      node has, with nothing to adjust: they are only looked up.
    candidates: [B, T].
    sampling: of B rows.
    history: of B rows; its last token is the root.
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
    ...   sampling.make_sampling(1),
    ...   sampling.History(
    ...     jnp.array([[3, 0, -1, -1]]), jnp.array([2]), jnp.array([2])),
    ...   depth=1, stop_ids=jnp.array([[-1]]), remaining=jnp.array([5]))
    >>> walk.path.tolist(), walk.tokens.tolist(), walk.count.tolist()
    ([[0, 1]], [[1, 2]], [2])

  Source: Miao et al. 2023 (SpecInfer) for the tree; Daliri, Musco, Suresh
  2024 for the coupling.
  """
  parents = candidates.parents
  batch = parents.shape[0]
  opinion = (
    _by_draws(scores, sampling.logprobs)
    if isinstance(scores, _base.Draws)
    else _by_logits(scores.logits, sampling, stop_ids)
  )
  columns = jnp.arange(depth + 1, dtype=jnp.int32)[None]
  # Invalid nodes and the root can never match a drawn token.
  carried = jnp.where(parents < 0, -1, candidates.tokens)

  row = jnp.arange(batch, dtype=jnp.int32)

  def body(carry):
    level, node, going, past, walk = carry
    drawn, logprob, finite = opinion(node, past)
    broke = going & ~finite
    going = going & finite
    at = going[:, None] & (columns == level)
    stopped = going & jnp.any(drawn[:, None] == stop_ids, axis=-1)
    walk = _base.Acceptance(
      path=jnp.where(at, node[:, None], walk.path),
      tokens=jnp.where(at, drawn[:, None], walk.tokens),
      logprobs=jnp.where(at, logprob[:, None], walk.logprobs),
      count=walk.count + going.astype(jnp.int32),
      stopped=walk.stopped | stopped,
      finite=walk.finite & ~broke,
    )
    child = (parents == node[:, None]) & (carried == drawn[:, None])
    going = going & ~stopped & (walk.count < remaining) & jnp.any(child, -1)
    node = jnp.where(going, jnp.argmax(child, -1).astype(jnp.int32), node)
    past = past._replace(
      tokens=past.tokens.at[row, past.length].set(drawn, mode="drop"),
      length=past.length + 1,
    )
    return level + 1, node, going, past, walk

  def condition(carry):
    level, _, going, _, _ = carry
    return (level <= depth) & jnp.any(going)

  walk = _base.Acceptance(
    path=jnp.zeros((batch, depth + 1), jnp.int32),
    tokens=jnp.full((batch, depth + 1), -1, jnp.int32),
    logprobs=jnp.zeros((batch, depth + 1), jnp.float32),
    count=jnp.zeros((batch,), jnp.int32),
    stopped=jnp.zeros((batch,), bool),
    finite=jnp.ones((batch,), bool),
  )
  root = jnp.zeros((batch,), jnp.int32)
  start = (jnp.int32(0), root, remaining > 0, history, walk)
  with jax.named_scope("accept"):
    return lax.while_loop(condition, body, start)[-1]
