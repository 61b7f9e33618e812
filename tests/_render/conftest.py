"""Drawings read back: boxes, lines and texts of an SVG."""

import re
import xml.etree.ElementTree
from typing import NamedTuple

import pytest

_SVG = "{http://www.w3.org/2000/svg}"


class Box(NamedTuple):
  x: float
  y: float
  width: float
  height: float
  attributes: dict[str, str]
  text: str
  text_attributes: dict[str, str]
  title: str


class Line(NamedTuple):
  points: list[tuple[float, float]]
  """Start, two points of control, end."""
  attributes: dict[str, str]


class Drawing(NamedTuple):
  boxes: list[Box]
  """Nodes in their order, then the legend."""
  lines: list[Line]
  attributes: dict[str, str]


def _read(svg: str) -> Drawing:
  root = xml.etree.ElementTree.fromstring(svg)
  assert root.tag == f"{_SVG}svg"
  boxes = []
  for group in root.iter(f"{_SVG}g"):
    rect = group.find(f"{_SVG}rect")
    if rect is None:
      continue
    text, title = group.find(f"{_SVG}text"), group.find(f"{_SVG}title")
    boxes.append(
      Box(
        *(float(rect.get(name)) for name in ("x", "y", "width", "height")),
        rect.attrib,
        text.text,
        text.attrib,
        "" if title is None else title.text,
      )
    )
  lines = [
    Line(
      [
        (float(x), float(y))
        for x, y in re.findall(r"(-?[\d.]+),(-?[\d.]+)", path.get("d"))
      ],
      path.attrib,
    )
    for path in root.iter(f"{_SVG}path")
  ]
  return Drawing(boxes, lines, root.attrib)


def _luminance(colour: tuple[float, float, float]) -> float:
  linear = [
    c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
    for c in (value / 255 for value in colour)
  ]
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one, other) -> float:
  """WCAG 2.2's ratio of two colours, `#rrggbb` or (r, g, b)."""
  values = []
  for colour in (one, other):
    if isinstance(colour, str):
      colour = tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))
    values.append(_luminance(colour))
  return (max(values) + 0.05) / (min(values) + 0.05)


@pytest.fixture(scope="session")
def read_svg():
  return _read


@pytest.fixture(scope="session")
def contrast():
  return _contrast
