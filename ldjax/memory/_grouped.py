"""Layers with and without a window, each group with pages of its own."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ldjax import _base, typing
from ldjax.memory import _paged, _pool, _quantized, _window

Array = typing.Array


def kept_windows(
  windows: Sequence[int | None], max_len: int, page_size: int
) -> tuple[int | None, ...]:
  """The windows that save memory: those of fewer pages than a whole row.

  Args:
    windows: of each layer, None for one that sees everything.
    max_len: the most positions of a row.
    page_size: Z.

  Example:
    >>> kept_windows((4, None, 4096), max_len=100, page_size=16)
    (4, None, None)
  """
  whole = -(-max_len // page_size)
  return tuple(
    window
    if window is not None and _window.window_pages(window, page_size) < whole
    else None
    for window in windows
  )


@struct.dataclass(kw_only=True)
class GroupedKVCache:
  """One group of layers for each window, and one for layers that see all.

  The latter take pages from a pool as a `PagedKVCache` does; those with a
  window hold a ring of pages a row, as a `WindowKVCache` does, so that only
  the pool can run short. A row commits in all groups or in none.

  Example:
    >>> cache = GroupedKVCache.create(
    ...   windows=(3, None, 3), batch=2, max_len=96, num_kv_heads=1, head_dim=2,
    ...   page_size=4)
    >>> [layer.shape[0] for layer in cache.pages], cache.pool.num_pages
    ([4, 48, 4], 48)
  """

  full: _paged.PagedKVCache | None
  """The layers that see everything; None if there are none."""
  windowed: tuple[_window.WindowKVCache, ...]
  """The others, a group a window."""
  places: tuple[tuple[int, int], ...] = struct.field(pytree_node=False)
  """Group and index in it of each of the L layers; group 0 is `full`."""

  @classmethod
  def create(
    cls,
    *,
    windows: Sequence[int | None],
    batch: int,
    max_len: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int = 16,
    num_pages: int | None = None,
    dtype: jax.typing.DTypeLike = jnp.float32,
  ) -> Self:
    """Allocates pool and rings.

    Args:
      windows: of each layer, None for one that sees everything.
      batch: see `PagedKVCache.create`, as are the others.
      max_len: the most positions of a row.
      num_kv_heads: K.
      head_dim: H.
      page_size: Z.
      num_pages: P of the pool; the rings are apart from it.
      dtype: of keys and values.

    Raises:
      ValueError: for sizes below their limits, no window, or another dtype.
    """
    kinds = tuple(dict.fromkeys(w for w in windows if w is not None))
    if not kinds:
      raise ValueError(
        f"windows is {tuple(windows)}; without any, take a PagedKVCache"
      )
    groups: tuple[int | None, ...] = (None, *kinds)
    members: list[list[int]] = [[] for _ in groups]
    places = []
    for layer, window in enumerate(windows):
      group = groups.index(window)
      places.append((group, len(members[group])))
      members[group].append(layer)
    sizes: dict[str, Any] = {
      "batch": batch,
      "max_len": max_len,
      "num_kv_heads": num_kv_heads,
      "head_dim": head_dim,
      "page_size": page_size,
      "dtype": dtype,
    }
    # Made even for no layer, since it checks the sizes.
    full = _paged.PagedKVCache.create(
      num_layers=len(members[0]), num_pages=num_pages, **sizes
    )
    return cls(
      full=full if members[0] else None,
      windowed=tuple(
        _window.WindowKVCache.create(
          window=window, num_layers=len(layers), **sizes
        )
        for window, layers in zip(kinds, members[1:], strict=True)
      ),
      places=tuple(places),
    )

  @property
  def _groups(self) -> tuple[Any, ...]:
    return (self.full, *self.windowed)

  def _by_layer(self, of_group: Sequence[Any]) -> tuple[Any, ...]:
    """One entry a layer of what each group has for its own layers."""
    return tuple(of_group[group][index] for group, index in self.places)

  def _by_group(self, of_layer: Sequence[Any]) -> list[tuple[Any, ...]]:
    """What `_by_layer` puts together, taken apart again."""
    parts: list[list[Any]] = [[] for _ in self._groups]
    for (group, _), entry in zip(self.places, of_layer, strict=True):
      parts[group].append(entry)
    return list(map(tuple, parts))

  @property
  def length(self) -> Array:
    """[B] int32, committed positions."""
    return self.windowed[0].length

  @property
  def pages(self) -> tuple[_base.KV, ...]:
    """L layers [P, K, Z, 2H], each with the P of its group."""
    return self._by_layer([group and group.pages for group in self._groups])

  @property
  def pool(self) -> _pool.PagePool:
    """Which pages are in use, of the layers that see everything."""
    return self._full("pool").pool

  @property
  def block_table(self) -> Array:
    """[B, M] int32, of the layers that see everything."""
    return self._full("block_table").block_table

  def _full(self, name: str) -> _paged.PagedKVCache:
    if self.full is None:
      raise AttributeError(
        f"this cache has no {name}: each of its layers has a window, and holds"
        " a fixed ring of pages a row"
      )
    return self.full

  @property
  def page_size(self) -> int:
    """Z, positions a page."""
    return self.windowed[0].page_size

  @property
  def page_bytes(self) -> int:
    """Bytes of one page of the pool; 0 if there is none."""
    return 0 if self.full is None else self.full.page_bytes

  def held_bytes(self, positions: int) -> int:
    """Bytes of the pages that a row of so many positions holds."""
    pages = -(-positions // self.page_size)
    return pages * self.page_bytes + sum(
      min(pages, ring.row_pages) * ring.page_bytes for ring in self.windowed
    )

  def view(self, rows: Array | None = None) -> _base.CacheView:
    """Returns what a forward pass over `rows` [R] (default: all) reads."""
    views = [group and group.view(rows) for group in self._groups]
    tables = [view and (view.block_table,) * len(view.pages) for view in views]
    return _base.CacheView(self.pages, self._by_layer(tables), views[1].length)

  def commit(
    self,
    block_kv: tuple[_base.KV, ...],
    path: Array,
    count: Array,
    rows: Array | None = None,
  ) -> tuple[Self, Array]:
    """Appends the accepted path to each row; see `PagedKVCache.commit`."""
    blocks = self._by_group(block_kv)
    full = self.full
    ok = jnp.ones(count.shape, bool)
    if full is not None:
      full, ok = full.commit(blocks[0], path, count, rows)
    # Rings end where the tables of the pool do, and lack nothing else.
    done = [
      ring.commit(block, path, jnp.where(ok, count, 0), rows)
      for ring, block in zip(self.windowed, blocks[1:], strict=True)
    ]
    windowed = tuple(ring for ring, _ in done)
    ok = ok & done[0][1]
    return dataclasses.replace(self, full=full, windowed=windowed), ok

  def _each(self, act: Callable[[Any], Any]) -> Self:
    return dataclasses.replace(
      self,
      full=self.full and act(self.full),
      windowed=tuple(map(act, self.windowed)),
    )

  def take(self, row: Array) -> tuple[Any, ...]:
    """A copy of what a row's pages hold, for `put`; `row` is [] int32."""
    return tuple(group and group.take(row) for group in self._groups)

  def put(
    self, row: Array, contents: tuple[Any, ...], length: Array
  ) -> tuple[Self, Array]:
    """Gives a row that holds nothing what `take` copied.

    Args:
      row: [] int32.
      contents: what `take` gave.
      length: [] int32, committed positions of it.

    Returns:
      The cache and ok []; if not ok, pages were lacking and the row still holds
      nothing.
    """
    full, ok = self.full, jnp.bool_(True)
    if full is not None:
      full, ok = full.put(row, contents[0], length)
    windowed = tuple(
      ring.put(row, held, jnp.where(ok, length, 0))
      for ring, held in zip(self.windowed, contents[1:], strict=True)
    )
    return dataclasses.replace(self, full=full, windowed=windowed), ok

  def quantize(
    self, dtype: jax.typing.DTypeLike
  ) -> tuple[Self, _quantized.QuantizationError]:
    """The same cache in eight bits; see `PagedKVCache.quantize`."""
    done = [group and group.quantize(dtype) for group in self._groups]
    errors = [each and list(zip(*each[1], strict=True)) for each in done]
    by_layer = zip(*self._by_layer(errors), strict=True)
    cache = dataclasses.replace(
      self,
      full=done[0] and done[0][0],
      windowed=tuple(each[0] for each in done[1:]),
    )
    return cache, _quantized.QuantizationError(*map(np.stack, by_layer))

  def release(self, mask: Array) -> Self:
    """Forgets the rows where `mask` [B] is true."""
    return self._each(lambda group: group.release(mask))
