"""Paged caches of a model's shape."""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax.numpy as jnp

from ldjax import memory, models

Cache: TypeAlias = memory.PagedKVCache | memory.GroupedKVCache
"""What `generate` works on."""


@functools.lru_cache(maxsize=64)
def cache_factory(
  config: models.TransformerConfig,
  *,
  max_len: int,
  page_size: int = 16,
  num_pages: int | None = None,
  dtype: Any = jnp.float32,
) -> Callable[[int], Cache]:
  """Returns batch -> empty cache; the same one for the same arguments.

  A `PagedKVCache`, or a `GroupedKVCache` where layers have a window that spans
  fewer pages than a whole row.

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
  windows = memory.kept_windows(
    tuple(map(config.window, range(config.num_layers))), max_len, page_size
  )
  return functools.partial(
    _create_cache,
    windows=windows,
    max_len=max_len,
    page_size=page_size,
    num_pages=num_pages,
    num_kv_heads=config.num_kv_heads,
    head_dim=config.head_dim,
    dtype=dtype,
  )


def _create_cache(
  batch: int, *, windows: tuple[int | None, ...], **sizes: Any
) -> Cache:
  if any(windows):
    return memory.GroupedKVCache.create(batch=batch, windows=windows, **sizes)
  return memory.PagedKVCache.create(
    batch=batch, num_layers=len(windows), **sizes
  )
