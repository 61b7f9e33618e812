"""Where committed keys and values live."""

from ldjax._base import QuantizedKV
from ldjax.memory._dense import DenseKVCache
from ldjax.memory._paged import PagedKVCache
from ldjax.memory._pool import PagePool
from ldjax.memory._quantized import QuantizationError, cache_dtype, cast_kv

__all__ = [
  "DenseKVCache",
  "PagePool",
  "PagedKVCache",
  "QuantizationError",
  "QuantizedKV",
  "cache_dtype",
  "cast_kv",
]
