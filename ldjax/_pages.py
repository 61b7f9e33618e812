"""What the host decides about the pages of one engine, between steps.

When pages are lacking: prefix pages that no row holds are dropped, then the
pool grows, and only then do rows give way, as `on_pressure` says.
"""

import dataclasses
import functools
import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ldjax import _cache, _row, assemble, decoding, memory, typing

Array = typing.Array

_LOG = logging.getLogger("ldjax.memory")


@dataclasses.dataclass(kw_only=True)
class MemoryCounts:
  """What was done about memory so far."""

  reused: int = 0
  """Prompt tokens that were not computed, since shared pages held them."""
  dropped: int = 0
  """Prefix pages that were dropped to make room."""
  grown: int = 0
  """Times that the pool grew."""
  preempted: int = 0
  """Rows that gave their pages back, to be computed again."""
  offloaded: int = 0
  """Rows whose pages went to the host's memory for a while."""
  compressed: int = 0
  """Times that the cache became int8: 0 or 1."""


@functools.lru_cache(maxsize=64)
def _smaller(
  init_cache: Callable[..., _cache.Cache], num_pages: int
) -> Callable[[int], _cache.Cache]:
  # The same function each time, so that what was compiled for it is found.
  return functools.partial(init_cache, num_pages=num_pages)


_share = jax.jit(lambda cache, *args: cache.share(*args), donate_argnums=0)
_take = jax.jit(lambda cache, row: cache.take(row))
_hold = jax.jit(lambda pool, pages: pool.retain(pages), donate_argnums=0)
_let_go = jax.jit(lambda pool, pages: pool.release(pages), donate_argnums=0)
_park = jax.jit(decoding.park, donate_argnums=0)
_resume = jax.jit(decoding.resume, donate_argnums=0)


