"""Small targets and drafts whose behaviour is known beforehand."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ldjax import decoding, memory, models, typing

Array = typing.Array


class TinyModel(NamedTuple):
  """A random model small enough for tests of decoding."""

  config: models.TransformerConfig
  """Its shape."""
  target: decoding.TargetFn
  """Its pure functions."""
  params: Any
  """Its weights."""
  init_cache: Callable[[int], Any]
  """batch -> an empty cache of `max_len` positions."""
  max_len: int
  """The most tokens of a row."""


@functools.lru_cache(maxsize=64)
def _init_cache(config, max_len, page_size, num_pages, dtype):
  shape = {
    "max_len": max_len,
    "num_layers": config.num_layers,
    "num_kv_heads": config.num_kv_heads,
    "head_dim": config.head_dim,
    "dtype": dtype,
  }

  def init_cache(batch):
    if page_size is None:
      return memory.DenseKVCache.create(batch=batch, **shape)
    return memory.PagedKVCache.create(
      batch=batch, page_size=page_size, num_pages=num_pages, **shape
    )

  return init_cache


def tiny_model(
  *,
  seed: int = 0,
  vocab_size: int = 31,
  max_len: int = 48,
  page_size: int | None = 4,
  num_pages: int | None = None,
  dtype: str = "float32",
  cache_dtype: str = "float32",
  feature_layers: tuple[int, ...] = (),
) -> TinyModel:
  """Makes a two-layer random model; same arguments give the same functions.

  Args:
    seed: of the weights.
    vocab_size: V.
    max_len: positions of its cache.
    page_size: Z; None for the dense cache.
    num_pages: P; default enough for every row.
    dtype: of the weights.
    cache_dtype: of keys and values.
    feature_layers: see `models.Transformer`.

  Example:
    >>> tiny_model().config.vocab_size
    31
  """
  return _tiny_model(
    seed,
    vocab_size,
    max_len,
    page_size,
    num_pages,
    dtype,
    cache_dtype,
    feature_layers,
  )


@functools.lru_cache(maxsize=64)
def _tiny_model(
  seed: int,
  vocab_size: int,
  max_len: int,
  page_size: int | None,
  num_pages: int | None,
  dtype: str,
  cache_dtype: str,
  feature_layers: tuple[int, ...],
) -> TinyModel:
  config = models.TransformerConfig(
    vocab_size=vocab_size,
    hidden_size=24,
    intermediate_size=40,
    num_layers=2,
    num_heads=3,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=max(max_len, 64),
  )
  target, params = models.functionalize(
    models.Transformer(
      config,
      dtype=jnp.dtype(dtype),
      feature_layers=feature_layers,
      rngs=nnx.Rngs(seed),
    )
  )
  init_cache = _init_cache(config, max_len, page_size, num_pages, cache_dtype)
  return TinyModel(config, target, params, init_cache, max_len)


def scripted_draft(depth: int) -> decoding.DraftFn:
  """A chain that plays known texts: a draft as good, or bad, as its script.

  Its parameters are the script, [B, S] int32: row b is expected to hold token
  `script[b, t]` at position t. With the target's own text everything is
  accepted; with any other text nothing is.

  Args:
    depth: tokens to draft.

  Example:
    >>> scripted_draft(3).size
    4
  """
  return _scripted(depth)


@functools.lru_cache(maxsize=32)
def _scripted(depth: int) -> decoding.DraftFn:
  def propose(script, state, context):
    batch, capacity = script.shape
    ahead = context.length[:, None] + jnp.arange(depth, dtype=jnp.int32)[None]
    drafted = jnp.take_along_axis(
      script, jnp.minimum(ahead, capacity - 1), axis=1
    )
    drafted = jnp.where(ahead < capacity, drafted, -1)
    root = jnp.full((batch, 1), -1, jnp.int32)
    parents = jnp.arange(-1, depth, dtype=jnp.int32)
    return decoding.Candidates(
      jnp.concatenate([root, drafted], axis=1),
      jnp.broadcast_to(parents[None], (batch, depth + 1)),
    ), state

  return decoding.root_only()._replace(
    propose=propose, size=depth + 1, depth=depth
  )


def random_tree_draft(
  size: int, depth: int, vocab_size: int
) -> decoding.DraftFn:
  """A fresh random tree of random tokens every round and row.

  The tree's shape is data: parents are drawn anew each time, and some nodes
  are invalid.

  Args:
    size: T.
    depth: D.
    vocab_size: tokens are drawn below it.

  Example:
    >>> random_tree_draft(6, 3, 31).depth
    3
  """
  return _random_tree(size, depth, vocab_size)


@functools.lru_cache(maxsize=32)
def _random_tree(size: int, depth: int, vocab_size: int) -> decoding.DraftFn:
  def one(key):
    def grow(i, carry):
      parents, depths = carry
      bits = jax.random.bits(jax.random.fold_in(key, i), (size,), jnp.uint32)
      allowed = (jnp.arange(size, dtype=jnp.int32) < i) & (depths < depth)
      parent = jnp.argmax(jnp.where(allowed, bits >> 1, 0)).astype(jnp.int32)
      return parents.at[i].set(parent), depths.at[i].set(depths[parent] + 1)

    start = jnp.full((size,), -1, jnp.int32), jnp.zeros((size,), jnp.int32)
    parents, _ = jax.lax.fori_loop(1, size, grow, start)
    tokens = jax.random.randint(key, (size,), -1, vocab_size, jnp.int32)
    return tokens, parents

  def propose(params, state, context):
    key = jax.random.fold_in(jax.random.key(0), jnp.sum(context.length))
    keys = jax.random.split(key, context.length.shape[0])
    tokens, parents = jax.vmap(one)(keys)
    return decoding.Candidates(tokens, parents), state

  return decoding.root_only()._replace(propose=propose, size=size, depth=depth)


def pad_prompts(prompts: Sequence[Sequence[int]]) -> tuple[Array, Array]:
  """Lays prompts out as [B, S0] and their lengths as [B].

  Example:
    >>> tokens, lengths = pad_prompts([[1, 2], [3]])
    >>> tokens.tolist(), lengths.tolist()
    ([[1, 2], [3, 0]], [2, 1])
  """
  width = max(map(len, prompts))
  tokens = np.zeros((len(prompts), width), np.int32)
  for row, prompt in enumerate(prompts):
    tokens[row, : len(prompt)] = prompt
  lengths = np.array([len(prompt) for prompt in prompts], np.int32)
  return jnp.asarray(tokens), jnp.asarray(lengths)
