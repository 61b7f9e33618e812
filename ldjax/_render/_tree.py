"""Which nodes of a tree are drawn, and as what."""

from collections.abc import Sequence
from typing import NamedTuple


class Node(NamedTuple):
  """One node of a drawing."""

  parent: int
  """Place of the parent among the nodes drawn, -1 for the root."""
  text: str
  """Of its token."""
  title: str
  """What more there is to say of it."""
  kind: str
  """`"root"`, `"accepted"`, `"refused"`, `"bonus"`, or `"candidate"` where
  there is no walk."""


def _check(
  parents: Sequence[int],
  labels: Sequence[str | None],
  path: Sequence[int],
  bonus: str | None,
) -> None:
  if len(parents) != len(labels) or not labels:
    raise ValueError(
      f"there are {len(parents)} parents and {len(labels)} labels; give one of"
      " each a node, and at least the root"
    )
  for node, parent in enumerate(parents):
    if not -1 <= parent < node or (node == 0 and labels[0] is None):
      raise ValueError(
        f"node {node} has parent {parent} and label {labels[node]!r}; the root"
        " comes first, with parent -1 and a label, and a parent before its"
        " children"
      )
  for node, before in zip(path, (-1, *path), strict=False):
    if not 0 <= node < len(parents):
      raise ValueError(
        f"the path holds node {node}; the tree has {len(parents)} nodes"
      )
    if parents[node] != before or (before < 0 and node) or labels[node] is None:
      raise ValueError(
        f"the path {list(path)} steps from node {before} to node {node}, whose"
        f" parent is {parents[node]} and whose label is {labels[node]!r}; a"
        " walk begins at the root and steps to children that carry a token"
      )
  if bonus is not None and not path:
    raise ValueError(
      f"the bonus token {bonus!r} has no path that it could end; give the path"
    )


def nodes(
  parents: Sequence[int],
  labels: Sequence[str | None],
  path: Sequence[int] = (),
  bonus: str | None = None,
  titles: Sequence[str] = (),
) -> tuple[list[Node], int]:
  """Sorts out which nodes to draw.

  A node without a token, and all that hangs below it, can never be accepted
  and is left out.

  Args:
    parents: the parent of each of T nodes, -1 for the root, which comes first.
    labels: T texts; None for a node without a token.
    path: nodes that a walk passed, root first; empty for no walk.
    bonus: text of the token that was drawn at the walk's end, or None.
    titles: T texts of what more there is to say; empty for nothing. One more
      speaks of the bonus token.

  Returns:
    The nodes, parents before children, and how many were left out.

  Raises:
    ValueError: for lengths that differ, or a path that is no walk.
  """
  _check(parents, labels, path, bonus)
  titles = [*titles, *[""] * (len(labels) + 1 - len(titles))]
  place: dict[int, int] = {-1: -1}
  drawn: list[Node] = []
  for index, (parent, text) in enumerate(zip(parents, labels, strict=True)):
    if text is None or parent not in place or (parent < 0 and index):
      continue
    if index == 0:
      kind = "root"
    elif not path:
      kind = "candidate"
    else:
      kind = "accepted" if index in path else "refused"
    place[index] = len(drawn)
    drawn.append(Node(place[parent], text, titles[index], kind))
  left_out = len(labels) - len(drawn)
  if bonus is not None:
    drawn.append(Node(place[path[-1]], bonus, titles[len(labels)], "bonus"))
  return drawn, left_out


def with_left_out(notes: Sequence[str], left_out: int) -> list[str]:
  """Notes, with one on the nodes that are not shown."""
  if not left_out:
    return list(notes)
  what = "1 node" if left_out == 1 else f"{left_out} nodes"
  return [*notes, f"{what} without a token not shown"]
