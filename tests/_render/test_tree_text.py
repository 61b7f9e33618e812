"""The text form of trees, worked by hand."""

from ldjax import _render, decoding


def test_bare_tree():
  tree = decoding.TokenTree.from_paths([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])
  assert tree.show() == "\n".join(
    [
      "root",
      "├── 0",
      "│ ├── 0",
      "│ │ └── 0",
      "│ └── 1",
      "└── 1",
    ]
  )
  assert decoding.TokenTree.root_only().show() == "root"
  assert decoding.TokenTree.chain(1500).show().count("\n") == 1500


def test_repr_stays_that_of_a_dataclass():
  tree = decoding.TokenTree.chain(1)
  assert repr(tree) == str(tree) == "TokenTree(paths=((0,),))"


def test_walk_that_ends_at_the_root():
  text = _render.tree_text([-1, 0], ["is", "a"], path=[0], bonus="\x1b[1m b")
  assert text == "● is\n├── a\n└╌◌ ⟨U+001B⟩[1m␣b"


def test_walk_that_ends_at_a_leaf():
  text = _render.tree_text(
    [-1, 0, 0, 1], ["is", "a", "b", "c"], path=[0, 1, 3], bonus="d"
  )
  assert text == "\n".join(["● is", "┝━● a", "│ ┕━● c", "│   └╌◌ d", "└── b"])


def test_nodes_without_a_token_and_below_are_not_shown():
  text = _render.tree_text(
    [-1, 0, 1, 0, -1], ["r", None, "under", "b", "loose"], notes=["so\x07"]
  )
  assert text == "\n".join(
    ["r", "└── b", "so⟨U+0007⟩", "3 nodes without a token not shown"]
  )


def test_long_labels_are_cut():
  (line,) = _render.tree_text([-1], ["x" * 99]).splitlines()
  assert line == "x" * 39 + "…"
