"""HTML and text of a generation."""

import html.parser
import itertools

import hypothesis
import hypothesis.strategies as st
import pytest

from ldjax import _render
from ldjax._render import _generation

_LIGHT = ((255, 255, 255), (33, 33, 33))  # JupyterLab: page, text
_DARK = ((17, 17, 17), (255, 255, 255))
_CODE = ((31, 31, 31), (204, 204, 204))  # VS Code, dark


class _Reader(html.parser.HTMLParser):
  """Text outside of marks, titles, colours, and whether tags match."""

  def __init__(self):
    super().__init__()
    self.open, self.tags, self.titles, self.colours = [], set(), [], []
    self.text, self.marks = "", ""

  def handle_starttag(self, tag, attrs):
    attrs = dict(attrs)
    self.tags.add(tag)
    assert set(attrs) <= {"style", "title", "dir"}
    style = attrs.get("style", "")
    self.open.append((tag, "user-select:none" in style))
    if "title" in attrs:
      self.titles.append(attrs["title"])
    if "background-color" in style:
      self.colours.append(style)

  def handle_endtag(self, tag):
    assert self.open.pop()[0] == tag

  def handle_data(self, data):
    if any(mark for _, mark in self.open):
      self.marks += data
    else:
      self.text += data


def _read(page):
  reader = _Reader()
  reader.feed(page)
  reader.close()
  assert not reader.open
  assert reader.tags <= {"div", "span"}
  return reader


def test_by_hand():
  reader = _read(
    _render.generation_html(
      [" Paris", "", ",\n", "it"],
      [1, 0, 2, 1],
      tokens=[5, 6, 7, 8],
      logprobs=[-0.5, float("nan"), float("-inf"), 0.0],
      caption="4 tokens & more",
    )
  )
  assert reader.text == " Paris,\nit4 tokens & more"
  assert reader.marks == "◦↵"
  assert reader.titles == [
    "token 5, round 1, logprob -0.500",
    "token 6, round 3",
    "token 7, round 3, logprob -inf",
    "token 8, round 4, logprob 0.000",
  ]
  assert len(reader.colours) == 3


@pytest.mark.parametrize(
  ("piece", "shown"),
  [
    ("<script>alert('1')</script>", "<script>alert('1')</script>"),
    ('" onmouseover="x', '" onmouseover="x'),
    ("&lt;&amp", "&lt;&amp"),
    ("مرحبا", "مرحبا"),
    ("\u202egnp.exe", "⟨U+202E⟩gnp.exe"),
    ("\x00\x1b[2J\r", "⟨U+0000⟩⟨U+001B⟩[2J⟨U+000D⟩"),
    ("\ufffd🙂👩\u200d👧", "\ufffd🙂👩\u200d👧"),
    ("\ud83d", "⟨U+D83D⟩"),
    ("a\t  b", "a\t  b"),
  ],
)
def test_pieces_are_escaped(piece, shown):
  page = _render.generation_html([piece], [1], tokens=[3], caption=piece)
  reader = _read(page)
  assert reader.text == shown + shown
  page.encode("utf-8")
  assert _render.generation_text([piece], [1]) == shown


@hypothesis.given(
  st.lists(st.lists(st.text(st.characters(), max_size=5), max_size=4))
)
def test_any_text(rounds):
  pieces = [piece for each in rounds for piece in each]
  counts = [len(each) for each in rounds]
  page = _render.generation_html(pieces, counts, tokens=range(len(pieces)))
  reader = _read(page)
  assert len(reader.titles) == len(pieces)
  text = _render.generation_text(pieces, counts)
  assert text.replace("│", "") == reader.text.replace("│", "")


def test_text_form():
  pieces = [" Paris", ",", " which", "", "\n"]
  assert _render.generation_text(pieces, [1, 2, 0, 1, 1]) == (
    " Paris│, which││\n"
  )
  assert _render.generation_text([], []) == ""
  assert _read(_render.generation_html([], [], tokens=[])).text == ""


@pytest.mark.parametrize(
  ("counts", "more", "message"),
  [
    ([1], {"tokens": [1, 2]}, "add up to 1, but there are 2 pieces"),
    ([3, -1], {"tokens": [1, 2]}, "add up to 2"),
    ([2], {"tokens": [1]}, "2 pieces and 1 tokens"),
    ([2], {"tokens": [1, 2], "logprobs": [0.0]}, "2 pieces and 1 logprobs"),
  ],
)
def test_numbers_that_differ_are_refused(counts, more, message):
  with pytest.raises(ValueError, match=message):
    _render.generation_html(["a", "b"], counts, **more)


def _over(page, colour):
  alpha = _generation.ALPHA
  return tuple(
    alpha * c + (1 - alpha) * p for c, p in zip(colour, page, strict=True)
  )


@pytest.mark.parametrize("page", [_LIGHT, _DARK, _CODE])
def test_text_reads_on_every_colour(page, contrast):
  ground, text = page
  for colour in _generation.PALETTE:
    assert contrast(_over(ground, colour), text) >= 4.5


# Machado, Oliveira and Fernandes 2009, severity 1: protanopia, deuteranopia,
# tritanopia.
_SEEN_AS = (
  ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
  (
    (0.152286, 1.052583, -0.204868),
    (0.114503, 0.786281, 0.099216),
    (-0.003882, -0.048116, 1.051998),
  ),
  (
    (0.367322, 0.860646, -0.227968),
    (0.280085, 0.672501, 0.047413),
    (-0.011820, 0.042940, 0.968881),
  ),
  (
    (1.255528, -0.076749, -0.178779),
    (-0.078411, 0.930809, 0.147602),
    (0.004733, 0.691367, 0.303900),
  ),
)


@pytest.mark.parametrize("eye", range(4))
@pytest.mark.parametrize("page", [_LIGHT, _DARK])
def test_neighbours_differ_to_anyone(eye, page):
  def lab(colour):
    """CIE 1976 L*a*b* of what that eye sees, from sRGB under D65."""
    linear = [
      c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
      for c in (v / 255 for v in colour)
    ]
    linear = [
      min(max(sum(m * c for m, c in zip(row, linear, strict=True)), 0), 1)
      for row in _SEEN_AS[eye]
    ]
    r, g, b = linear
    xyz = (
      (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505,
      0.2126 * r + 0.7152 * g + 0.0722 * b,
      (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089,
    )
    f = [v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in xyz]
    return 116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])

  colours = [lab(_over(page[0], colour)) for colour in _generation.PALETTE]
  for one, other in itertools.pairwise([*colours, colours[0]]):
    distance = sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5
    assert distance >= 25  # a just noticeable difference is about 2.3
