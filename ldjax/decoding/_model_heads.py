"""A small model of its own as draft heads."""

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import jax.numpy as jnp
from flax import struct

from ldjax import _base, typing

Array = typing.Array


@struct.dataclass(kw_only=True)
class _Block:
  """The nodes of a round so far."""

  tokens: Array
  """[B, T] int32."""
  parents: Array
  """[B, T] int32."""
  depths: tuple[int, ...] = struct.field(pytree_node=False)
  """Of each node; the root's is 0."""


def model_heads(
  model: _base.TargetFn,
  init_cache: Callable[[int], Any],
  *,
  depth: int,
  vocab_size: int,
) -> _base.HeadsFn:
  """Lets an independent, smaller model guess for the target.

  It reads what the target reads, into a cache of its own, and knows nothing of
  the target's features; the parameters are the model's. At each depth it runs
  over all nodes of the round so far, on its committed prefix. It must have the
  target's tokenizer. A row that its cache has no room for is guessed badly
  from there on, and decodes as it would without.

  Args:
    model: the small model.
    init_cache: batch -> empty `Cache` for it, hashable.
    depth: D, the most tokens ahead that are asked of it.
    vocab_size: W, ids that the target and the model both know: the smaller of
      their vocabularies where one is padded.

  Returns:
    `HeadsFn` for `static_tree` and `dynamic_tree`. It can't be trained here:
    its `unroll` and `score` raise TypeError.

  Raises:
    ValueError: for a depth or vocabulary below 1, or, when it is traced, for a
      model with fewer logits than `vocab_size`.

  Example:
    >>> from ldjax import decoding, testing
    >>> small = testing.tiny_model(seed=1)
    >>> heads = model_heads(
    ...   small.target, small.init_cache, depth=4, vocab_size=31)
    >>> decoding.static_tree(heads, decoding.TokenTree.chain(3)).size
    4

  Source: Leviathan et al. 2023.
  """
  for name, value in (("depth", depth), ("vocab_size", vocab_size)):
    if value < 1:
      raise ValueError(f"{name} is {value}; it must be at least 1")
  return _model_heads(model, init_cache, depth, vocab_size)


def _untrainable(*_: Any) -> NoReturn:
  raise TypeError(
    "an independent model is not trained on the target's features; train it as"
    " a language model of its own"
  )


@functools.lru_cache(maxsize=64)
def _model_heads(
  model: _base.TargetFn,
  init_cache: Callable[[int], Any],
  depth: int,
  vocab_size: int,
) -> _base.HeadsFn:
  def observe(params, cache, observation):
    rows, positions = observation.rows, observation.positions
    place = jnp.arange(positions.shape[1], dtype=jnp.int32)
    chain = jnp.broadcast_to(place[None], positions.shape)
    starts = (observation.count > 0) & (positions[:, 0] == 0)
    fresh = jnp.zeros(cache.length.shape, bool)
    cache = cache.release(fresh.at[rows].set(starts, mode="drop"))
    output = model.forward(
      params, observation.tokens, positions, chain - 1, cache.view(rows)
    )
    # What comes after a gap, left when the cache was full, has no place.
    goes_on = positions[:, 0] == cache.length[rows]
    count = jnp.where(goes_on, observation.count, 0)
    return cache.commit(output.block_kv, chain, count, rows)[0]

  def guess(params, cache, block, num_new):
    depths = jnp.array([block.depths], jnp.int32)
    output = model.forward(
      params,
      block.tokens,
      cache.length[:, None] + depths,
      block.parents,
      cache.view(),
    )
    logits = model.score(params, output.hidden[:, -num_new:]).logits
    if logits.shape[-1] < vocab_size:
      raise ValueError(
        f"vocab_size is {vocab_size}, but the model has {logits.shape[-1]}"
        f" logits; give at most {logits.shape[-1]}"
      )
    return block, logits[..., :vocab_size]

  def begin(params, cache, pending):
    tokens = pending[:, None]
    root = _Block(tokens=tokens, parents=jnp.full_like(tokens, -1), depths=(0,))
    return guess(params, cache, root, 1)

  def extend(params, cache, block, tokens, parents):
    level, num_new = block.depths[-1] + 1, tokens.shape[1]
    if level >= depth:
      raise ValueError(
        f"a guess of {level + 1} tokens ahead is asked for; depth is {depth},"
        f" so grow the tree to depth {depth} at most"
      )
    block = _Block(
      tokens=jnp.concatenate([block.tokens, jnp.maximum(tokens, 0)], axis=1),
      parents=jnp.concatenate([block.parents, parents], axis=1),
      depths=(*block.depths, *[level] * num_new),
    )
    return guess(params, cache, block, num_new)

  return _base.HeadsFn(
    init=lambda params, batch: init_cache(batch),
    observe=observe,
    release=lambda cache, mask: cache.release(mask),
    begin=begin,
    extend=extend,
    unroll=_untrainable,
    score=_untrainable,
    token_ids=lambda params: None,
    depth=depth,
    vocab_size=vocab_size,
    feature_size=0,
  )