class Pages:
  """The pool of one engine as the host sees it.

  Args:
    model: what decodes.
    batch: B, rows.
    share: whether full pages of prompts and texts are kept for prompts that
      begin alike.
    progress: called with a line of text before a long compilation.
  """

  def __init__(
    self,
    model: assemble.LanguageModel,
    batch: int,
    share: bool,
    progress: assemble.Progress | None,
  ):
    self.counts = MemoryCounts()
    self._model = model
    self._size = model.page_size
    self._progress = progress
    row_pages = -(-model.max_len // model.page_size)
    self._whole = self._most = batch * row_pages
    if model.num_pages is not None:
      self._most = min(self._most, model.num_pages)
    self.other_cache: Callable[[int], _cache.Cache] | None = None
    """Makes the cache to begin with, unless the model's own does."""
    if model.initial_pages is None:
      self._pages = model.num_pages or self._most
    else:
      self._pages = min(model.initial_pages, self._most)
      self.other_cache = _smaller(model.init_cache, self._pages)
    self._start = self._pages
    self._table = np.full((max(self._whole, self._pages),), 2**30, np.int32)
    self._row_pages = row_pages
    one = jax.eval_shape(functools.partial(model.init_cache, 1))
    dtype = one.pages[0].dtype
    self._held_bytes = one.held_bytes
    # A page that scrolls out of a window can't begin another prompt.
    share = share and isinstance(one, memory.PagedKVCache)
    self._eight_bits = dtype.itemsize == 1
    self._index: memory.PrefixIndex | None = None
    if share and not model.preallocates and not model.draft.observes_all:
      salt = f"{model.name}\n{model.draft_name}\n{dtype}"
      self._index = memory.PrefixIndex(page_size=self._size, salt=salt)

  @property
  def sharing(self) -> bool:
    """Whether pages are kept for prompts that begin alike."""
    return self._index is not None

  @property
  def ample(self) -> bool:
    """Whether no row can ever lack a page."""
    return self._index is None and self._pages >= self._whole

  def used_bytes(self, lengths: Sequence[int]) -> int:
    """Bytes of the pages that rows of so many tokens hold.

    Args:
      lengths: tokens of each, of which the last one is pending.
    """
    whole = self._model.max_len if self._model.preallocates else 0
    return sum(self._held_bytes(max(n - 1, whole)) for n in lengths)

  def _padded(self, pages: Sequence[int]) -> np.ndarray:
    table = self._table.copy()
    table[: len(pages)] = pages
    return table

  def _match(self, tokens: Sequence[int]) -> list[int]:
    """Pages that hold the start of these tokens."""
    return self._index.match(tokens) if self._index else []

  def is_filled_by(
    self, tokens: Sequence[int], others: Sequence[_row.Row | None]
  ) -> bool:
    """Whether rows that are about to be noted hold more of these tokens."""
    known = (len(self._match(tokens)) + 1) * self._size
    return known < len(tokens) and any(
      row is not None and row.known_tokens[:known] == tokens[:known]
      for row in others
    )

  def has_room(
    self, state: Any, tokens: Sequence[int], running: int, shares: bool = True
  ) -> tuple[Any, bool]:
    """Sees to free pages for a row of these tokens.

    Args:
      state: what runs.
      tokens: all that the row has.
      running: rows that hold pages, and will need more.
      shares: whether it begins with pages that are there.

    Returns:
      The state, and whether they are there.
    """
    if self.ample:
      return state, True
    needed = -(-len(tokens) // self._size)
    if self._pages < self._whole:
      # Each running row will need a page before long; one that began without
      # regard to it would soon have to give its own back.
      needed += running
    if not shares:
      return self.make_room(state, needed)
    return self.make_room(state, needed - len(self._match(tokens)), tokens)

  def relieve(self, state: Any, needed: int) -> tuple[Any, bool]:
    """Sees to free pages for rows that lack them.

    Returns:
      The state, and whether it is worth going on: there are as many, or more
      than before.
    """
    if not self._index and self._pages >= self._most:
      return state, False
    before = self.counts.dropped, self.counts.grown
    state, ok = self.make_room(state, needed)
    return state, ok or before != (self.counts.dropped, self.counts.grown)

  def begin(
    self, state: Any, row: int, tokens: Sequence[int]
  ) -> tuple[Any, int]:
    """Gives an empty row the pages that hold the start of its tokens.

    Returns:
      The state and how many tokens need not be read.
    """
    pages = self._match(tokens)
    if not pages:
      return state, 0
    table = self._padded(pages)[: self._row_pages]
    cache = _share(state.cache, np.int32(row), table, np.int32(len(pages)))
    shared = len(pages) * self._size
    self.counts.reused += shared
    return state.replace(cache=cache), shared

  def note(self, state: Any, tokens: Sequence[int], table: Any) -> Any:
    """Keeps the full pages of a row, for prompts that begin alike.

    Args:
      state: in which the row still holds its pages.
      tokens: committed ones of the row.
      table: [M], its block table.
    """
    if self._index is None:
      return state
    full = len(tokens) // self._size
    if len(self._match([*tokens[: full * self._size], -1])) == full:
      return state  # all known; the device need not be waited for
    new = self._index.insert(tokens, np.asarray(table).tolist())
    return self._with_pool(state, _hold, new) if new else state

  def forget(self, state: Any) -> Any:
    """Drops every prefix page that no row holds."""
    if self._index is None:
      return state
    references = np.asarray(state.cache.pool.references)
    return self._drop(state, len(references), references)

  def _drop(self, state: Any, count: int, references: np.ndarray) -> Any:
    gone = self._index.drop(count, references) if self._index else []
    if not gone:
      return state
    self.counts.dropped += len(gone)
    _LOG.info("dropped %d prefix pages of %d", len(gone), self._pages)
    return self._with_pool(state, _let_go, gone)

  def _with_pool(self, state: Any, act: Any, pages: Sequence[int]) -> Any:
    pool = act(state.cache.pool, self._padded(pages))
    return state.replace(cache=state.cache.replace(pool=pool))

  def make_room(
    self, state: Any, needed: int, tokens: Sequence[int] = ()
  ) -> tuple[Any, bool]:
    """Sees to free pages, without taking any from a row.

    Args:
      state: what runs.
      needed: free pages that are wanted.
      tokens: a prompt whose shared pages must not be dropped for it.

    Returns:
      The state, and whether there are as many free pages.
    """
    references = np.asarray(state.cache.pool.references)
    free = int((references == 0).sum())
    if free >= needed:
      return state, True
    if self._index:
      references = references.copy()
      references[self._match(tokens)] += 1
      # A quarter at a time, so that it need not be done each round.
      count = max(needed - free, len(self._index) // 4)
      before = self.counts.dropped
      state = self._drop(state, count, references)
      free += self.counts.dropped - before
    if free < needed and self._pages < self._most:
      before = self._pages
      state = self._grow(state, needed - free)
      free += self._pages - before
    return state, free >= needed

  def _grow(self, state: Any, lacking: int) -> Any:
    size = self._start
    while size < self._pages + lacking:
      size *= 2
    size = min(size, self._most)
    page_bytes = state.cache.page_bytes
    line = (
      f"The page pool grows from {self._pages} to {size} pages"
      f" ({size * page_bytes / 2**20:.0f} MiB); steps compile anew for it"
    )
    _LOG.info(line)
    if self._progress is not None:
      self._progress(line)
    self.counts.grown += 1
    return self._resize(state, size)

  def _resize(self, state: Any, size: int) -> Any:
    cache, moved = memory.resize(state.cache, size)
    if self._index:
      self._index.renumber(moved)
    self._pages = size
    return state.replace(cache=cache)

  def give_way(
    self, state: Any, at: int, row: _row.Row, mask: Array, preempt: Any
  ) -> Any:
    """Frees pages that rows hold, as `on_pressure` says.

    Args:
      state: what runs.
      at: number of the row that is the newest.
      row: it.
      mask: [B] bool, true for it.
      preempt: (state, mask) -> state, the decoder's.

    Raises:
      MemoryError: where that is what is wanted.
    """
    wanted = self._model.on_pressure
    if wanted == "error":
      raise self._exhausted(state)
    if wanted == "compress" and not (
      self._eight_bits or self.counts.compressed
    ):
      return self._compress(state)
    row.waiting = True
    if wanted == "offload":
      state, row.parked = self._park(state, at, mask)
      return state
    self.counts.preempted += 1
    _LOG.info("row %d gave %d positions back", at, row.known - 1)
    return preempt(state, mask)

  def _compress(self, state: Any) -> Any:
    """Turns the cache into int8, with as many more pages as then fit."""
    before = state.cache.page_bytes
    cache, error = state.cache.quantize("int8")
    state = state.replace(cache=cache)
    self._held_bytes = jax.eval_shape(lambda x: x, cache).held_bytes
    size = min(self._pages * before // cache.page_bytes, self._whole)
    line = (
      f"Rows need more than {self._pages} pages: the cache becomes int8"
      f" (largest error {error.largest.max():.1%} of a row's largest number,"
      f" rms {error.rms.max():.1%}); from here on texts are those of an int8"
      " cache"
    )
    warnings.warn(line, stacklevel=2)
    _LOG.warning(line)
    self.counts.compressed += 1
    self._most = max(size, self._pages)
    return self._resize(state, self._most)

  def _park(self, state: Any, row: int, mask: Array) -> tuple[Any, Any]:
    """Moves a row's pages to the host's memory.

    Returns:
      The state, and what `unpark` takes.
    """
    contents, length = jax.device_get(
      (_take(state.cache, np.int32(row)), state.cache.length[row])
    )
    self.counts.offloaded += 1
    _LOG.info("row %d moved %d positions to the host", row, length)
    return _park(state, mask), (contents, length)

  def unpark(self, state: Any, row: int, parked: Any) -> Any:
    """Moves them back, where `make_room` found that there is room."""
    contents, length = parked
    state, _ = _resume(state, np.int32(row), contents, length)
    return state

  def _exhausted(self, state: Any) -> MemoryError:
    mib = state.cache.page_bytes * self._pages / 2**20
    return MemoryError(
      f"rows need more than the {self._pages} pages of"
      f" {self._size} positions that the pool may have ({mib:.0f} MiB); give"
      " a larger num_pages or memory_budget, a smaller batch_size, or"
      ' on_pressure="preempt"'
    )
