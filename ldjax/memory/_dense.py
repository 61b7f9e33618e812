"""The oracle: every row preallocated at full length, no paging logic."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
from flax import struct

from ldjax import _base, typing
from ldjax.memory import _quantized

Array = typing.Array


@struct.dataclass(kw_only=True)
class DenseKVCache:
  """Keys and values of each row in one contiguous stretch.

  Example:
    >>> cache = DenseKVCache.create(
    ...   batch=2, max_len=8, num_layers=1, num_kv_heads=1, head_dim=2)
    >>> cache.pages[0].shape
    (2, 1, 8, 4)
  """

  pages: tuple[_base.KV, ...]
  """L layers [B, K, S, 2H]; to a reader, one page a row."""
  length: Array
  """[B] int32, committed positions."""

  @classmethod
  def create(
    cls,
    *,
    batch: int,
    max_len: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: jax.typing.DTypeLike = jnp.float32,
  ) -> Self:
    """Allocates B rows of `max_len` positions; see `PagedKVCache.create`."""
    shape = (batch, num_kv_heads, max_len, 2 * head_dim)
    return cls(
      pages=_quantized.empty_layers(num_layers, shape, dtype),
      length=jnp.zeros((batch,), jnp.int32),
    )

  def view(self, rows: Array | None = None) -> _base.CacheView:
    """Returns what a forward pass over `rows` [R] (default: all) reads."""
    if rows is None:
      rows = jnp.arange(self.length.shape[0], dtype=jnp.int32)
    return _base.CacheView(self.pages, rows[:, None], self.length[rows])

  def commit(
    self,
    block_kv: tuple[_base.KV, ...],
    path: Array,
    count: Array,
    rows: Array | None = None,
  ) -> tuple[Self, Array]:
    """Appends the accepted path to each row; see `PagedKVCache.commit`."""
    if rows is None:
      rows = jnp.arange(self.length.shape[0], dtype=jnp.int32)
    max_len = self.pages[0].shape[2]
    length = self.length[rows]
    ok = length + count <= max_len
    count = jnp.where(ok, count, 0)
    step = jnp.arange(path.shape[1], dtype=jnp.int32)[None]
    position = jnp.where(step < count[:, None], length[:, None] + step, max_len)
    pages = _quantized.write(
      self.pages, block_kv, path, rows[:, None], position
    )
    cache = dataclasses.replace(
      self, pages=pages, length=self.length.at[rows].add(count)
    )
    return cache, ok

  def release(self, mask: Array) -> Self:
    """Forgets the rows where `mask` [B] is true."""
    return dataclasses.replace(self, length=jnp.where(mask, 0, self.length))
