"""Committed keys and values in pages of one pool, shared by all rows."""

import dataclasses
import math
from typing import Self

import chex
import jax
import jax.numpy as jnp
from flax import struct

from ldjax import _base, typing
from ldjax.memory import _pool, _quantized

Array = typing.Array


@struct.dataclass(kw_only=True)
class PagedKVCache:
  """A block table a row over one pool of pages.

  Keys and values stand side by side on the last axis, so that a page is one
  fetch and, on TPU, needs no hidden copy at any head size. Only committed
  positions are ever written; a page is taken when a commit needs it.

  Example:
    >>> import jax.numpy as jnp
    >>> cache = PagedKVCache.create(
    ...   batch=2, max_len=8, num_layers=1, num_kv_heads=1, head_dim=2,
    ...   page_size=4)
    >>> block = (jnp.ones((2, 3, 1, 4)),)
    >>> cache, ok = cache.commit(
    ...   block, jnp.array([[0, 2], [0, 1]]), jnp.array([2, 0]))
    >>> cache.length.tolist(), int(cache.pool.num_free)
    ([2, 0], 3)
  """

  pages: tuple[_base.KV, ...]
  """L layers [P, K, Z, 2H]."""
  pool: _pool.PagePool
  """Which pages are in use."""
  block_table: Array
  """[B, M] int32; P where there is no page."""
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
    page_size: int = 16,
    num_pages: int | None = None,
    dtype: jax.typing.DTypeLike = jnp.float32,
  ) -> Self:
    """Allocates the pool once; nothing grows afterwards.

    Args:
      batch: B.
      max_len: positions that one row can hold, rounded up to whole pages.
      num_layers: L.
      num_kv_heads: K.
      head_dim: H.
      page_size: Z, positions a page, at least 2.
      num_pages: P; default enough for every row at `max_len`.
      dtype: of keys and values, apart from the model's: float32, bfloat16,
        float16, or in eight bits with scales int8 or float8_e4m3fn.

    Returns:
      An empty cache.

    Raises:
      ValueError: for sizes below their limits, and for another dtype.
    """
    if page_size < 2:
      raise ValueError(f"page_size is {page_size}; it must be at least 2")
    for name, size in (("batch", batch), ("max_len", max_len)):
      if size < 1:
        raise ValueError(f"{name} is {size}; it must be at least 1")
    row_pages = -(-max_len // page_size)
    if num_pages is None:
      num_pages = batch * row_pages
    pool = _pool.PagePool.create(num_pages)
    shape = (num_pages, num_kv_heads, page_size, 2 * head_dim)
    return cls(
      pages=_quantized.empty_layers(num_layers, shape, dtype),
      pool=pool,
      block_table=jnp.full((batch, row_pages), num_pages, jnp.int32),
      length=jnp.zeros((batch,), jnp.int32),
    )

  @property
  def page_size(self) -> int:
    """Z, positions a page."""
    return self.pages[0].shape[2]

  @property
  def page_bytes(self) -> int:
    """Bytes of one page over all layers."""
    return sum(
      math.prod(x.shape[1:]) * x.dtype.itemsize
      for x in jax.tree.leaves(self.pages)
    )

  def held_bytes(self, positions: int) -> int:
    """Bytes of the pages that a row of so many positions holds."""
    return -(-positions // self.page_size) * self.page_bytes

  def view(self, rows: Array | None = None) -> _base.CacheView:
    """Returns what a forward pass over `rows` [R] (default: all) reads."""
    if rows is None:
      return _base.CacheView(self.pages, self.block_table, self.length)
    return _base.CacheView(
      self.pages, self.block_table[rows], self.length[rows]
    )

  def commit(
    self,
    block_kv: tuple[_base.KV, ...],
    path: Array,
    count: Array,
    rows: Array | None = None,
  ) -> tuple[Self, Array]:
    """Appends the accepted path to each row, taking pages as needed.

    Args:
      block_kv: L layers [R, T, K, 2H] in the cache's dtype, see `cast_kv`;
        what is written are these bits.
      path: [R, D+1] int32 indices into T.
      count: [R] int32, entries of the path to write; 0 writes nowhere.
      rows: [R] int32 distinct rows, default all of them in order.

    Returns:
      The cache and ok [R]; a row that is not ok lacked pages (or would pass
      its block table's end) and is exactly as before.

    Raises:
      ValueError: for layers that are not held as those of the cache.
    """
    batch, row_pages = self.block_table.shape
    num_pages, size = self.pool.num_pages, self.page_size
    if rows is None:
      rows = jnp.arange(batch, dtype=jnp.int32)
    width = path.shape[1]
    chex.assert_shape(path, (rows.shape[0], width))
    chex.assert_shape(count, rows.shape)

    length = self.length[rows]
    fits = length + count <= row_pages * size
    owned = -(-length // size)
    needed = jnp.where(fits, -(-(length + count) // size) - owned, 0)
    pool, fresh, ok = self.pool.allocate(needed, -(-width // size))
    ok = ok & fits
    count = jnp.where(ok, count, 0)

    column = owned[:, None] + jnp.arange(fresh.shape[1], dtype=jnp.int32)[None]
    block_table = self.block_table.at[
      rows[:, None], jnp.where(fresh < num_pages, column, row_pages)
    ].set(fresh, mode="drop")

    step = jnp.arange(width, dtype=jnp.int32)[None]
    position = length[:, None] + step
    page = block_table.at[rows[:, None], position // size].get(
      mode="fill", fill_value=num_pages
    )
    page = jnp.where(step < count[:, None], page, num_pages)
    pages = _quantized.write(self.pages, block_kv, path, page, position % size)
    cache = dataclasses.replace(
      self,
      pages=pages,
      pool=pool,
      block_table=block_table,
      length=self.length.at[rows].add(count),
    )
    return cache, ok

  def share(self, row: Array, pages: Array, count: Array) -> Self:
    """Begins an empty row with full pages that others hold as well.

    A shared page is full, so nobody writes to it again.

    Args:
      row: [] int32, a row that holds nothing.
      pages: [M] int32, of which the first `count` are shared.
      count: [] int32.
    """
    held = jnp.where(
      jnp.arange(pages.shape[0], dtype=jnp.int32) < count,
      pages,
      self.pool.num_pages,
    )
    return dataclasses.replace(
      self,
      pool=self.pool.retain(held),
      block_table=self.block_table.at[row].set(held),
      length=self.length.at[row].set(count * self.page_size),
    )

  def take(self, row: Array) -> tuple[_base.KV, ...]:
    """A copy of what a row's pages hold.

    Args:
      row: [] int32.

    Returns:
      L arrays [M, K, Z, 2H] in the order of the sequence; anything past the
      row's pages.
    """
    table = self.block_table[row]
    return jax.tree.map(lambda x: x.at[table].get(mode="clip"), self.pages)

  def put(
    self, row: Array, contents: tuple[_base.KV, ...], length: Array
  ) -> tuple[Self, Array]:
    """Gives a row that holds nothing what `take` copied.

    Args:
      row: [] int32.
      contents: L arrays [M, K, Z, 2H].
      length: [] int32, committed positions of it.

    Returns:
      The cache and ok []; if not ok, pages were lacking and nothing is changed.
    """
    row_pages = self.block_table.shape[1]
    needed = -(-length // self.page_size)
    pool, pages, ok = self.pool.allocate(needed[None], row_pages)
    cache = dataclasses.replace(
      self,
      pages=jax.tree.map(
        lambda x, new: x.at[pages[0]].set(new, mode="drop"),
        self.pages,
        contents,
      ),
      pool=pool,
      block_table=self.block_table.at[row].set(pages[0]),
      length=self.length.at[row].set(jnp.where(ok[0], length, 0)),
    )
    return cache, ok[0]

  def quantize(
    self, dtype: jax.typing.DTypeLike
  ) -> tuple[Self, _quantized.QuantizationError]:
    """The same cache with its pages in eight bits; to be called on the host.

    A layer at a time, so that little more memory is taken than is held. This
    cache's pages are deleted, as those of a donated argument are.

    Args:
      dtype: int8 or float8_e4m3fn.

    Returns:
      The cache, with as many pages and the same rows; and the error that was
      made in the slots that hold something.

    Raises:
      ValueError: for a dtype without scales, or pages that are quantised.
    """
    size = self.page_size
    column = jnp.arange(self.block_table.shape[1], dtype=jnp.int32)[None]
    # A held page is full, unless it is the last of its row.
    filled = jnp.where(self.pool.references > 0, size, 0)
    filled = filled.at[self.block_table].min(
      jnp.clip(self.length[:, None] - column * size, 0, size), mode="drop"
    )
    live = jnp.arange(size, dtype=jnp.int32)[None] < filled[:, None]
    pages, error = _quantized.quantize(self.pages, live, dtype)
    return dataclasses.replace(self, pages=pages), error

  def release(self, mask: Array) -> Self:
    """Returns the pages of the rows where `mask` [B] is true."""
    num_pages = self.pool.num_pages
    held = jnp.where(mask[:, None], self.block_table, num_pages)
    return dataclasses.replace(
      self,
      pool=self.pool.release(held),
      block_table=jnp.where(mask[:, None], num_pages, self.block_table),
      length=jnp.where(mask, 0, self.length),
    )
