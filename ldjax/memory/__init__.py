"""Where committed keys and values live."""

from ldjax._base import QuantizedKV
from ldjax.memory._budget import (
  MemoryReport,
  device_memory,
  memory_report,
  parse_budget,
  pool_limits,
)
from ldjax.memory._dense import DenseKVCache
from ldjax.memory._grouped import GroupedKVCache, kept_windows
from ldjax.memory._paged import PagedKVCache
from ldjax.memory._pool import PagePool
from ldjax.memory._prefix_index import PrefixIndex
from ldjax.memory._quantized import QuantizationError, cache_dtype, cast_kv
from ldjax.memory._resize import resize
from ldjax.memory._stats import CacheStats, cache_stats
from ldjax.memory._window import WindowKVCache, window_pages

__all__ = [
  "CacheStats",
  "DenseKVCache",
  "GroupedKVCache",
  "MemoryReport",
  "PagePool",
  "PagedKVCache",
  "PrefixIndex",
  "QuantizationError",
  "QuantizedKV",
  "WindowKVCache",
  "cache_dtype",
  "cache_stats",
  "cast_kv",
  "device_memory",
  "kept_windows",
  "memory_report",
  "parse_budget",
  "pool_limits",
  "resize",
  "window_pages",
]
