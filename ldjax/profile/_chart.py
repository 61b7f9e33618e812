"""Plots as inline SVG, readable on light and dark."""

import html
from collections.abc import Sequence
from typing import NamedTuple

_WIDTH, _ROW = 640, 26
_LEFT, _RIGHT = 150, 90
_HEIGHT, _BOTTOM = 220, 34

# Distinct in brightness too, and against either background.
COLOURS = ("#2f81c4", "#c97a00", "#3d9a5f", "#a85fb5", "#868e99", "#c4493d")


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
  return (
    f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    f' class="t">{html.escape(text)}</text>'
  )


def _svg(height: float, title: str, body: str) -> str:
  return (
    f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img"'
    f' aria-label="{html.escape(title)}">{body}</svg>'
  )


def bars(title: str, rows: Sequence[tuple[str, float, str]]) -> str:
  """A bar a row, from 0 to the largest.

  Args:
    title: for readers that see no picture.
    rows: label, length (0 or more) and what is written at the end.
  """
  most = max((value for _, value, _ in rows), default=0.0) or 1.0
  room = _WIDTH - _LEFT - _RIGHT
  body = []
  for number, (label, value, note) in enumerate(rows):
    y = number * _ROW
    width = room * value / most
    body += [
      _text(_LEFT - 8, y + 17, label, "end"),
      f'<rect x="{_LEFT}" y="{y + 4}" width="{width:.1f}" height="18" rx="2"'
      f' fill="{COLOURS[0]}"/>',
      _text(_LEFT + width + 6, y + 17, note),
    ]
  return _svg(_ROW * len(rows) + 4, title, "".join(body))


class Line(NamedTuple):
  """One line of a plot."""

  name: str
  points: Sequence[tuple[float, float]]


def lines(title: str, x_name: str, each: Sequence[Line]) -> str:
  """Lines over x on a scale of powers of two, y from 0.

  Args:
    title: for readers that see no picture.
    x_name: of the axis below.
    each: at least one, x above 0.
  """
  xs = sorted({x for line in each for x, _ in line.points})
  most = max((y for line in each for _, y in line.points), default=0.0) or 1.0
  right, top = _WIDTH - 160, 12
  ground = _HEIGHT - _BOTTOM

  def across(x: float) -> float:
    # By rank: sizes of trees double, or nearly.
    share = xs.index(x) / max(len(xs) - 1, 1)
    return 60 + share * (right - 60)

  def up(y: float) -> float:
    return ground - (ground - top) * y / most

  body = []
  for part in (0.0, 0.5, 1.0):
    y = up(part * most)
    body += [
      f'<line x1="60" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" class="g"/>',
      _text(54, y + 4, f"{part * most:.3g}", "end"),
    ]
  body += [_text(across(x), ground + 16, f"{x:g}", "middle") for x in xs]
  body.append(_text((60 + right) / 2, ground + 30, x_name, "middle"))
  for number, line in enumerate(each):
    colour = COLOURS[number % len(COLOURS)]
    path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in line.points)
    body.append(
      f'<polyline points="{path}" fill="none" stroke="{colour}"'
      ' stroke-width="2.5"/>'
    )
    body += [
      f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="3.5" fill="{colour}"/>'
      for x, y in line.points
    ]
    key = top + 8 + 20 * number
    body += [
      f'<rect x="{right + 18}" y="{key - 9}" width="12" height="12"'
      f' fill="{colour}"/>',
      _text(right + 36, key + 2, line.name),
    ]
  return _svg(_HEIGHT, title, "".join(body))
