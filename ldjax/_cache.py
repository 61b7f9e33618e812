"""Paged caches of a model's shape."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from ldjax import memory, models


@functools.lru_cache(maxsize=64)
def cache_factory(
  config: models.TransformerConfig,
  *,
  max_len: int,
  page_size: int = 16,
  num_pages: int | None = None,
  dtype: Any = jnp.float32,
) -> Callable[[int], memory.PagedKVCache]:
  """Returns batch -> empty paged cache; the same one for the same arguments.

  Args:
    config: of the target.
    max_len: the most positions of a row.
    page_size: Z, positions a page.
    num_pages: P, or None for as many as the batch can need.
    dtype: of keys and values, see `memory.cache_dtype`.

  Raises:
    ValueError: for more positions than the model has learned.

  Example:
    >>> import ldjax
    >>> config = ldjax.testing.tiny_model().config
    >>> init_cache = cache_factory(config, max_len=64)
    >>> init_cache(2).pool.num_pages
    8
  """
  limit = config.max_position_embeddings
  if config.learned_positions and max_len > limit:
    raise ValueError(
      f"max_len is {max_len}, but the model has learned {limit} positions; give"
      " at most that"
    )
  return functools.partial(
    _create_cache,
    max_len=max_len,
    page_size=page_size,
    num_pages=num_pages,
    num_layers=config.num_layers,
    num_kv_heads=config.num_kv_heads,
    head_dim=config.head_dim,
    dtype=dtype,
  )


def _create_cache(batch: int, **sizes: Any) -> memory.PagedKVCache:
  return memory.PagedKVCache.create(batch=batch, **sizes)
