"""A token tree as SVG.

JupyterLab puts an SVG into an `<img>`, where `currentColor` is black on any
theme, and GitHub's viewer takes style sheets away. So every text stands in a
box of its own colour, every colour is an attribute, and the lines have a tone
that shows on white and on dark.
"""

import html
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ldjax._render import _labels, _layout, _tree

_FONT = "ui-monospace,SFMono-Regular,Menlo,Consolas,DejaVu Sans Mono,monospace"
_FONT_SIZE = 13
_COLUMN = 7.8  # what a column of text takes: 0.6 em
_LABEL_COLUMNS = 16
_HEIGHT = 24  # of a box
_PAD = 8  # left and right of a label
_MARGIN = 4
_WIDEST = 760  # what fits a notebook's cell and a page of GitHub
_TALLEST = 900  # a taller picture is shown smaller
_SMALLEST = 0.7


class Style(NamedTuple):
  """How a kind of node looks."""

  fill: str
  text: str
  stroke: str
  line: float
  """Width of its outline."""
  edge: float
  """Width of the line from its parent."""
  dashes: str
  name: str
  """What the legend calls it."""


STYLES = {
  "root": Style("#3d4a5c", "#ffffff", "#2f81c4", 2.5, 0, "", "pending token"),
  "accepted": Style("#0a66b0", "#ffffff", "#2f81c4", 2.5, 4, "", "accepted"),
  "bonus": Style(
    "#fff3d6", "#6b4300", "#c97a00", 2.5, 2.5, "6 4", "bonus token"
  ),
  "refused": Style("#6b7480", "#ffffff", "#868e99", 1, 1.25, "", "refused"),
  "candidate": Style("#6b7480", "#ffffff", "#868e99", 1, 1.25, "", ""),
}
_NOTE = Style("#e8ecf1", "#24292f", "#868e99", 1, 0, "", "")


class Box(NamedTuple):
  """A rectangle: left, top, width, height."""

  x: float
  y: float
  width: float
  height: float


def _number(value: float) -> str:
  return f"{value:.1f}".removesuffix(".0")


def _text_width(text: str) -> float:
  return _labels.width(text) * _COLUMN


def _layers(nodes: Sequence[_tree.Node]) -> list[int]:
  depth: list[int] = []
  for node in nodes:
    depth.append(0 if node.parent < 0 else depth[node.parent] + 1)
  return depth


def _left_to_right(
  nodes: Sequence[_tree.Node], widths: Sequence[float]
) -> list[Box]:
  """A layer is a column; its boxes are equally wide, so lines pass none."""
  parents = [node.parent for node in nodes]
  depth = _layers(nodes)
  columns = [0.0] * (max(depth) + 1)
  for layer, width in zip(depth, widths, strict=True):
    columns[layer] = max(columns[layer], width)
  left = [0.0]
  for width in columns:
    left.append(left[-1] + width + 40)
  middles = _layout.centres(parents, [_HEIGHT] * len(nodes), 6)
  return [
    Box(left[layer], middle - _HEIGHT / 2, columns[layer], _HEIGHT)
    for layer, middle in zip(depth, middles, strict=True)
  ]


def _top_down(
  nodes: Sequence[_tree.Node], widths: Sequence[float]
) -> list[Box]:
  parents = [node.parent for node in nodes]
  middles = _layout.centres(parents, widths, 10)
  return [
    Box(middle - width / 2, layer * (_HEIGHT + 32), width, _HEIGHT)
    for layer, middle, width in zip(
      _layers(nodes), middles, widths, strict=True
    )
  ]


def _right(boxes: Iterable[Box]) -> float:
  return max(box.x + box.width for box in boxes)


def _bottom(boxes: Iterable[Box]) -> float:
  return max(box.y + box.height for box in boxes)


def _rectangle(box: Box, style: Style, text: str, title: str) -> str:
  bold = ' font-weight="700"' if style.edge >= 2 else ""
  dashes = f' stroke-dasharray="{style.dashes}"' if style.dashes else ""
  about = (
    f"<title>{html.escape(_labels.harmless(title))}</title>" if title else ""
  )
  # textLength: a font that is wider than expected stays in its box.
  return (
    f'<g>{about}<rect x="{_number(box.x)}" y="{_number(box.y)}"'
    f' width="{_number(box.width)}" height="{_number(box.height)}" rx="5"'
    f' fill="{style.fill}" stroke="{style.stroke}"'
    f' stroke-width="{_number(style.line)}"{dashes}/>'
    f'<text x="{_number(box.x + box.width / 2)}"'
    f' y="{_number(box.y + box.height / 2 + 4.5)}" text-anchor="middle"'
    f' fill="{style.text}"{bold} textLength="{_number(_text_width(text))}"'
    f' lengthAdjust="spacingAndGlyphs">{html.escape(text)}</text></g>'
  )


