"""What a cache's pages are used for, counted on the host."""

from typing import NamedTuple

import jax
import numpy as np

from ldjax.memory import _paged


class CacheStats(NamedTuple):
  """How the pages of a pool are used.

  `waste` and `fragmentation` are kept apart: the first is memory that a
  sequence owns and does not fill, the second memory that nobody can use.
  """

  pages: int
  """P, pages of the pool."""
  free: int
  """Pages that nobody holds."""
  shared: int
  """Pages that are held more than once."""
  positions: int
  """Committed positions in owned pages, each page counted once."""
  waste: float
  """Slots of owned pages that hold no position, as a share of all their
  slots."""
  fragmentation: float
  """Free pages that no row could take, because every block table is full, as
  a share of the pool. Any free page serves any row, so it is 0 in any pool
  that isn't larger than all rows together."""
  page_bytes: int
  """Bytes of one page over all layers."""
  total_bytes: int
  """Bytes of the pool."""

  @property
  def used_bytes(self) -> int:
    """Bytes of the pages that somebody holds."""
    return (self.pages - self.free) * self.page_bytes


def cache_stats(cache: _paged.PagedKVCache) -> CacheStats:
  """Counts how the pages of a cache are used; waits for the device.

  Args:
    cache: with arrays, not under `jit`.

  Example:
    >>> from ldjax import memory
    >>> cache = memory.PagedKVCache.create(
    ...   batch=1, max_len=8, num_layers=1, num_kv_heads=1, head_dim=2,
    ...   page_size=4)
    >>> stats = memory.cache_stats(cache)
    >>> stats.pages, stats.free, stats.used_bytes
    (2, 2, 0)
  """
  references, table, length = jax.device_get(
    (cache.pool.references, cache.block_table, cache.length)
  )
  pages, size = references.shape[0], cache.page_size
  # Pages that no row has in its table are kept by others, and full.
  filled = np.where(references > 0, size, 0)
  column = np.arange(table.shape[1])[None]
  inside = np.clip(length[:, None] - column * size, 0, size)
  mine = table < pages
  filled[table[mine]] = inside[mine]
  held = int((references > 0).sum())
  takers = int((~mine).sum())
  return CacheStats(
    pages=pages,
    free=pages - held,
    shared=int((references > 1).sum()),
    positions=int(filled.sum()),
    waste=1 - float(filled.sum()) / (held * size) if held else 0.0,
    fragmentation=max(pages - held - takers, 0) / pages,
    page_bytes=cache.page_bytes,
    total_bytes=cache.page_bytes * pages,
  )
