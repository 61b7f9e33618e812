"""Static token trees: frozen, hashable, built from paths."""

import dataclasses
import importlib.resources
import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Self

from ldjax import _render


@dataclasses.dataclass(frozen=True)
class TokenTree:
  """A topology whose content (which token stands where) comes from a draft.

  In a notebook it shows itself as a picture; `show` is that for terminals.

  A node is named by its path from the root: rank of the candidate at depth 1,
  at depth 2, and so on. `(0, 2)` is the third best second token after the
  best first one.

  Args:
    paths: the nodes besides the root, parents before children.

  Raises:
    ValueError: for a path that is empty, repeated, negative or without its
      parent.

  Example:
    >>> tree = TokenTree.from_paths([(0,), (1,), (0, 0)])
    >>> tree.parents, tree.ranks, tree.depths
    ((-1, 0, 0, 1), (0, 0, 1, 0), (0, 1, 1, 2))
  """

  paths: tuple[tuple[int, ...], ...]

  def __post_init__(self):
    seen: set[tuple[int, ...]] = {()}
    for path in self.paths:
      if not path:
        raise ValueError("a path is empty; the root is always there")
      if min(path) < 0:
        raise ValueError(f"path {path} holds a negative rank")
      if path in seen:
        raise ValueError(f"path {path} is there twice")
      if path[:-1] not in seen:
        raise ValueError(
          f"path {path} stands before or without its parent {path[:-1]}; add"
          " the parent, or build the tree with TokenTree.from_paths"
        )
      seen.add(path)

  @classmethod
  def from_paths(cls, paths: Iterable[Sequence[int]]) -> Self:
    """Builds a tree from paths in any order.

    Raises:
      ValueError: if a path lacks its parent, with the path.
    """
    ordered = sorted(
      (tuple(int(rank) for rank in path) for path in paths),
      key=lambda path: (len(path), path),
    )
    return cls(tuple(ordered))

  @classmethod
  def root_only(cls) -> Self:
    """The tree without candidates: plain decoding."""
    return cls(())

  @classmethod
  def chain(cls, depth: int) -> Self:
    """One candidate at each of `depth` positions.

    Example:
      >>> TokenTree.chain(2).parents
      (-1, 0, 1)
    """
    if depth < 0:
      raise ValueError(f"a chain of depth {depth}; it must be at least 0")
    return cls(tuple((0,) * n for n in range(1, depth + 1)))

  @classmethod
  def product(cls, widths: Sequence[int]) -> Self:
    """Every combination of the best `widths[d]` candidates at each depth.

    This is the older of Medusa's two formats.

    Example:
      >>> TokenTree.product([2, 3]).size
      9
    """
    if not widths or min(widths) < 1:
      raise ValueError(
        f"widths are {list(widths)}; give at least one, each at least 1"
      )
    return cls.from_paths(
      path
      for depth in range(1, len(widths) + 1)
      for path in itertools.product(*map(range, widths[:depth]))
    )

  @classmethod
  def medusa(
    cls, choices: str | Sequence[int] | Sequence[Sequence[int]]
  ) -> Self:
    """Builds a tree from Medusa's notation.

    Args:
      choices: the name of a published list (`mc_sim_7b_63`,
        `vicuna_7b_stage2`, ...), a list of paths, or the older list of ranks a
        depth. In the older list the first entry counts the root's own token
        and must be 1.

    Raises:
      ValueError: for an unknown name (the error lists the known ones) or
        notation.

    Example:
      >>> TokenTree.medusa("mc_sim_7b_63").size
      64
      >>> TokenTree.medusa([1, 7, 6]).size
      50

    Source: FasterDecoding/Medusa, `medusa_choices.py` (Apache-2.0).
    """
    if isinstance(choices, str):
      published = json.loads(
        importlib.resources.files("ldjax.decoding")
        .joinpath("medusa_choices.json")
        .read_text("utf-8")
      )
      if choices not in published:
        raise ValueError(
          f"no published tree is called {choices!r}; there are"
          f" {', '.join(sorted(published))}"
        )
      return cls.from_paths(published[choices])
    if all(isinstance(choice, int) for choice in choices):
      widths = [int(choice) for choice in choices]  # type: ignore[arg-type]
      if not widths or widths[0] != 1:
        raise ValueError(
          f"ranks a depth are {widths}; the first stands for the root's own"
          " token and must be 1"
        )
      return cls.product(widths[1:]) if widths[1:] else cls.root_only()
    return cls.from_paths(choices)  # type: ignore[arg-type]

  @property
  def size(self) -> int:
    """T, nodes with the root."""
    return len(self.paths) + 1

  @property
  def depth(self) -> int:
    """D, nodes below the root on the longest path."""
    return max(map(len, self.paths), default=0)

  @property
  def parents(self) -> tuple[int, ...]:
    """The parent of each node, -1 for the root."""
    index = {(): 0, **{path: i + 1 for i, path in enumerate(self.paths)}}
    return (-1, *(index[path[:-1]] for path in self.paths))

  @property
  def depths(self) -> tuple[int, ...]:
    """The depth of each node, 0 for the root."""
    return (0, *map(len, self.paths))

  @property
  def ranks(self) -> tuple[int, ...]:
    """The rank of each node among its depth's candidates, 0 for the root."""
    return (0, *(path[-1] for path in self.paths))

  def cut(self, depth: int) -> Self:
    """The tree without the nodes deeper than `depth`.

    Args:
      depth: at least 0.

    Example:
      >>> TokenTree.medusa("mc_sim_7b_63").cut(1).size
      11
    """
    return dataclasses.replace(
      self, paths=tuple(path for path in self.paths if len(path) <= depth)
    )

  def _labels(self) -> list[str]:
    return ["root", *map(str, self.ranks[1:])]

  def _repr_svg_(self) -> str:
    titles = ["node 0, the root"]
    titles += [f"node {i}, path {p}" for i, p in enumerate(self.paths, 1)]
    return _render.tree_svg(self.parents, self._labels(), titles=titles)

  def show(self) -> str:
    """Draws the tree in text, a line a node, each with its rank.

    Example:
      >>> print(TokenTree.from_paths([(0,), (1,), (0, 0)]).show())
      root
      ├── 0
      │ └── 0
      └── 1
    """
    return _render.tree_text(self.parents, self._labels())
