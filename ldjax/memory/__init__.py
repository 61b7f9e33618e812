"""Where committed keys and values live."""

from ldjax.memory._dense import DenseKVCache
from ldjax.memory._paged import PagedKVCache
from ldjax.memory._pool import PagePool
from ldjax.memory._quantized import cast_kv

__all__ = ["DenseKVCache", "PagePool", "PagedKVCache", "cast_kv"]
