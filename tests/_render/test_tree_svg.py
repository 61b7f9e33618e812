"""Drawings of trees: nothing over anything, and readable on any page."""

import importlib.resources
import itertools
import json

import hypothesis
import hypothesis.strategies as st
import pytest

from ldjax import _render, decoding
from ldjax._render import _tree_svg

_PUBLISHED = json.loads(
  importlib.resources.files("ldjax.decoding")
  .joinpath("medusa_choices.json")
  .read_text("utf-8")
)
_PAGES = ("#ffffff", "#1e1e1e", "#0d1117", "#111111")


def _apart(one, other):
  return (
    one.x + one.width <= other.x
    or other.x + other.width <= one.x
    or one.y + one.height <= other.y
    or other.y + other.height <= one.y
  )


def _on_curve(points, t):
  weights = ((1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t**3)
  return tuple(
    sum(w * p[axis] for w, p in zip(weights, points, strict=True))
    for axis in (0, 1)
  )


def _check_geometry(drawing, count):
  """No box over another, no line through a box, no two lines crossing."""
  for one, other in itertools.combinations(drawing.boxes, 2):
    assert _apart(one, other), (one, other)
  left, top, width, height = map(float, drawing.attributes["viewBox"].split())
  for box in drawing.boxes:
    assert left <= box.x and box.x + box.width <= left + width
    assert top <= box.y and box.y + box.height <= top + height
  nodes = drawing.boxes[:count]
  for box in nodes:
    assert float(box.text_attributes["textLength"]) <= box.width - 8
  assert len(drawing.lines) == count - 1
  # Lines lie between two layers, where no box is ...
  sideways = all(
    any(abs(line.points[0][0] - (b.x + b.width)) < 0.2 for b in nodes)
    and line.points[0][1] == line.points[1][1]
    for line in drawing.lines
  )
  along, across = (0, 1) if sideways else (1, 0)
  for line in drawing.lines:
    begin, end = line.points[0][along], line.points[-1][along]
    assert begin < end
    for box in nodes:
      low = box[along]
      high = low + box[along + 2]
      assert high <= begin + 0.2 or low >= end - 0.2
  # ... and two of them do not change sides on the way.
  for one, other in itertools.combinations(drawing.lines, 2):
    if abs(one.points[0][along] - other.points[0][along]) > 0.2:
      continue
    differences = [
      _on_curve(one.points, t)[across] - _on_curve(other.points, t)[across]
      for t in (0, 0.25, 0.5, 0.75, 1)
    ]
    assert min(differences) >= -0.2 or max(differences) <= 0.2


def test_there_are_nine_published_trees():
  assert len(_PUBLISHED) == 9


@pytest.mark.parametrize("name", sorted(_PUBLISHED))
def test_published_trees(name, read_svg):
  tree = decoding.TokenTree.medusa(name)
  drawing = read_svg(tree._repr_svg_())
  _check_geometry(drawing, tree.size)
  assert [box.text for box in drawing.boxes] == [
    "root",
    *(str(path[-1]) for path in tree.paths),
  ]
  assert drawing.boxes[-1].title == (
    f"node {tree.size - 1}, path {tree.paths[-1]}"
  )
  assert float(drawing.attributes["width"]) <= 760
  assert float(drawing.attributes["height"]) <= 1000


@st.composite
def _rounds(draw):
  size = draw(st.integers(1, 40))
  parents = [-1, *(draw(st.integers(-1, i)) for i in range(size - 1))]
  texts = st.text(st.characters(), max_size=20)
  labels = [draw(texts), *(draw(texts | st.none()) for _ in range(size - 1))]
  path, node = [], 0
  for _ in range(draw(st.integers(0, 8))):
    path.append(node)
    below = [
      i for i in range(1, size) if parents[i] == node and labels[i] is not None
    ]
    if not below:
      break
    node = draw(st.sampled_from(below))
  return parents, labels, path


def _drawn(parents, labels):
  seen = {0}
  for i in range(1, len(parents)):
    if labels[i] is not None and parents[i] in seen:
      seen.add(i)
  return len(seen)


@hypothesis.given(_rounds(), st.text(st.characters(), max_size=30))
def test_random_rounds(read_svg, round, note):
  parents, labels, path = round
  bonus = note[:5] if path else None
  svg = _render.tree_svg(
    parents,
    labels,
    path=path,
    bonus=bonus,
    titles=[str(label) for label in labels],
    notes=[note],
  )
  drawing = read_svg(svg)
  _check_geometry(drawing, _drawn(parents, labels) + bool(path))
  thick = [
    line for line in drawing.lines if line.attributes["stroke-width"] == "4"
  ]
  assert len(thick) == max(len(path) - 1, 0)
  dashed = [line for line in drawing.lines if "stroke-dasharray" in line[1]]
  assert len(dashed) == bool(path)
  again = _render.tree_svg(
    parents,
    labels,
    path=path,
    bonus=bonus,
    titles=[str(label) for label in labels],
    notes=[note],
  )
  assert svg == again
  _render.tree_text(parents, labels, path=path, bonus=bonus, notes=[note])


def test_deep_and_wide_trees(read_svg):
  for tree in (
    decoding.TokenTree.root_only(),
    decoding.TokenTree.chain(90),
    decoding.TokenTree.product([64]),
    decoding.TokenTree.product([2] * 5),
    decoding.TokenTree.from_paths(
      [(0,) * n for n in range(1, 40)] + [(k,) for k in range(1, 30)]
    ),
  ):
    _check_geometry(read_svg(tree._repr_svg_()), tree.size)
  chain = read_svg(decoding.TokenTree.chain(90)._repr_svg_())
  assert float(chain.attributes["width"]) < 100


def test_hand_worked_layout(read_svg):
  # Boxes of 24 with 6 between: a leaf's row is 30 high.
  drawing = read_svg(_render.tree_svg([-1, 0, 0, 1, 1], list("abcde")))
  middles = {box.text: box.y + box.height / 2 for box in drawing.boxes}
  assert middles["e"] - middles["d"] == 30
  assert middles["b"] == (middles["d"] + middles["e"]) / 2
  assert middles["c"] - middles["b"] == 30  # its row is free beside d and e
  assert middles["a"] == (middles["b"] + middles["c"]) / 2
  assert {box.x for box in drawing.boxes if box.text in "bc"} == {
    drawing.boxes[1].x
  }


def test_a_round_says_its_kinds_by_more_than_colour(read_svg):
  drawing = read_svg(
    _render.tree_svg(
      [-1, 0, 0, 1, 2],
      [" is", " Paris", " a", None, "city"],
      path=[0, 1],
      bonus=",",
      titles=["t0", "t1", "t2", "t3", "t4", "t5"],
      notes=["2 tokens in one pass"],
    )
  )
  nodes, legend = drawing.boxes[:5], drawing.boxes[5:]
  assert [box.text for box in nodes] == ["␣is", "␣Paris", "␣a", "city", ","]
  assert [box.title for box in nodes] == ["t0", "t1", "t2", "t4", "t5"]
  assert [box.text for box in legend] == [
    "pending token",
    "accepted",
    "bonus token",
    "refused",
    "2 tokens in one pass",
    "1 node without a token not shown",
  ]
  widths = [float(box.attributes["stroke-width"]) for box in nodes]
  assert min(widths[0], widths[1], widths[4]) > max(widths[2], widths[3])
  assert [("stroke-dasharray" in box.attributes) for box in nodes] == [
    *[False] * 4,
    True,
  ]
  assert ["font-weight" in box.text_attributes for box in nodes] == [
    False,
    True,
    False,
    False,
    True,
  ]


def test_it_is_escaped_and_self_contained(read_svg):
  nasty = "<script>alert(1)</script>&\"'\x00\x1b]]>\u202e\ud800\ufffe\ufffd🙂"
  svg = _render.tree_svg([-1, 0], [nasty, nasty], titles=[nasty] * 2)
  # Titles are the caller's words; tokens go through ids there.
  assert "<script" not in svg
  read_svg(svg)
  svg.encode("utf-8")
  for word in ("<style", "style=", "currentColor", "href", " id="):
    assert word not in svg


@pytest.mark.parametrize("kind", sorted(_tree_svg.STYLES))
def test_contrast(kind, contrast):
  style = _tree_svg.STYLES[kind]
  assert contrast(style.text, style.fill) >= 4.5  # WCAG AA for text
  for page in _PAGES:
    assert contrast(style.stroke, page) >= 3  # and for graphics


def test_notes_can_be_read(contrast):
  assert contrast(_tree_svg._NOTE.text, _tree_svg._NOTE.fill) >= 4.5


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (([], []), "0 parents and 0 labels"),
    (([-1, 0], ["a"]), "2 parents and 1 labels"),
    (([0], ["a"]), "node 0 has parent 0"),
    (([-1], [None]), "the root comes first"),
    (([-1, 1], ["a", "b"]), "node 1 has parent 1"),
    (([-1, -2], ["a", "b"]), "node 1 has parent -2"),
    (([-1, 0], ["a", "b"], [1]), "from node -1 to node 1"),
    (([-1, 0, 0], ["a", "b", "c"], [0, 1, 2]), "from node 1 to node 2"),
    (([-1, 0], ["a", None], [0, 1]), "whose label is None"),
    (([-1, 0], ["a", "b"], [0, 2]), "the path holds node 2"),
    (([-1, 0], ["a", "b"], [0, -1]), "the path holds node -1"),
    (([-1, -1], ["a", "b"], [1]), "from node -1 to node 1"),
    (([-1], ["a"], [], "b"), "the bonus token 'b' has no path"),
  ],
)
@pytest.mark.parametrize("draw", [_render.tree_svg, _render.tree_text])
def test_what_is_no_tree_is_refused(draw, arguments, message):
  parents, labels, path, bonus = (
    (*arguments, (), None)[:4]
    if len(arguments) == 2
    else (*arguments, None)[:4]
  )
  with pytest.raises(ValueError, match=message):
    draw(parents, labels, path=path, bonus=bonus)
