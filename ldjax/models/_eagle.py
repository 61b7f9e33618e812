"""An EAGLE draft: one decoder layer over the target's features and tokens."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jax import lax

from ldjax import _base, memory, pallas_kernels, typing
from ldjax.models import _config, _heads, _layers, _linear, _transformer

Array = typing.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleConfig:
  """The shape of an EAGLE draft.

  Args:
    depth: D, tokens ahead that it guesses.
    hidden_size: E, that of the target.
    intermediate_size: F, the feed-forward width.
    num_heads: N, query heads.
    num_kv_heads: K, key/value heads; divides N.
    head_dim: H.
    vocab_size: W, tokens that it can guess.
    target_vocab_size: V, where it guesses only a part of the target's
      vocabulary; None where W is all of it.
    output_rank: r, to score by a product of [W, r] and [r, E]; None for one
      matrix.
    shared_output: whether it scores by the target's output matrix instead of
      one of its own.
    rope_theta: base of the rotary frequencies.
    rms_norm_eps: added to the mean square in every norm.

  Raises:
    ValueError: for sizes that no draft can have.
  """

  depth: int
  hidden_size: int
  intermediate_size: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  vocab_size: int
  target_vocab_size: int | None = None
  output_rank: int | None = None
  shared_output: bool = False
  rope_theta: float = 10000.0
  rms_norm_eps: float = 1e-5

  kind: ClassVar[str] = "eagle"
  """Name of the family."""

  def __post_init__(self):
    _heads.check_least(self, depth=1)
    _heads.check_vocabulary(self)
    _heads.check_eps(self)
    self.layer  # noqa: B018 (checks the other sizes)

  @property
  def feature_size(self) -> int:
    """X, the width of the target's features."""
    return self.hidden_size

  @property
  def layer(self) -> _config.TransformerConfig:
    """Its decoder layer, as a transformer of one."""
    return _config.TransformerConfig(
      vocab_size=self.vocab_size,
      hidden_size=self.hidden_size,
      intermediate_size=self.intermediate_size,
      num_layers=1,
      num_heads=self.num_heads,
      num_kv_heads=self.num_kv_heads,
      head_dim=self.head_dim,
      max_position_embeddings=1,
      rope_theta=self.rope_theta,
      rms_norm_eps=self.rms_norm_eps,
    )


@struct.dataclass(kw_only=True)
class EagleState:
  """What was committed; position p holds (token p, feature of p - 1)."""

  cache: memory.PagedKVCache
  """Of one layer."""
  feature: Array
  """[B, X], of the last committed position."""


@struct.dataclass(kw_only=True)
class EagleCarry:
  """All nodes of a round so far."""

  level: _heads.Level
  """The states [B, n, E] of the deepest ones."""
  block_kv: Array
  """[B, T, K, 2H], keys and values of all of them."""
  parents: Array
  """[B, T] int32."""


