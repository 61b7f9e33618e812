"""The contracts between targets, drafts, caches and the decoder.

Everything here is a pure function of arrays or a container of such
functions; nothing holds state.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, Self, TypeAlias

import jax.numpy as jnp
from flax import struct

from ldjax import typing

Array = typing.Array


class QuantizedKV(NamedTuple):
  """Keys and values in eight bits, with a scale a position, head and half.

  The keys of a position and head are `values[..., :H] * scales[..., 0]`, its
  values `values[..., H:] * scales[..., 1]`. `memory.cast_kv` makes it.
  """

  values: Array
  """[..., 2H] int8 or float8_e4m3fn."""
  scales: Array
  """[..., 2] float32, of the keys and of the values; NaN where a number was
  not finite."""

  @property
  def dtype(self) -> Any:
    """That of `values`, as a cache is asked for it."""
    return self.values.dtype

  @property
  def shape(self) -> tuple[int, ...]:
    """That of `values`."""
    return self.values.shape


KV: TypeAlias = Array | QuantizedKV
"""Keys and values [..., 2H], of a layer's pages or of a block of nodes."""


class CacheView(NamedTuple):
  """What a forward pass may read of a cache: the committed prefix.

  Position s of row r lives in slot `s % Z` of page `block_table[r, s // Z]`
  of every layer; positions at or past `length[r]` are garbage. Where layers
  have a window, each layer has a table of its own: `table(layer)` is right for
  any cache. Entries of positions that no token sees any more are out of range
  as well.
  """

  pages: tuple[KV, ...]
  """L layers [P, K, Z, 2H]: keys, then values, on the last axis."""
  block_table: Array | tuple[Array, ...]
  """[R, M] int32, or L of them; entries past the live pages are out of
  range."""
  length: Array
  """[R] int32, committed positions."""

  def table(self, layer: int) -> Array:
    """The block table [R, M] of a layer."""
    if isinstance(self.block_table, tuple):
      return self.block_table[layer]
    return self.block_table


class Cache(Protocol):
  """Committed keys and values of B rows."""

  length: Array
  """[B] int32, committed positions of each row."""

  def view(self, rows: Array | None = None) -> CacheView:
    """Returns what a forward pass over `rows` [R] (default: all) reads."""

  def commit(
    self,
    block_kv: tuple[KV, ...],
    path: Array,
    count: Array,
    rows: Array | None = None,
  ) -> tuple[Self, Array]:
    """Appends `block_kv[l][r, path[r, i]]` for i < count[r] to each row.

    Args:
      block_kv: L layers [R, T, K, 2H], each as the cache holds it.
      path: [R, D+1] int32 indices into T.
      count: [R] int32, how many entries of the path to write.
      rows: [R] int32 rows of the cache, default all of them in order.

    Returns:
      The cache and ok [R]: a row that is not ok lacked memory, and nothing
      of it was written.
    """

  def release(self, mask: Array) -> Self:
    """Forgets the rows where `mask` [B] is true."""


class TargetOutput(NamedTuple):
  """What one forward pass over a block of tokens gives."""

  hidden: Array
  """[R, T, E], the states that the output matrix reads."""
  features: Array
  """[R, T, X], the states that a draft reads."""
  block_kv: tuple[KV, ...]
  """L layers [R, T, K, 2H] in the cache's dtype, see `memory.cast_kv`."""


class Scores(NamedTuple):
  """What the draw needs to know of the target's opinion at each node."""

  logits: Array
  """[R, T, V] float32."""


class Draws(NamedTuple):
  """The target's draw at each node, made without holding all logits."""

  tokens: Array
  """[R, T] int32."""
  logprobs: Array
  """[R, T] float32, their log-probabilities by the target's own logits."""
  finite: Array
  """[R, T] bool, whether all logits were finite."""
  exact: Array
  """[R, T] bool, whether `tokens` are what the logits give: an entry that is
  not sends the whole batch to the logits."""


class TargetFn(NamedTuple):
  """A target model as pure functions.

  `forward(params, tokens[R,T], positions[R,T], parents[R,T], view)` runs a
  block of tree nodes over a committed prefix and returns `TargetOutput`;
  node i sees the prefix, its ancestors and itself.
  `score(params, hidden[R,T,E])` returns `Scores`.
  `draw(params, hidden[R,T,E], sampling, position[R,T], wanted[R])` returns
  `Draws` of tokens that will stand at `position`, right where `wanted`; or,
  while it is traced, None where `score` should be asked. It is used where the
  program is compiled for a platform of `draw_on`.
  """

  forward: Callable[[Any, Array, Array, Array, CacheView], TargetOutput]
  score: Callable[[Any, Array], Scores]
  draw: Callable[[Any, Array, Any, Array, Array], Draws | None] | None = None
  draw_on: tuple[str, ...] = ("tpu",)
  """Platforms as `jax.jit(...).lower` names them."""


