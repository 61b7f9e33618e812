"""A token tree as plain text, one node a line."""

from collections.abc import Sequence

from ldjax._render import _labels, _tree

_COLUMNS = 40
# How the line of a child begins: in the middle, last, and the sign before it.
_BRANCH = {
  "accepted": ("┝━", "┕━", "● "),
  "bonus": ("├╌", "└╌", "◌ "),
  "refused": ("├─", "└─", "─ "),
  "candidate": ("├─", "└─", "─ "),
}


def tree_text(
  parents: Sequence[int],
  labels: Sequence[str | None],
  *,
  path: Sequence[int] = (),
  bonus: str | None = None,
  notes: Sequence[str] = (),
) -> str:
  """Draws a token tree with box characters.

  Accepted nodes carry ●, the bonus token ◌, others nothing.

  Args:
    parents: the parent of each of T nodes, -1 for the root, which comes first.
    labels: T texts; None for a node without a token, which is not shown.
    path: nodes that a walk passed, root first; empty for no walk.
    bonus: text of the token that was drawn at the walk's end, or None.
    notes: lines to put below.

  Returns:
    Lines, the last one without a line end.

  Raises:
    ValueError: for lengths that differ, or a path that is no walk.

  Example:
    >>> print(tree_text([-1, 0, 0, 1], ["is", "Paris", "a", ","], path=[0, 1],
    ...   bonus="."))
    ● is
    ┝━● Paris
    │ ├── ,
    │ └╌◌ .
    └── a
  """
  nodes, left_out = _tree.nodes(parents, labels, path, bonus)
  children: list[list[int]] = [[] for _ in nodes]
  for index, node in enumerate(nodes[1:], 1):
    children[node.parent].append(index)
  lines = []
  # Not recursive: a chain may be deeper than Python's stack.
  stack = [(0, "", "● " if path else "")]
  while stack:
    index, indent, begin = stack.pop()
    lines.append(begin + _labels.label(nodes[index].text, _COLUMNS))
    for child in reversed(children[index]):
      last = child == children[index][-1]
      middle, end, sign = _BRANCH[nodes[child].kind]
      stack.append(
        (
          child,
          indent + ("  " if last else "│ "),
          indent + (end if last else middle) + sign,
        )
      )
  notes = _tree.with_left_out(notes, left_out)
  return "\n".join([*lines, *map(_labels.harmless, notes)])