def _attend(
  query: Array, true_kv: Array, own_kv: Array, last: Array, *, scale: float
) -> Array:
  """Attends each place of a text to its past and to a path of its own.

  Args:
    query: [B, S, N, H].
    true_kv: [B, S, K, 2H] of the text.
    own_kv: [B, S, J, K, 2H], J entries that only place t sees.
    last: [S] int32, the last entry of the text that place t sees.
    scale: multiplies the scores.

  Returns:
    [B, S, N, H] in the query's dtype.
  """
  batch, size, heads, width = query.shape
  kv_heads, dtype = true_kv.shape[2], query.dtype
  precision = (
    lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
  )

  def product(form, x, y):
    return jnp.einsum(
      form,
      x,
      y,
      precision=precision,
      preferred_element_type=jnp.float32,
    )

  scaled = query * jnp.asarray(scale, dtype)
  grouped = scaled.reshape(batch, size, kv_heads, heads // kv_heads, width)
  true_kv, own_kv = true_kv.astype(dtype), own_kv.astype(dtype)
  past = product("btkgh,bskh->bkgts", grouped, true_kv[..., :width])
  seen = jnp.arange(size, dtype=jnp.int32)[None] <= last[:, None]
  past = jnp.where(seen[None, None, None], past, -jnp.inf)
  path = product("btkgh,btjkh->bkgtj", grouped, own_kv[..., :width])
  weights = jax.nn.softmax(jnp.concatenate([past, path], axis=-1))
  weights = weights.astype(dtype)
  out = product(
    "bkgts,bskh->btkgh", weights[..., :size], true_kv[..., width:]
  ) + product("bkgtj,btjkh->btkgh", weights[..., size:], own_kv[..., width:])
  return out.reshape(query.shape).astype(dtype)


class EagleDraft(_heads.Heads):
  """One decoder layer that goes on from the target's features.

  An entry is a token with the feature of the position before it, the first of
  a text with a feature of zeros. Its own cache holds the entries of committed
  positions, whose features are the target's; a drafted token is entered with
  the layer's normed output at its parent in place of a feature. Both halves of
  an entry are normed first.

  Args:
    config: its shape.
    dtype: of the parameters, of the computation and of the cache.
    rngs: for random parameters.

  Example:
    >>> from flax import nnx
    >>> import ldjax
    >>> config = ldjax.models.EagleConfig(
    ...   depth=3, hidden_size=24, intermediate_size=40, num_heads=3,
    ...   num_kv_heads=1, head_dim=8, vocab_size=31, shared_output=True)
    >>> draft = EagleDraft(config, rngs=nnx.Rngs(0))
    >>> fn, params = ldjax.models.functionalize_draft(draft, max_len=64)
    >>> fn.init(params, 2).cache.length.tolist()
    [0, 0]

  Source: Li et al. 2024, "EAGLE: speculative sampling requires rethinking
  feature uncertainty" (norms of the inputs as in EAGLE-3, Li et al. 2025).
  """

  def __init__(
    self,
    config: EagleConfig,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    rngs: nnx.Rngs,
  ):
    super().__init__(config, dtype=dtype)
    width = config.hidden_size

    def norm():
      return _layers.RMSNorm(width, eps=config.rms_norm_eps, dtype=dtype)

    self.embed = _heads.TargetEmbedding(
      _heads.embed_rows(config), width, dtype=dtype, rngs=rngs
    )
    self.embed_norm, self.feature_norm = norm(), norm()
    self.fc = _linear.Linear(
      2 * width, width, use_bias=False, dtype=dtype, rngs=rngs
    )
    self.layer = _transformer.Block(config.layer, dtype=dtype, rngs=rngs)
    self.norm = norm()
    self.output = _heads.Output(config, dtype=dtype, rngs=rngs)

  @staticmethod
  def empty(
    config: EagleConfig, dtype: Any, batch: int, max_len: int | None
  ) -> EagleState:
    """See `HeadsFn.init`."""
    assert max_len is not None
    cache = memory.PagedKVCache.create(
      batch=batch,
      max_len=max_len,
      num_layers=1,
      num_kv_heads=config.num_kv_heads,
      head_dim=config.head_dim,
      dtype=dtype,
    )
    feature = jnp.zeros((batch, config.feature_size), dtype)
    return EagleState(cache=cache, feature=feature)

  @staticmethod
  def release(state: EagleState, mask: Array) -> EagleState:
    """See `HeadsFn.release`."""
    return EagleState(
      cache=state.cache.release(mask),
      feature=jnp.where(mask[:, None], 0, state.feature),
    )

  def _enter(
    self, tokens: Array, features: Array, positions: Array
  ) -> tuple[Array, Array, Array]:
    """Entries [R, T, E], their queries, and their keys and values."""
    read = self.embed_norm(self.embed(tokens, self.dtype))
    pair = [read, self.feature_norm(features.astype(self.dtype))]
    x = self.fc(jnp.concatenate(pair, axis=-1))
    query, block_kv = self.layer.self_attn.project(
      self.layer.input_layernorm(x),
      _layers.rotary_angles(self.config.layer, positions),
      self.dtype,
    )
    return x, query, block_kv

  def _leave(self, x: Array, attended: Array) -> Array:
    """Normed output [R, T, E] of the layer."""
    rows, num_nodes, _ = x.shape
    flat = attended.reshape(rows, num_nodes, -1)
    x = x + self.layer.self_attn.o_proj(flat)
    x = x + self.layer.mlp(self.layer.post_attention_layernorm(x))
    return self.norm(x)

  def observe(
    self, state: EagleState, observation: _base.Observation
  ) -> EagleState:
    """See `HeadsFn.observe`; only keys and values are computed."""
    rows, count = observation.rows, observation.count
    starts = observation.positions[:, 0] == 0
    first = jnp.where(starts[:, None], 0, state.feature[rows])
    features = observation.features.astype(self.dtype)
    before = jnp.concatenate([first[:, None], features[:, :-1]], axis=1)
    _, _, block_kv = self._enter(
      observation.tokens, before, observation.positions
    )
    fresh = jnp.zeros(state.feature.shape[:1], bool)
    fresh = fresh.at[rows].set(starts & (count > 0), mode="drop")
    path = jnp.arange(before.shape[1], dtype=jnp.int32)
    cache, _ = state.cache.release(fresh).commit(
      (block_kv,),
      jnp.broadcast_to(path[None], before.shape[:2]),
      count,
      rows,
    )
    return EagleState(
      cache=cache, feature=_base.last_observed(observation, state.feature)
    )

  def _grow(
    self,
    state: EagleState,
    tokens: Array,
    features: Array,
    parents: Array,
    block_kv: Array | None,
    depth: int,
  ) -> tuple[Array, Array]:
    """States [B, n, E] of nodes, and keys and values of all up to them."""
    view = state.cache.view()
    positions = jnp.broadcast_to(view.length[:, None] + depth, tokens.shape)
    x, query, entered = self._enter(tokens, features, positions)
    num_new = tokens.shape[1]
    if block_kv is not None:
      # The earlier nodes ask nothing again: their queries are zeros.
      idle = jnp.zeros((*block_kv.shape[:2], *query.shape[2:]), query.dtype)
      query = jnp.concatenate([idle, query], axis=1)
      entered = jnp.concatenate([block_kv, entered], axis=1)
    attended = pallas_kernels.tree_attention(
      query,
      entered,
      view.pages[0],
      view.block_table,
      view.length,
      pallas_kernels.ancestor_mask(parents),
      scale=self.config.head_dim**-0.5,
    )
    return self._leave(x, attended[:, -num_new:]), entered

  def begin(
    self, state: EagleState, pending: Array
  ) -> tuple[EagleCarry, Array]:
    """See `HeadsFn.begin`."""
    parents = jnp.full((pending.shape[0], 1), -1, jnp.int32)
    hidden, block_kv = self._grow(
      state, pending[:, None], state.feature[:, None], parents, None, 0
    )
    level = _heads.Level(values=hidden, first=0, depth=0)
    carry = EagleCarry(level=level, block_kv=block_kv, parents=parents)
    return carry, self.score(hidden)

  def extend(
    self, state: EagleState, carry: EagleCarry, tokens: Array, parents: Array
  ) -> tuple[EagleCarry, Array]:
    """See `HeadsFn.extend`."""
    depth = carry.level.below(self.config.depth)
    features = carry.level.of_parents(parents)
    parents = jnp.concatenate([carry.parents, parents], axis=1)
    hidden, block_kv = self._grow(
      state, tokens, features, parents, carry.block_kv, depth
    )
    carry = EagleCarry(
      level=carry.level.followed_by(hidden), block_kv=block_kv, parents=parents
    )
    return carry, self.score(hidden)

  def unroll(self, features: Array, tokens: Array) -> Array:
    """See `HeadsFn.unroll`; the text begins with the first position."""
    size = tokens.shape[1]
    place = jnp.arange(size, dtype=jnp.int32)
    # Recomputed in the backward pass: scores [B, N, S, S] of every depth at
    # once would be most of the memory of training.
    attend = jax.checkpoint(
      lambda *parts: _attend(*parts, scale=self.config.head_dim**-0.5)
    )

    def positions(by):
      return jnp.broadcast_to((place + by)[None], tokens.shape)

    features = features.astype(self.dtype)
    before = jnp.pad(features[:, :-1], ((0, 0), (1, 0), (0, 0)))
    x, query, true_kv = self._enter(tokens, before, positions(0))
    own_kv = true_kv[:, :, None][:, :, :0]
    hidden = self._leave(x, attend(query, true_kv, own_kv, place))
    # The root of position t is entry t + 1.
    states = [_heads.ahead(hidden, 1)]
    for d in range(1, self.config.depth):
      x, query, entered = self._enter(
        _heads.ahead(tokens, 1 + d), states[-1], positions(1 + d)
      )
      own_kv = jnp.concatenate([own_kv, entered[:, :, None]], axis=2)
      states.append(self._leave(x, attend(query, true_kv, own_kv, place + 1)))
    return jnp.stack(states, axis=2)

  def score(self, states: Array) -> Array:
    """See `HeadsFn.score`."""
    return self.output(states)