class Candidates(NamedTuple):
  """A token tree for each row, as `tokens` [B, T] and `parents` [B, T], int32.

  Node 0 is the root, the pending token: its entry of `tokens` is ignored. A
  token of -1 marks a node that holds none. A parent is the index of an earlier
  node, -1 for the root; a node without one can't be accepted.
  """

  tokens: Array
  """[B, T] int32; -1 marks an invalid node. The root's entry is ignored."""
  parents: Array
  """[B, T] int32; -1 for the root, else an earlier node."""


class DraftContext(NamedTuple):
  """What a draft may look at when it proposes.

  `tokens` [B, S] int32 holds prompt and emitted tokens, `length` [B] how many
  they are. The pending token, which the proposed tree stands on, is
  `tokens[b, length[b] - 1]`; what stands past it means nothing. `sampling` is
  the `Sampling` of B rows, so that a draft can use the same noise.
  """

  tokens: Array
  """[B, S] int32, prompt and emitted tokens."""
  length: Array
  """[B] int32, how many of them; the last one is the pending token."""
  sampling: Any
  """`Sampling` of B rows, so that a draft can use the same noise."""


@struct.dataclass(kw_only=True)
class Observation:
  """Committed positions and the target's true features of them.

  For R rows of the draft's state, `rows` [R], up to C positions each: `tokens`
  [R, C], `features` [R, C, X] and `positions` [R, C], of which the first
  `count` [R] are real.
  """

  rows: Array
  """[R] int32, rows of the draft state."""
  tokens: Array
  """[R, C] int32, the tokens that were committed."""
  features: Array
  """[R, C, X]."""
  positions: Array
  """[R, C] int32, their absolute positions; 0 begins a new sequence."""
  count: Array
  """[R] int32, how many of the C entries are real."""


class DraftFn(NamedTuple):
  """A draft as pure functions over a state of its own.

  A draft keeps the rule that the target keeps: its state holds only what
  `observe` told it, never its own guesses.

  `init(draft_params, batch)` returns an empty state.
  `propose(draft_params, draft_state, context)` returns
  `(Candidates, draft_state)` with `size` nodes, none deeper than `depth`.
  `observe(draft_params, draft_state, observation)` returns the state after
  positions were committed, prefill chunks included.
  `release(draft_state, mask[B])` forgets rows.
  """

  init: Callable[[Any, int], Any]
  propose: Callable[[Any, Any, DraftContext], tuple[Candidates, Any]]
  observe: Callable[[Any, Any, Observation], Any]
  release: Callable[[Any, Array], Any]
  size: int
  """T, nodes of a proposed tree, the root included."""
  depth: int
  """D, the most nodes below the root on one path."""
  observes_all: bool = True
  """Whether its state needs every position of a sequence from the first. If
  not, a sequence may begin with pages that another one filled, and `observe`
  is told nothing of these positions."""


def last_observed(observation: Observation, previous: Array) -> Array:
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


class HeadsFn(NamedTuple):
  """Draft heads as pure functions: guesses for nodes, one depth at a time.

  A tree is grown on them by `decoding.static_tree` and `dynamic_tree`. W is
  the draft's vocabulary, which may be a part of the target's. `state` keeps
  the rule of `DraftFn`: it holds only what `observe` told it; what belongs to
  the nodes of one round is in `carry`.

  `init(params, batch)`, `observe(params, state, observation)` and
  `release(state, mask[B])` are those of `DraftFn`.
  `begin(params, state, pending[B])` returns `(carry, logits[B, 1, W])`: what
  may follow the root, which is node 0.
  `extend(params, state, carry, tokens[B, n], parents[B, n])` adds n nodes,
  numbered on from those before, and returns `(carry, logits[B, n, W])`: what
  may follow each of them, [B, 1, W] where that is the same. All n stand at
  the same depth; `parents` [B, n] int32 are numbers of nodes one depth above.
  `unroll(params, features[B, S, X], tokens[B, S])` returns states
  [B, S, D, Y] for training: entry (b, t, d) has seen the features up to
  position t and the tokens up to t + 1 + d, and guesses the token at
  t + 2 + d; it means nothing where that is past the end.
  `score(params, states[..., Y])` returns logits [..., W] float32. With
  `begin` and `extend` along a text it gives what they give.
  `token_ids(params)` returns [W] int32, the target's id of each entry of the
  draft's vocabulary, or None where they are the same.
  """

  init: Callable[[Any, int], Any]
  observe: Callable[[Any, Any, Observation], Any]
  release: Callable[[Any, Array], Any]
  begin: Callable[[Any, Any, Array], tuple[Any, Array]]
  extend: Callable[[Any, Any, Any, Array, Array], tuple[Any, Array]]
  unroll: Callable[[Any, Array, Array], Array]
  score: Callable[[Any, Array], Array]
  token_ids: Callable[[Any], Array | None]
  depth: int
  """D, the most tokens ahead that can be guessed."""
  vocab_size: int
  """W."""
  feature_size: int
  """X, the width of the target's features."""
  observes_all: bool = True
  """See `DraftFn.observes_all`."""


