"""What the EAGLE drafts have in common: a layer with a cache, gone on by."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jax import lax

from ldjax import _base, memory, pallas_kernels, typing
from ldjax.models import _attention, _config, _heads, _layers

Array = typing.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConfig:
  """What the shapes of `EagleDraft` and `Eagle3Draft` have in common.

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
    qkv_bias: whether q, k and v projections carry a bias.
    rope_theta: base of the rotary frequencies.
    rope_scaling: the `llama3` stretch of them, or None.
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
  qkv_bias: bool = False
  rope_theta: float = 10000.0
  rope_scaling: _config.RopeScaling | None = None
  rms_norm_eps: float = 1e-5

  def __post_init__(self):
    _heads.check_least(self, depth=1)
    _heads.check_vocabulary(self)
    _heads.check_eps(self)
    self.layer  # noqa: B018 (checks the other sizes)

  @property
  def skipped(self) -> int:
    """Positions at the beginning of a text that have no entry, 0 or 1."""
    return 1

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
      rope_scaling=self.rope_scaling,
      rms_norm_eps=self.rms_norm_eps,
      qkv_bias=self.qkv_bias,
    )


class Layer(nnx.Module):
  """The parts of the decoder layer.

  Args:
    config: its shape.
    inputs: width of what queries, keys and values are made from; None for E.
    normed: whether there is a norm before the attention.
    dtype: of the parameters.
    rngs: for random parameters.
  """

  def __init__(
    self,
    config: _config.TransformerConfig,
    *,
    inputs: int | None = None,
    normed: bool = True,
    dtype: jax.typing.DTypeLike,
    rngs: nnx.Rngs,
  ):
    def norm():
      return _layers.RMSNorm(
        config.hidden_size, eps=config.rms_norm_eps, dtype=dtype
      )

    self.input_layernorm = norm() if normed else None
    self.self_attn = _attention.Attention(
      config, inputs=inputs, dtype=dtype, rngs=rngs
    )
    self.post_attention_layernorm = norm()
    self.mlp = _layers.MLP(config, dtype=dtype, rngs=rngs)


@struct.dataclass(kw_only=True)
class EagleState:
  """What was committed; the entry of position p is (token p, feature p - 1)."""

  cache: memory.PagedKVCache
  """Of one layer; entry i belongs to position i + `config.skipped`."""
  feature: Array
  """[B, E], of the last committed position, as the layer reads it."""


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


class EagleHeads(_heads.Heads):
  """One decoder layer that goes on from the target's features.

  An entry is a token with the feature of the position before it. A cache of
  its own holds the entries of committed positions, whose features are the
  target's; a drafted token is entered with the layer's output at its parent in
  place of a feature. A family says how features are read (`_read`), how an
  entry comes into the layer (`_enter`) and out of it (`_leave`).
  """

  observes_all = True
  """See `DraftFn.observes_all`."""

  layer: Layer
  """The decoder layer, which a family makes."""

  @staticmethod
  def empty(
    config: Any, dtype: Any, batch: int, max_len: int | None
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
    feature = jnp.zeros((batch, config.hidden_size), dtype)
    return EagleState(cache=cache, feature=feature)

  @staticmethod
  def release(state: EagleState, mask: Array) -> EagleState:
    """See `HeadsFn.release`."""
    return EagleState(
      cache=state.cache.release(mask),
      feature=jnp.where(mask[:, None], 0, state.feature),
    )

  def _read(self, features: Array) -> Array:
    """What the layer reads [..., E] of the target's features [..., X]."""
    return features.astype(self.dtype)

  def _enter(
    self, tokens: Array, features: Array, numbers: Array
  ) -> tuple[Array, Array, Array]:
    """Entries [R, T, E], their queries, and their keys and values.

    Args:
      tokens: [R, T] int32.
      features: [R, T, E], as `_read` or `_leave` gave them.
      numbers: [R, T] int32, of the entries, counted from 0 in a text.
    """
    raise NotImplementedError

  def _project(self, x: Array, numbers: Array) -> tuple[Array, Array]:
    """Queries, and keys with values, of what the attention reads."""
    angles = _layers.rotary_angles(self.config.layer, numbers)
    query, block_kv = self.layer.self_attn.project(x, angles)
    return query, block_kv.astype(self.dtype)

  def _leave(self, x: Array, attended: Array) -> Array:
    """Output [R, T, E] of the layer."""
    rows, num_nodes, _ = x.shape
    flat = attended.reshape(rows, num_nodes, -1)
    x = x + self.layer.self_attn.o_proj(flat)
    return x + self.layer.mlp(self.layer.post_attention_layernorm(x))

  def observe(
    self, state: EagleState, observation: _base.Observation
  ) -> EagleState:
    """See `HeadsFn.observe`; only keys and values are computed."""
    rows, count = observation.rows, observation.count
    starts = observation.positions[:, 0] == 0
    first = jnp.where(starts[:, None], 0, state.feature[rows])
    features = self._read(observation.features)
    before = jnp.concatenate([first[:, None], features[:, :-1]], axis=1)
    skipped = self.config.skipped
    _, _, block_kv = self._enter(
      observation.tokens, before, observation.positions - skipped
    )
    fresh = jnp.zeros(state.feature.shape[:1], bool)
    fresh = fresh.at[rows].set(starts & (count > 0), mode="drop")
    without = jnp.where(starts, skipped, 0).astype(jnp.int32)
    path = jnp.arange(before.shape[1], dtype=jnp.int32)
    path = jnp.minimum(path[None] + without[:, None], path[-1])
    cache, _ = state.cache.release(fresh).commit(
      (block_kv,), path, jnp.maximum(count - without, 0), rows
    )
    feature = _base.last_observed(
      dataclasses.replace(observation, features=features), state.feature
    )
    return EagleState(cache=cache, feature=feature)

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
    numbers = jnp.broadcast_to(view.length[:, None] + depth, tokens.shape)
    x, query, entered = self._enter(tokens, features, numbers)
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
      view.table(0),
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

  def score(self, states: Array) -> Array:
    """See `HeadsFn.score`."""
    raise NotImplementedError

  def unroll(self, features: Array, tokens: Array) -> Array:
    """See `HeadsFn.unroll`; the text begins with the first position."""
    size = tokens.shape[1]
    place = jnp.arange(size, dtype=jnp.int32)
    # Recomputed in the backward pass: scores [B, N, S, S] of every depth at
    # once would be most of the memory of training.
    attend = jax.checkpoint(
      lambda *parts: _attend(*parts, scale=self.config.head_dim**-0.5)
    )

    def numbers(by):
      return jnp.broadcast_to((place + by)[None], tokens.shape)

    features = self._read(features)
    # The root of position t is the entry of position t + 1: entry t + `lead`.
    skipped = self.config.skipped
    lead = 1 - skipped
    if lead:
      features = jnp.pad(features[:, :-1], ((0, 0), (1, 0), (0, 0)))
    x, query, true_kv = self._enter(
      _heads.ahead(tokens, skipped), features, numbers(0)
    )
    own_kv = true_kv[:, :, None][:, :, :0]
    hidden = self._leave(x, attend(query, true_kv, own_kv, place))
    states = [_heads.ahead(hidden, lead)]
    for d in range(1, self.config.depth):
      x, query, entered = self._enter(
        _heads.ahead(tokens, 1 + d), states[-1], numbers(lead + d)
      )
      own_kv = jnp.concatenate([own_kv, entered[:, :, None]], axis=2)
      states.append(
        self._leave(x, attend(query, true_kv, own_kv, place + lead))
      )
    return jnp.stack(states, axis=2)
