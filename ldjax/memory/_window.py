"""Keys and values of layers that see only the last positions of a sequence."""

import dataclasses
import math
from typing import Self

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ldjax import _base, typing
from ldjax.memory import _quantized

Array = typing.Array


def window_pages(window: int, page_size: int) -> int:
  """The most pages that hold what the next token of a row sees.

  Args:
    window: positions that a token sees, itself included.
    page_size: Z.

  Example:
    >>> window_pages(4096, 16)
    257
  """
  before = max(window - 1, 1)
  return -(-(before - 1) // page_size) + 1


@struct.dataclass(kw_only=True)
class WindowKVCache:
  """A ring of pages a row: a page is used anew once no token can see it.

  A row holds the `window - 1` positions that its next token sees beside itself,
  in whole pages. What a commit brings and no later token sees is not written.
  No row can lack a page, and none can keep one from another.

  Example:
    >>> import jax.numpy as jnp
    >>> cache = WindowKVCache.create(
    ...   window=3, batch=2, max_len=99, num_layers=1, num_kv_heads=1,
    ...   head_dim=2, page_size=4)
    >>> cache.pages[0].shape, cache.row_pages
    ((4, 1, 4, 4), 2)
  """

  pages: tuple[_base.KV, ...]
  """L layers [B * X, K, Z, 2H], X pages a row one after the other."""
  length: Array
  """[B] int32, committed positions."""
  window: int = struct.field(pytree_node=False)
  """Positions that a token sees, itself included."""
  table_width: int = struct.field(pytree_node=False)
  """M, pages of a row's positions, held or not."""

  @classmethod
  def create(
    cls,
    *,
    window: int,
    batch: int,
    max_len: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int = 16,
    dtype: jax.typing.DTypeLike = jnp.float32,
  ) -> Self:
    """Allocates the rings of B rows; nothing grows afterwards.

    Args:
      window: positions that a token sees, itself included, at least 1.
      batch: see `PagedKVCache.create`, as are the others.
      max_len: the most positions of a row.
      num_layers: L.
      num_kv_heads: K.
      head_dim: H.
      page_size: Z.
      dtype: of keys and values.
    """
    if window < 1:
      raise ValueError(
        f"window is {window}; a token sees at least itself, so 1"
      )
    num_pages = batch * window_pages(window, page_size)
    shape = (num_pages, num_kv_heads, page_size, 2 * head_dim)
    return cls(
      pages=_quantized.empty_layers(num_layers, shape, dtype),
      length=jnp.zeros((batch,), jnp.int32),
      window=window,
      table_width=-(-max_len // page_size),
    )

  @property
  def page_size(self) -> int:
    """Z, positions a page."""
    return self.pages[0].shape[2]

  @property
  def row_pages(self) -> int:
    """X, pages that a row holds at most."""
    return window_pages(self.window, self.page_size)

  @property
  def page_bytes(self) -> int:
    """Bytes of one page over all layers."""
    return sum(
      math.prod(x.shape[1:]) * x.dtype.itemsize
      for x in jax.tree.leaves(self.pages)
    )

  def _first_column(self, length: Array) -> Array:
    """The first column of the table that tokens from `length` on see."""
    return jnp.maximum(length - (self.window - 1), 0) // self.page_size

  def view(self, rows: Array | None = None) -> _base.CacheView:
    """Returns what a forward pass over `rows` [R] (default: all) reads."""
    if rows is None:
      rows = jnp.arange(self.length.shape[0], dtype=jnp.int32)
    length = self.length[rows]
    column = jnp.arange(self.table_width, dtype=jnp.int32)[None]
    # A page that was used anew is no longer that of its old column.
    held = (column >= self._first_column(length)[:, None]) & (
      column < -(-length // self.page_size)[:, None]
    )
    own = rows[:, None] * self.row_pages + column % self.row_pages
    num_pages = self.pages[0].shape[0]
    table = jnp.where(held, own, num_pages)
    return _base.CacheView(self.pages, table, length)

  def commit(
    self,
    block_kv: tuple[_base.KV, ...],
    path: Array,
    count: Array,
    rows: Array | None = None,
  ) -> tuple[Self, Array]:
    """Appends the accepted path to each row; see `PagedKVCache.commit`.

    A row that is not ok would have passed its table's end.
    """
    if rows is None:
      rows = jnp.arange(self.length.shape[0], dtype=jnp.int32)
    chex.assert_shape(path, (rows.shape[0], None))
    chex.assert_shape(count, rows.shape)
    length = self.length[rows]
    ok = length + count <= self.table_width * self.page_size
    count = jnp.where(ok, count, 0)
    step = jnp.arange(path.shape[1], dtype=jnp.int32)[None]
    position = length[:, None] + step
    column = position // self.page_size
    # Else an entry that nobody will see would take the place of one that
    # somebody will.
    seen = column >= self._first_column(length + count)[:, None]
    page = jnp.where(
      seen & (step < count[:, None]),
      rows[:, None] * self.row_pages + column % self.row_pages,
      self.pages[0].shape[0],
    )
    cache = dataclasses.replace(
      self,
      pages=_quantized.write(
        self.pages, block_kv, path, page, position % self.page_size
      ),
      length=self.length.at[rows].add(count),
    )
    return cache, ok

  def take(self, row: Array) -> tuple[_base.KV, ...]:
    """A copy of a row's ring, L layers [X, K, Z, 2H]; `row` is [] int32."""
    own = row * self.row_pages + jnp.arange(self.row_pages, dtype=jnp.int32)
    return jax.tree.map(lambda x: x[own], self.pages)

  def put(
    self, row: Array, contents: tuple[_base.KV, ...], length: Array
  ) -> Self:
    """Gives a row that holds nothing what `take` copied.

    Args:
      row: [] int32.
      contents: L layers [X, K, Z, 2H].
      length: [] int32, committed positions of it.
    """
    own = row * self.row_pages + jnp.arange(self.row_pages, dtype=jnp.int32)
    return dataclasses.replace(
      self,
      pages=jax.tree.map(
        lambda x, new: x.at[own].set(new), self.pages, contents
      ),
      length=self.length.at[row].set(length),
    )

  def quantize(
    self, dtype: jax.typing.DTypeLike
  ) -> tuple[Self, _quantized.QuantizationError]:
    """The same cache in eight bits; see `PagedKVCache.quantize`."""
    size, num_pages = self.page_size, self.pages[0].shape[0]
    live = np.zeros((num_pages, size), bool)
    view = jax.device_get((self.view().block_table, self.length))
    for table, length in zip(*view, strict=True):
      for column in np.flatnonzero(table < num_pages):
        live[table[column], : length - column * size] = True
    pages, error = _quantized.quantize(self.pages, jnp.asarray(live), dtype)
    return dataclasses.replace(self, pages=pages), error

  def release(self, mask: Array) -> Self:
    """Forgets the rows where `mask` [B] is true."""
    return dataclasses.replace(self, length=jnp.where(mask, 0, self.length))