def _edge(start: Box, end: Box, style: Style, sideways: bool) -> str:
  if sideways:
    x1, y1 = start.x + start.width, start.y + start.height / 2
    x2, y2 = end.x, end.y + end.height / 2
    bend = [((x1 + x2) / 2, y1), ((x1 + x2) / 2, y2)]
  else:
    x1, y1 = start.x + start.width / 2, start.y + start.height
    x2, y2 = end.x + end.width / 2, end.y
    bend = [(x1, (y1 + y2) / 2), (x2, (y1 + y2) / 2)]
  points = " ".join(f"{_number(x)},{_number(y)}" for x, y in [*bend, (x2, y2)])
  dashes = f' stroke-dasharray="{style.dashes}"' if style.dashes else ""
  return (
    f'<path d="M{_number(x1)},{_number(y1)} C{points}"'
    f' stroke="{style.stroke}" stroke-width="{_number(style.edge)}"{dashes}/>'
  )


def _legend(
  entries: Sequence[tuple[str, Style]], top: float, widest: float
) -> list[tuple[Box, Style, str]]:
  """Boxes in lines, as many on a line as fit."""
  placed = []
  x, y = 0.0, top
  for text, style in entries:
    width = _text_width(text) + 2 * _PAD
    if x and x + width > widest:
      x, y = 0.0, y + _HEIGHT + 8
    placed.append((Box(x, y, width, _HEIGHT), style, text))
    x += width + 8
  return placed


def tree_svg(
  parents: Sequence[int],
  labels: Sequence[str | None],
  *,
  path: Sequence[int] = (),
  bonus: str | None = None,
  titles: Sequence[str] = (),
  notes: Sequence[str] = (),
) -> str:
  """Draws a token tree, from left to right if that fits a page.

  Accepted nodes are filled otherwise, bold, and joined by thick lines; the
  bonus token is dashed. The colours are made for white and for dark pages.

  Args:
    parents: the parent of each of T nodes, -1 for the root, which comes first.
    labels: T texts; None for a node without a token, which is not drawn.
    path: nodes that a walk passed, root first; empty for no walk.
    bonus: text of the token that was drawn at the walk's end, or None.
    titles: T texts that a node shows under the pointer, and one more for the
      bonus token; empty for none.
    notes: texts to put below.

  Returns:
    An SVG document; the same for the same arguments.

  Raises:
    ValueError: for lengths that differ, or a path that is no walk.

  Example:
    >>> svg = tree_svg([-1, 0, 0], ["is", "Paris", "a"], path=[0, 1], bonus=",")
    >>> svg.startswith("<svg "), svg.count("<rect"), svg.count("<path")
    (True, 8, 3)
  """
  nodes, left_out = _tree.nodes(parents, labels, path, bonus, titles)
  texts = [_labels.label(node.text, _LABEL_COLUMNS) for node in nodes]
  widths = [max(_text_width(text), _COLUMN) + 2 * _PAD for text in texts]
  boxes, sideways = _left_to_right(nodes, widths), True
  if _right(boxes) > _WIDEST:
    upright = _top_down(nodes, widths)
    if _right(upright) < _right(boxes):
      boxes, sideways = upright, False
  legend = []
  if path:
    kinds = {node.kind for node in nodes}
    legend = [
      (style.name, style) for kind, style in STYLES.items() if kind in kinds
    ]
  legend += [
    (_labels.cut(_labels.harmless(note), 80), _NOTE)
    for note in _tree.with_left_out(notes, left_out)
  ]
  extra = _legend(legend, _bottom(boxes) + 16, max(_right(boxes), _WIDEST))
  every = [*boxes, *(box for box, _, _ in extra)]
  width = _right(every) + 2 * _MARGIN
  height = _bottom(every) + 2 * _MARGIN
  scale = min(1.0, max(_SMALLEST, _TALLEST / height))
  # Thin lines first: an accepted one is never under another.
  edges = sorted(
    (STYLES[node.kind].edge, index)
    for index, node in enumerate(nodes)
    if node.parent >= 0
  )
  lines = [
    _edge(
      boxes[nodes[index].parent],
      boxes[index],
      STYLES[nodes[index].kind],
      sideways,
    )
    for _, index in edges
  ]
  return "\n".join(
    [
      '<svg xmlns="http://www.w3.org/2000/svg"'
      f' width="{_number(width * scale)}" height="{_number(height * scale)}"'
      f' viewBox="{-_MARGIN} {-_MARGIN} {_number(width)} {_number(height)}"'
      ' role="img"'
      f' aria-label="token tree of {len(nodes)} nodes">',
      '<g fill="none">',
      *lines,
      "</g>",
      f'<g font-family="{_FONT}" font-size="{_FONT_SIZE}">',
      *(
        _rectangle(box, STYLES[node.kind], text, node.title)
        for box, node, text in zip(boxes, nodes, texts, strict=True)
      ),
      *(_rectangle(box, style, text, "") for box, style, text in extra),
      "</g>",
      "</svg>",
    ]
  )
