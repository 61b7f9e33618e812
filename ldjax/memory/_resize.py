"""A pool of another size, made layer by layer."""

import dataclasses
from typing import TypeVar

import jax
import numpy as np

from ldjax import typing
from ldjax.memory import _grouped, _paged

Array = typing.Array
Cache = TypeVar("Cache", _paged.PagedKVCache, _grouped.GroupedKVCache)


@jax.jit
def _pick(layer: Array, source: Array) -> Array:
  """Pages `source` [P] of a layer; zeros where it is out of range."""
  return layer.at[source].get(mode="fill", fill_value=0)


def resize(cache: Cache, num_pages: int) -> tuple[Cache, np.ndarray]:
  """Gives the pool of a cache another size, between steps, on the host.

  One layer is copied after the other and the old one given back at once, so
  that memory peaks at the larger pool and one layer, not at two pools. The
  cache given is used up, as a donated one is. Pages keep their numbers, but for
  those that a smaller pool has not: they move to free ones.

  Args:
    cache: with arrays, not under `jit`. Of a `GroupedKVCache` the layers
      without a window are meant.
    num_pages: P of the new pool.

  Returns:
    The cache, and [P] int32 of the old pool: each old page's new number, the
    new P for a free page that is gone.

  Raises:
    ValueError: for fewer pages than are held.

  Example:
    >>> import jax.numpy as jnp
    >>> from ldjax import memory
    >>> cache = memory.PagedKVCache.create(
    ...   batch=1, max_len=8, num_layers=1, num_kv_heads=1, head_dim=2,
    ...   page_size=4)
    >>> cache, moved = memory.resize(cache, 5)
    >>> cache.pages[0].shape, moved.tolist()
    ((5, 1, 4, 4), [0, 1])
  """
  if isinstance(cache, _grouped.GroupedKVCache):
    if cache.full is None:
      raise ValueError(
        "every layer of this cache has a window: its pages are as many as its"
        " rows can hold, and cannot be more or fewer"
      )
    full, moved = resize(cache.full, num_pages)
    return dataclasses.replace(cache, full=full), moved
  references, table = jax.device_get((cache.pool.references, cache.block_table))
  before = references.shape[0]
  held = np.flatnonzero(references)
  if num_pages < max(held.size, 1):
    raise ValueError(
      f"num_pages is {num_pages}, but {held.size} pages are held and a pool"
      " has at least 1; give at least that, or release rows first"
    )
  moved = np.full(before + 1, num_pages, np.int32)
  kept = min(before, num_pages)
  moved[:kept] = np.arange(kept)
  homeless = held[held >= num_pages]
  free = np.flatnonzero(references[:kept] == 0)
  moved[homeless] = free[: homeless.size]

  source = np.full(num_pages, before, np.int32)
  source[:kept] = np.arange(kept)
  source[moved[homeless]] = homeless
  counts = np.zeros(num_pages, np.int32)
  counts[moved[held]] = references[held]

  def replaced(layer: Array) -> Array:
    new = jax.device_put(_pick(layer, source), layer.sharding)
    new.block_until_ready()
    layer.delete()
    return new

  return dataclasses.replace(
    cache,
    pages=jax.tree.map(replaced, cache.pages),
    pool=dataclasses.replace(
      cache.pool,
      references=jax.device_put(counts, cache.pool.references.sharding),
    ),
    block_table=jax.device_put(moved[table], cache.block_table.sharding),
  ), moved[:before]
