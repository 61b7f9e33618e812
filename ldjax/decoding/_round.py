"""One round: draft a tree, verify it in one pass, accept, commit."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ldjax import _base, typing
from ldjax import sampling as sampling_lib
from ldjax.decoding import _acceptance, _state

Array = typing.Array
DecodeState = _state.DecodeState
Status = _base.Status


def _depths(parents: Array) -> Array:
  """Distance of each node [B, T] from its root."""

  def one(parents):
    def level(i, depth):
      parent = parents[i]
      below = depth.at[parent].get(mode="clip") + 1
      return depth.at[i].set(jnp.where(parent < 0, 0, below))

    return lax.fori_loop(0, parents.shape[0], level, jnp.zeros_like(parents))

  return jax.vmap(one)(parents)


def _checked(draft: _base.DraftFn, proposed: Any, batch: int) -> Any:
  """What a draft proposed, so that nothing in it can change the text.

  A node whose parent is not an earlier node is made invalid: the ancestors
  that it would see could not be what they seem.

  Raises:
    TypeError: where it is not what `DraftFn.propose` must return.
  """
  wanted = (batch, draft.size)
  if not (
    isinstance(proposed, tuple)
    and len(proposed) == 2
    and isinstance(proposed[0], _base.Candidates)
    and all(
      isinstance(x, jax.Array) and x.shape == wanted and x.dtype == jnp.int32
      for x in proposed[0]
    )
  ):
    shapes = jax.tree.map(jnp.shape, proposed)
    raise TypeError(
      f"propose of a draft of size {draft.size} must return"
      f" (Candidates(tokens, parents), state) with int32 arrays {list(wanted)}"
      f" for {batch} rows; it returned {shapes} (shapes, or other things)"
    )
  candidates, draft_state = proposed
  column = jnp.arange(draft.size, dtype=jnp.int32)[None]
  earlier = (candidates.parents >= 0) & (candidates.parents < column)
  parents = jnp.where(earlier, candidates.parents, -1)
  return candidates._replace(parents=parents), draft_state


def _append(
  state: DecodeState, rows: Array, tokens: Array, count: Array
) -> tuple[Array, Array]:
  """Writes count[r] of tokens [R, X] to the ends of `rows`."""
  column = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
  capacity = state.tokens.shape[1]
  place = jnp.where(
    column < count[:, None], state.length[rows][:, None] + column, capacity
  )
  return (
    state.tokens.at[rows[:, None], place].set(tokens, mode="drop"),
    state.length.at[rows].add(count),
  )


def _walk(
  target: _base.TargetFn,
  accept: _acceptance.Rule,
  params: Any,
  hidden: Array,
  depths: Array,
  candidates: _base.Candidates,
  sampling: sampling_lib.Sampling,
  history: sampling_lib.History,
  *,
  remaining: Array,
  **settings: Any,
) -> _base.Acceptance:
  """Accepts by the target's draws where it makes them, else by its logits.

  Args:
    target: the model.
    accept: the rule; a foreign one is given logits.
    params: the model's weights.
    hidden: [R, T, E].
    depths: [R, T] int32, of the nodes.
    candidates: [R, T].
    sampling: of R rows, as `history`.
    history: what stands before the nodes.
    remaining: [R] int32.
    **settings: the other arguments of `accept`.
  """

  def walk(scores):
    return accept(
      scores, candidates, sampling, history, remaining=remaining, **settings
    )

  def scored(params, hidden):
    with jax.named_scope("verify"):
      scores = target.score(params, hidden)
    return walk(scores)

  if target.draw is None or accept is not _acceptance.accept:
    return scored(params, hidden)

  def drawn(params, hidden):
    assert target.draw is not None
    emitted = history.length - history.prompt_length
    # A deeper node has emitted more, so that the root decides.
    to_emit = sampling.min_new_tokens - emitted
    wanted = remaining > 0
    with jax.named_scope("verify"):
      draws = target.draw(
        params,
        hidden,
        dataclasses.replace(sampling, min_new_tokens=to_emit),
        history.length[:, None] + depths,
        wanted,
      )
    if draws is None:
      return scored(params, hidden)
    return lax.cond(
      jnp.all(draws.exact | ~wanted[:, None]),
      lambda: walk(draws),
      lambda: scored(params, hidden),
    )

  return lax.platform_dependent(
    params, hidden, default=scored, **dict.fromkeys(target.draw_on, drawn)
  )


def _settle(
  draft: _base.DraftFn,
  draft_params: Any,
  state: DecodeState,
  output: _base.TargetOutput,
  block_tokens: Array,
  walk: _base.Acceptance,
  active: Array,
  rows: Array,
  candidates: _base.Candidates,
  *,
  path: Array,
  commit_count: Array,
  emits: Array,
) -> tuple[DecodeState, _base.Round]:
  """Commits `path`, tells the draft, and moves the rows on.

  Args:
    draft: the draft.
    draft_params: its weights.
    state: of B rows.
    output: of the forward pass over R rows.
    block_tokens: [R, T], what the pass read.
    walk: of R rows; counts only where `emits`.
    active: [R] bool, rows that this round works on.
    rows: [R] int32.
    candidates: what was verified, for the record.
    path: [R, X] nodes to commit.
    commit_count: [R], how many of them.
    emits: [R] bool, whether the walk's tokens are emitted.
  """
  with jax.named_scope("commit"):
    healthy = walk.finite | (walk.count > 0) | ~emits
    commit_count = jnp.where(active & healthy, commit_count, 0)
    start = state.cache.length[rows]
    cache, ok = state.cache.commit(output.block_kv, path, commit_count, rows)
    commit_count = jnp.where(ok, commit_count, 0)
    count = jnp.where(active & emits & ok, walk.count, 0)
    tokens, length = _append(state, rows, walk.tokens, count)
    picked = jax.vmap(lambda x, p: x.at[p].get(mode="clip"))
    column = jnp.arange(path.shape[1], dtype=jnp.int32)[None]
    draft_state = draft.observe(
      draft_params,
      state.draft,
      _base.Observation(
        rows=rows,
        tokens=picked(block_tokens, path),
        features=picked(output.features, path),
        positions=start[:, None] + column,
        count=commit_count,
      ),
    )
    status = state.status[rows]
    status = jnp.where(
      count == 0,
      status,
      jnp.where(
        walk.stopped,
        Status.STOPPED,
        jnp.where(
          length[rows] >= state.limit[rows], Status.LENGTH, Status.RUNNING
        ),
      ),
    )
    finite = jnp.where(active, walk.finite | ~emits, state.finite[rows])
    needs_pages = jnp.where(active, ~ok, state.needs_pages[rows])
    state = dataclasses.replace(
      state,
      cache=cache,
      draft=draft_state,
      tokens=tokens,
      length=length,
      status=state.status.at[rows].set(status),
      finite=state.finite.at[rows].set(finite),
      needs_pages=state.needs_pages.at[rows].set(needs_pages),
      rounds=state.rounds.at[rows].add((count > 0).astype(jnp.int32)),
    )
  column = jnp.arange(walk.tokens.shape[1], dtype=jnp.int32)[None]
  emitted = _base.Round(
    tokens=jnp.where(column < count[:, None], walk.tokens, -1),
    logprobs=jnp.where(column < count[:, None], walk.logprobs, 0.0),
    count=count,
    status=status,
    finite=finite,
    needs_pages=needs_pages,
    path=walk.path,
    candidates=candidates,
    rows=rows,
  )
  return state, emitted


def step(
  target: _base.TargetFn,
  draft: _base.DraftFn,
  params: _base.DecoderParams,
  state: DecodeState,
  *,
  accept: _acceptance.Rule = _acceptance.accept,
) -> tuple[DecodeState, _base.Round]:
  """Takes one round on all running rows."""
  context = _base.DraftContext(state.tokens, state.length, state.sampling)
  with jax.named_scope("draft"):
    candidates, draft_state = _checked(
      draft,
      draft.propose(params.draft, state.draft, context),
      state.length.shape[0],
    )
  state = dataclasses.replace(state, draft=draft_state)
  with jax.named_scope("verify"):
    pending = jnp.take_along_axis(
      state.tokens, jnp.maximum(state.length - 1, 0)[:, None], axis=1
    )
    # Invalid nodes read token 0: a target never meets a negative id.
    drafted = jnp.maximum(candidates.tokens[:, 1:], 0)
    block = jnp.concatenate([pending, drafted], axis=1)
    depths = _depths(candidates.parents)
    positions = state.cache.length[:, None] + depths
    output = target.forward(
      params.target, block, positions, candidates.parents, state.cache.view()
    )
  active = state.status == Status.RUNNING
  walk = _walk(
    target,
    accept,
    params.target,
    output.hidden,
    depths,
    candidates,
    state.sampling,
    sampling_lib.History(state.tokens, state.prompt_length, state.length),
    depth=draft.depth,
    stop_ids=state.stop_ids,
    remaining=jnp.where(active, state.limit - state.length, 0),
  )
  return _settle(
    draft,
    params.draft,
    state,
    output,
    block,
    walk,
    active,
    jnp.arange(active.shape[0], dtype=jnp.int32),
    candidates,
    path=walk.path,
    commit_count=walk.count,
    emits=active,
  )


def prefill(
  target: _base.TargetFn,
  draft: _base.DraftFn,
  params: _base.DecoderParams,
  state: DecodeState,
  rows: Array,
  chunk: int,
  *,
  accept: _acceptance.Rule = _acceptance.accept,
) -> tuple[DecodeState, _base.Round]:
  """Reads the next `chunk` known tokens of `rows`; draws at their end."""
  done = state.cache.length[rows]
  known = state.length[rows]
  active = state.status[rows] == Status.PREFILLING
  column = jnp.arange(chunk, dtype=jnp.int32)[None]
  positions = done[:, None] + column
  block = state.tokens.at[rows[:, None], positions].get(
    mode="fill", fill_value=0
  )
  chain = jnp.broadcast_to(column - 1, positions.shape)
  count = jnp.where(active, jnp.clip(known - done, 0, chunk), 0)
  emits = active & (done + count == known) & (known < state.limit[rows])
  with jax.named_scope("verify"):
    output = target.forward(
      params.target, block, positions, chain, state.cache.view(rows)
    )
    last = jnp.maximum(count - 1, 0)[:, None]
    hidden = jnp.take_along_axis(output.hidden, last[..., None], axis=1)
  root = _base.Candidates(
    jnp.full((rows.shape[0], 1), -1, jnp.int32),
    jnp.full((rows.shape[0], 1), -1, jnp.int32),
  )
  walk = _walk(
    target,
    accept,
    params.target,
    hidden,
    jnp.zeros_like(root.parents),
    root,
    jax.tree.map(lambda x: x[rows], state.sampling),
    sampling_lib.History(state.tokens[rows], state.prompt_length[rows], known),
    depth=0,
    stop_ids=state.stop_ids[rows],
    remaining=emits.astype(jnp.int32),
  )
  return _settle(
    draft,
    params.draft,
    state,
    output,
    block,
    walk,
    active,
    rows,
    root,
    path=jnp.broadcast_to(column, positions.shape),
    commit_count=count,
    emits=emits,
  )