@struct.dataclass(kw_only=True)
class Acceptance:
  """The walk down the tree: what was drawn and which nodes it passed."""

  path: Array
  """[B, D+1] int32, nodes passed; the first is the root."""
  tokens: Array
  """[B, D+1] int32, the token drawn at each of them, -1 past `count`."""
  logprobs: Array
  """[B, D+1] float32, log-probabilities of `tokens` by the target's own
  logits, before temperature, cuts and penalties; 0 where not asked for."""
  count: Array
  """[B] int32, tokens drawn, which is also nodes to commit."""
  stopped: Array
  """[B] bool, whether the last drawn token is a stop id."""
  finite: Array
  """[B] bool, whether all logits met on the walk were finite."""


class DecoderParams(NamedTuple):
  """Weights of a decoder: the target's and the draft's."""

  target: Any
  """What `TargetFn` takes as `params`."""
  draft: Any = ()
  """What `DraftFn` takes as `draft_params`; empty for one without weights."""


@struct.dataclass(kw_only=True)
class Round:
  """What one step emitted; fresh arrays that never alias the state."""

  tokens: Array
  """[R, D+1] int32, -1 past `count`."""
  logprobs: Array
  """[R, D+1] float32, log-probabilities of `tokens` by the target's own
  logits, before temperature, cuts and penalties; 0 where not asked for and
  past `count`."""
  count: Array
  """[R] int32, tokens emitted."""
  status: Array
  """[R] int32, see `Status`."""
  finite: Array
  """[R] bool; false where the round met logits that are not finite."""
  needs_pages: Array
  """[R] bool; true where the row lacked pages and nothing was done."""
  path: Array
  """[R, D+1] int32, tree nodes passed."""
  candidates: Candidates
  """The tree that was verified."""
  rows: Array
  """[R] int32, the rows of the state that this round worked on."""

  @property
  def finished(self) -> Array:
    """[R] bool, whether the row has come to its end."""
    return self.status >= Status.STOPPED


class Status:
  """Where a row stands (int32 codes)."""

  FREE = 0
  """Holds no sequence."""
  PREFILLING = 1
  """Has tokens that the target has not read yet."""
  PARKED = 2
  """Its keys and values are kept elsewhere; rounds pass it by."""
  RUNNING = 3
  """Has a pending token; each round emits at least one more."""
  STOPPED = 4
  """Ended by a stop id."""
  LENGTH = 5
  """Ended by `max_new_tokens` or by the end of the cache."""


class Decoder(NamedTuple):
  """Decoding as pure functions of (params, state); the caller jits.

  `init(params, prompt, prompt_length, ...)` returns a state whose rows have
  read their prompts and hold the first emitted token.
  `step(params, state)` returns `(state, round)`: one round on all rows.
  The rest lets rows come and go: `empty(params, batch,
  other_cache=None)`, `admit(state, row, ...)`, `prefill(params, state, rows,
  chunk)`, `preempt(state, mask)`, `release(state, mask)`.
  """

  init: Callable[..., Any]
  step: Callable[[DecoderParams, Any], tuple[Any, Round]]
  empty: Callable[[DecoderParams, int], Any]
  admit: Callable[..., Any]
  prefill: Callable[[DecoderParams, Any, Array, int], tuple[Any, Round]]
  preempt: Callable[[Any, Array], Any]
  release: Callable[[Any, Array], Any]
