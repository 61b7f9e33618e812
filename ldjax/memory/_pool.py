"""Which pages are in use: a reference count a page, and nothing else.

A page is free exactly when its count is zero, so a free list that disagrees
with the counts cannot exist.
"""

import dataclasses
from typing import Self

import jax.numpy as jnp
from flax import struct
from jax import lax

from ldjax import typing

Array = typing.Array


@struct.dataclass(kw_only=True)
class PagePool:
  """Reference counts of P pages.

  Example:
    >>> import jax.numpy as jnp
    >>> pool = PagePool.create(3)
    >>> pool, pages, ok = pool.allocate(jnp.array([2, 2]), 2)
    >>> pages.tolist(), ok.tolist(), int(pool.num_free)
    ([[0, 1], [3, 3]], [True, False], 1)
  """

  references: Array
  """[P] int32, how many sequences hold the page."""

  @classmethod
  def create(cls, num_pages: int) -> Self:
    """Returns a pool of `num_pages` free pages."""
    if num_pages < 1:
      raise ValueError(f"num_pages is {num_pages}; a pool needs at least 1")
    return cls(references=jnp.zeros((num_pages,), jnp.int32))

  @property
  def num_pages(self) -> int:
    """P."""
    return self.references.shape[0]

  @property
  def num_free(self) -> Array:
    """[] int32, pages that nobody holds."""
    return jnp.sum(self.references == 0, dtype=jnp.int32)

  def allocate(
    self, counts: Array, max_count: int
  ) -> tuple[Self, Array, Array]:
    """Hands out pages to R rows in one operation, all or nothing for each.

    Rows are served in order; one that asks for more than is left gets none
    and leaves the rest to those after it.

    Args:
      counts: [R] int32, pages each row asks for, at most `max_count`.
      max_count: the width of the answer.

    Returns:
      The pool; pages [R, max_count] int32, P where there is none; ok [R].
    """
    free = jnp.nonzero(
      self.references == 0, size=self.num_pages, fill_value=self.num_pages
    )[0].astype(jnp.int32)

    def serve(taken, count):
      ok = (taken + count <= self.num_free) & (count <= max_count)
      return taken + jnp.where(ok, count, 0), (taken, ok)

    _, (start, ok) = lax.scan(serve, jnp.int32(0), counts.astype(jnp.int32))
    column = jnp.arange(max_count, dtype=jnp.int32)[None]
    wanted = (column < counts[:, None]) & ok[:, None]
    pages = jnp.where(
      wanted,
      free.at[start[:, None] + column].get(
        mode="fill", fill_value=self.num_pages
      ),
      self.num_pages,
    )
    return self.retain(pages), pages, ok

  def retain(self, pages: Array) -> Self:
    """Adds a reference to each of `pages` (any shape; P or more is skipped)."""
    return dataclasses.replace(
      self, references=self.references.at[pages].add(1, mode="drop")
    )

  def release(self, pages: Array) -> Self:
    """Takes a reference from each of `pages` (P or more is skipped)."""
    return dataclasses.replace(
      self, references=self.references.at[pages].add(-1, mode="drop")
    )
