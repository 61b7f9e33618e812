"""Which full pages already hold the keys and values of a prefix."""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np


class PrefixIndex:
  """Pages by the tokens up to their end, least recently used first out.

  It lives on the host and holds numbers of pages only; whoever keeps it holds
  a reference to each of its pages in the pool. A page's key is a hash of the
  key before it and of the page's own tokens, so that a page is found only
  behind the same prefix.

  Args:
    page_size: Z, positions a page.
    salt: what else the contents depend on: model, draft, dtype of the cache.

  Example:
    >>> index = PrefixIndex(page_size=2, salt="model")
    >>> index.insert([5, 6, 7, 8, 9], [3, 0, 4])
    [3, 0]
    >>> index.match([5, 6, 7, 8, 1])
    [3, 0]
    >>> index.match([5, 6, 7, 8])  # leaves a token to run
    [3]
  """

  def __init__(self, *, page_size: int, salt: str = ""):
    self._size = page_size
    self._root = hashlib.blake2b(salt.encode(), digest_size=16).digest()
    self._pages: OrderedDict[bytes, int] = OrderedDict()

  def __len__(self) -> int:
    return len(self._pages)

  @property
  def pages(self) -> list[int]:
    """All pages that it holds, least recently used first."""
    return list(self._pages.values())

  def _keys(self, tokens: Sequence[int], count: int) -> Iterable[bytes]:
    array = np.asarray(tokens, np.int32)
    key = self._root
    for i in range(count):
      page = array[i * self._size : (i + 1) * self._size]
      key = hashlib.blake2b(key + page.tobytes(), digest_size=16).digest()
      yield key

  def _touch(self, keys: Sequence[bytes]) -> None:
    # The last page first, so that a page goes before those it stands on.
    for key in reversed(keys):
      self._pages.move_to_end(key)

  def match(self, tokens: Sequence[int]) -> list[int]:
    """Pages that hold the longest known prefix of some tokens.

    At least the last token is left over: its hidden state has to be computed.

    Args:
      tokens: of a prompt.

    Returns:
      Numbers of full pages, in order.
    """
    found = []
    for key in self._keys(tokens, (len(tokens) - 1) // self._size):
      if key not in self._pages:
        break
      found.append(key)
    self._touch(found)
    return [self._pages[key] for key in found]

  def insert(self, tokens: Sequence[int], pages: Sequence[int]) -> list[int]:
    """Takes note of the pages that a sequence has filled.

    Args:
      tokens: committed ones, from the start.
      pages: that hold them, in order; one that is not full is left out.

    Returns:
      Pages that it holds from now on; where a prefix is known already the
      known page stays.
    """
    count = min(len(tokens) // self._size, len(pages))
    keys = list(self._keys(tokens, count))
    new = []
    for key, page in zip(keys, pages, strict=False):
      if key not in self._pages:
        self._pages[key] = int(page)
        new.append(int(page))
    self._touch(keys)
    return new

  def drop(self, count: int, references: np.ndarray) -> list[int]:
    """Gives up pages that nobody else holds, the least recently used first.

    Args:
      count: how many at most.
      references: [P] how often each page of the pool is held.

    Returns:
      Pages that it holds no longer.
    """
    gone = [key for key, page in self._pages.items() if references[page] == 1][
      : max(count, 0)
    ]
    return [self._pages.pop(key) for key in gone]

  def renumber(self, moved: np.ndarray) -> None:
    """Follows a pool to another size.

    Args:
      moved: [P] new number of each page, as `resize` gives it.
    """
    for key, page in self._pages.items():
      self._pages[key] = int(moved[page])
