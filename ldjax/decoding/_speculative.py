"""One round: draft a tree, verify it in one pass, accept, commit."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ldjax import _base, typing
from ldjax import sampling as sampling_lib
from ldjax.decoding import _acceptance, _draft, _state

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
    needs_pages = active & ~ok
    state = state.replace(  # type: ignore[attr-defined]
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
    count=count,
    status=status,
    finite=finite,
    needs_pages=needs_pages,
    path=walk.path,
    candidates=candidates,
    rows=rows,
  )
  return state, emitted


def _step(target, draft, params, state):
  context = _base.DraftContext(state.tokens, state.length, state.sampling)
  with jax.named_scope("draft"):
    candidates, draft_state = draft.propose(params.draft, state.draft, context)
  state = state.replace(draft=draft_state)
  with jax.named_scope("verify"):
    pending = jnp.take_along_axis(
      state.tokens, jnp.maximum(state.length - 1, 0)[:, None], axis=1
    )
    block = jnp.concatenate([pending, candidates.tokens[:, 1:]], axis=1)
    positions = state.cache.length[:, None] + _depths(candidates.parents)
    output = target.forward(
      params.target, block, positions, candidates.parents, state.cache.view()
    )
    scores = target.score(params.target, output.hidden)
  active = state.status == Status.RUNNING
  walk = _acceptance.accept(
    scores,
    candidates,
    state.sampling,
    state.cache.length,
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


def _prefill(target, draft, params, state, rows, chunk):
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
    scores = target.score(
      params.target,
      jnp.take_along_axis(output.hidden, last[..., None], axis=1),
    )
  root = _base.Candidates(
    jnp.full((rows.shape[0], 1), -1, jnp.int32),
    jnp.full((rows.shape[0], 1), -1, jnp.int32),
  )
  walk = _acceptance.accept(
    scores,
    root,
    jax.tree.map(lambda x: x[rows], state.sampling),
    known - 1,
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


def _admit(
  state, row, prompt, prompt_length, sampling, max_new_tokens, stop_ids
):
  capacity = state.tokens.shape[1]
  limit = jnp.minimum(prompt_length + max_new_tokens, capacity)
  at = jnp.arange(capacity, dtype=jnp.int32) < prompt_length
  tokens = jnp.zeros((capacity,), jnp.int32)
  width = min(prompt.shape[0], capacity)
  tokens = jnp.where(at, tokens.at[:width].set(prompt[:width]), 0)
  status = jnp.where(
    limit > prompt_length, Status.PREFILLING, Status.LENGTH
  ).astype(jnp.int32)

  def put(field, value):
    return field.at[row].set(value)

  return state.replace(
    tokens=put(state.tokens, tokens),
    length=put(state.length, prompt_length),
    prompt_length=put(state.prompt_length, prompt_length),
    limit=put(state.limit, limit),
    stop_ids=put(state.stop_ids, stop_ids),
    sampling=jax.tree.map(put, state.sampling, sampling),
    status=put(state.status, status),
    finite=put(state.finite, True),
    needs_pages=put(state.needs_pages, False),
    rounds=put(state.rounds, 0),
  )


def _preempt(draft, state, mask):
  """Gives pages back; the rows will read all their known tokens again."""
  mask = mask & (
    (state.status == Status.RUNNING) | (state.status == Status.PREFILLING)
  )
  return state.replace(
    cache=state.cache.release(mask),
    draft=draft.release(state.draft, mask),
    status=jnp.where(mask, Status.PREFILLING, state.status),
    needs_pages=state.needs_pages & ~mask,
  )


def _release(draft, state, mask):
  return state.replace(
    cache=state.cache.release(mask),
    draft=draft.release(state.draft, mask),
    length=jnp.where(mask, 0, state.length),
    prompt_length=jnp.where(mask, 0, state.prompt_length),
    limit=jnp.where(mask, 0, state.limit),
    status=jnp.where(mask, Status.FREE, state.status),
    finite=state.finite | mask,
    needs_pages=state.needs_pages & ~mask,
  )


def _empty(draft, init_cache, max_len, params, batch):
  return DecodeState(
    cache=init_cache(batch),
    draft=draft.init(params.draft, batch),
    tokens=jnp.zeros((batch, max_len), jnp.int32),
    length=jnp.zeros((batch,), jnp.int32),
    prompt_length=jnp.zeros((batch,), jnp.int32),
    limit=jnp.zeros((batch,), jnp.int32),
    stop_ids=jnp.full((batch, _state.MAX_STOP_IDS), -1, jnp.int32),
    sampling=sampling_lib.Sampling(
      temperature=jnp.zeros((batch,), jnp.float32),
      top_k=jnp.zeros((batch,), jnp.int32),
      top_p=jnp.ones((batch,), jnp.float32),
      key=jnp.zeros((batch, 2), jnp.uint32),
    ),
    status=jnp.full((batch,), Status.FREE, jnp.int32),
    finite=jnp.ones((batch,), bool),
    needs_pages=jnp.zeros((batch,), bool),
    rounds=jnp.zeros((batch,), jnp.int32),
  )


def _check_prompt(prompt, prompt_length, max_len):
  """Checks what can be checked before tracing."""
  if prompt.ndim != 2:
    raise ValueError(f"prompt has shape {prompt.shape}; give [B, S]")
  if isinstance(prompt_length, jax.core.Tracer):
    return
  shortest, longest = int(prompt_length.min()), int(prompt_length.max())
  if shortest < 1:
    raise ValueError(
      "a prompt is empty; give at least one token, for example the BOS"
    )
  if longest > min(prompt.shape[1], max_len):
    raise ValueError(
      f"a prompt is {longest} tokens long; the prompt array holds"
      f" {prompt.shape[1]} and max_len is {max_len}"
    )


@functools.lru_cache(maxsize=64)
def speculative(
  target: _base.TargetFn,
  draft: _base.DraftFn,
  init_cache: Callable[[int], Any],
  *,
  max_len: int,
  chunk: int = 64,
) -> _base.Decoder:
  """Builds exact speculative decoding from a target, a draft and a cache.

  The text is a function of (prompt, seed, sampling settings) alone: any
  draft, tree, batch and page size give the same. Same arguments give the
  same functions, so what was compiled stays compiled.

  Args:
    target: the model.
    draft: proposes token trees; `root_only()` for plain decoding.
    init_cache: batch -> empty `Cache`, hashable (a function or a
      `functools.partial` kept in a variable).
    max_len: S, the most tokens of a row, prompt included; the cache must hold
      `max_len - 1`.
    chunk: tokens of a prompt that `init` reads at a time.

  Returns:
    `Decoder`; nothing in it is jitted.

    - `init(params, prompt[B, S0], prompt_length[B], *, sampling,
      max_new_tokens, stop_ids=())` -> state after prefill, with the first
      token emitted. `max_new_tokens` is an int or [B]; rows stop there, at a
      stop id, or at `max_len` tokens.
    - `step(params, state)` -> `(state, Round)`.
    - `empty(params, batch)` -> state without sequences.
    - `admit(state, row, prompt[S0], prompt_length, sampling, max_new_tokens,
      stop_ids)` -> state; `sampling` has scalar leaves, `stop_ids` is
      `stop_ids_row(...)`.
    - `prefill(params, state, rows[R], chunk)` -> `(state, Round)`: reads the
      next `chunk` tokens of rows that are prefilling.
    - `preempt(state, mask[B])`, `release(state, mask[B])` -> state.

  Raises:
    ValueError: for `max_len` or `chunk` below 1.

  Example:
    >>> import functools
    >>> import jax, jax.numpy as jnp
    >>> from flax import nnx
    >>> from ldjax import decoding, memory, models, sampling
    >>> config = models.TransformerConfig(
    ...   vocab_size=31, hidden_size=24, intermediate_size=40, num_layers=2,
    ...   num_heads=3, num_kv_heads=1, head_dim=8, max_position_embeddings=64)
    >>> target, weights = models.functionalize(
    ...   models.Transformer(config, rngs=nnx.Rngs(0)))
    >>> def init_cache(batch):
    ...   return memory.PagedKVCache.create(
    ...     batch=batch, max_len=32, num_layers=2, num_kv_heads=1, head_dim=8,
    ...     page_size=4)
    >>> decoder = speculative(
    ...   target, decoding.ngram(3), init_cache, max_len=32)
    >>> params = decoding.DecoderParams(weights)
    >>> state = jax.jit(decoder.init)(
    ...   params, jnp.array([[1, 2, 3]]), jnp.array([3]),
    ...   sampling=sampling.make_sampling(1), max_new_tokens=8)
    >>> state = jax.jit(decoding.decode, static_argnums=0)(
    ...   decoder, params, state)
    >>> int(state.emitted[0])
    8

  Source: Leviathan et al. 2023; Miao et al. 2023; design in docs.
  """
  for name, value in (("max_len", max_len), ("chunk", chunk)):
    if value < 1:
      raise ValueError(f"{name} is {value}; it must be at least 1")

  empty = functools.partial(_empty, draft, init_cache, max_len)
  prefill = functools.partial(_prefill, target, draft)

  def init(
    params: _base.DecoderParams,
    prompt: Array,
    prompt_length: Array,
    *,
    sampling: sampling_lib.Sampling,
    max_new_tokens: int | Array,
    stop_ids: Any = (),
  ) -> DecodeState:
    prompt = jnp.asarray(prompt, jnp.int32)
    prompt_length = jnp.asarray(prompt_length, jnp.int32)
    _check_prompt(prompt, prompt_length, max_len)
    batch, width = prompt.shape
    if not isinstance(stop_ids, jax.Array):
      stop_ids = jnp.asarray(_state.stop_ids_row(stop_ids))
    stop_ids = jnp.broadcast_to(
      stop_ids.reshape(-1, _state.MAX_STOP_IDS), (batch, _state.MAX_STOP_IDS)
    )
    limits = jnp.broadcast_to(
      jnp.asarray(max_new_tokens, jnp.int32).reshape(-1), (batch,)
    )
    state = empty(params, batch)

    def admit_row(row, state):
      return _admit(
        state,
        row,
        prompt[row],
        prompt_length[row],
        jax.tree.map(lambda x: x[row], sampling),
        limits[row],
        stop_ids[row],
      )

    state = lax.fori_loop(0, batch, admit_row, state)
    rows = jnp.arange(batch, dtype=jnp.int32)
    size = min(chunk, width)

    def read(_, state):
      return prefill(params, state, rows, size)[0]

    return lax.fori_loop(0, -(-width // size), read, state)

  return _base.Decoder(
    init=init,
    step=functools.partial(_step, target, draft),
    empty=empty,
    admit=_admit,
    prefill=prefill,
    preempt=functools.partial(_preempt, draft),
    release=functools.partial(_release, draft),
  )


def autoregressive(
  target: _base.TargetFn,
  init_cache: Callable[[int], Any],
  *,
  max_len: int,
  chunk: int = 64,
) -> _base.Decoder:
  """Plain decoding: the same decoder with a root-only tree.

  It is the baseline of every measurement and the oracle of every test.
  Arguments as for `speculative`.
  """
  return speculative(
    target, _draft.root_only(), init_cache, max_len=max_len, chunk=chunk
  )
