"""From a draft's name to the trees that it proposes, and its weights."""

import importlib.resources
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ldjax import checkpoints, decoding, models

Progress: TypeAlias = Callable[[str], None]
Tree: TypeAlias = (
  decoding.TokenTree | str | Sequence[int] | Sequence[Sequence[int]]
)
Draft: TypeAlias = str | os.PathLike[str] | decoding.DraftFn | None

_SIZES = (2, 4, 8, 16)
"""Trees of a ladder, besides the root alone; compiled when first used."""
_NGRAM = (0.2, 0.7)
"""How often an n-gram's first token is right, and each one after a right one:
a chain of three then brings the 1.44 tokens a round of the README."""
_NGRAM_SIZE = 4
_MAIN_SIZE = 8
# A model's name (`LanguageModel.name`, or "demo" as `load` is given it) and the
# folder of the draft that comes with ldjax for it.
_SHIPPED = {
  "demo": "smollm2-135m-instruct",
  "Smollm2 135M 8k Lc100K Mix1 Ep2": "smollm2-135m-instruct",
}


class Proposal(NamedTuple):
  """One tree that a draft can propose."""

  draft: decoding.DraftFn
  """Proposes it."""
  expected: float | None
  """Tokens a round by calibration, the bonus token included; None where
  nobody knows."""


class Drafts(NamedTuple):
  """All trees of one draft, over one state, and its weights."""

  name: str
  """`"ngram"`, `"none"`, `"custom"` or a folder."""
  ladder: tuple[Proposal, ...]
  """By size, ascending: one tree, or several of which the first is the root
  alone."""
  main: int
  """Which one of them stands for the draft."""
  root: decoding.DraftFn
  """The root alone, on the same state."""
  params: Any = ()
  """Weights, without what is borrowed from the target."""
  config: Any = None
  """Of heads, which may borrow from the target; None for other drafts."""


def parse_tree(tree: Tree) -> decoding.TokenTree:
  """Reads a tree from the notations that people use.

  Args:
    tree: a `TokenTree`; `"root"`; `"chain:3"`; the name of a published Medusa
      tree; Medusa's older ranks a depth, `"1,7,6"` or `[1, 7, 6]`; or a list
      of paths.

  Raises:
    ValueError: for anything else, with what would do.

  Example:
    >>> parse_tree("chain:3").size, parse_tree("1,2,2").size
    (4, 7)
  """
  if isinstance(tree, decoding.TokenTree):
    return tree
  if not isinstance(tree, str):
    return decoding.TokenTree.medusa(tree)
  if tree == "root":
    return decoding.TokenTree.root_only()
  kind, _, argument = tree.partition(":")
  if kind == "chain" and argument.isdecimal():
    return decoding.TokenTree.chain(int(argument))
  ranks = [part.strip() for part in tree.split(",")]
  if all(rank.isdecimal() for rank in ranks):
    return decoding.TokenTree.medusa([int(rank) for rank in ranks])
  try:
    return decoding.TokenTree.medusa(tree)
  except ValueError as error:
    raise ValueError(
      f"tree {tree!r} is not understood: give 'root', 'chain:N', ranks a depth"
      f" such as '1,7,6', or a published name ({error})"
    ) from None


def _fixed(name: str, draft: decoding.DraftFn, **weights: Any) -> Drafts:
  root = decoding.root_only(draft)
  return Drafts(name, (Proposal(draft, None),), 0, root, **weights)


def _adaptive(
  name: str,
  root: decoding.DraftFn,
  trees: Sequence[Proposal],
  size: int,
  **weights: Any,
) -> Drafts:
  """A ladder; the largest tree of at most `size` nodes stands for it."""
  ladder = (Proposal(root, 1.0), *trees)
  main = max(i for i, each in enumerate(ladder) if each.draft.size <= size)
  return Drafts(name, ladder, main, root, **weights)


def _ngram(tree: Tree | None) -> Drafts:
  # Without a state of its own, so that plain decoding shares its programs.
  root = decoding.root_only()
  if tree is None:
    first, further = _NGRAM
    trees = [
      Proposal(
        decoding.ngram(size - 1),
        1 + first * sum(further**i for i in range(size - 1)),
      )
      for size in _SIZES
    ]
    return _adaptive("ngram", root, trees, _NGRAM_SIZE)
  topology = parse_tree(tree)
  if topology != decoding.TokenTree.chain(topology.depth):
    raise ValueError(
      f"the n-gram draft proposes a chain, not a tree of {topology.size} nodes"
      f" and depth {topology.depth}; give tree='chain:N'"
    )
  draft = decoding.ngram(topology.depth) if topology.depth else root
  return Drafts("ngram", (Proposal(draft, None),), 0, root)


def _own(draft: decoding.DraftFn) -> Drafts:
  if draft.size == 1:
    return _fixed("custom", draft)
  root = decoding.root_only(draft)
  trees = [Proposal(draft, None)]
  return _adaptive("custom", root, trees, draft.size)


def _trees(
  heads: Any, calibration: dict[str, Any], folder: pathlib.Path
) -> list[Proposal]:
  """The ladder of some heads, from what calibration found.

  Without one, chains; with `acceptance` [D, R] the static trees that bring
  most; with `width` trees by confidence, which bring what `expected` says by
  size. `ngram` then joins the n-gram's guess to them.
  """
  largest = max(_SIZES)
  if not calibration:
    sizes = {min(size, heads.depth + 1) for size in (*_SIZES, heads.depth + 1)}
    return [
      Proposal(
        decoding.static_tree(heads, decoding.TokenTree.chain(size - 1)), None
      )
      for size in sorted(sizes)
      if size <= max(largest, heads.depth + 1)
    ]
  try:
    if "width" in calibration:
      guess = calibration.get("ngram")
      ngram = None
      if guess is not None:
        ngram = decoding.NgramGuess(
          depth=int(guess["depth"]),
          max_match=int(guess["max_match"]),
          acceptance=tuple(float(x) for x in guess["acceptance"]),
        )
      says = calibration.get("expected", {})
      return [
        Proposal(
          decoding.dynamic_tree(
            heads, size, width=int(calibration["width"]), ngram=ngram
          ),
          float(says[str(size)]) if str(size) in says else None,
        )
        for size in _SIZES
      ]
    acceptance = np.asarray(calibration["acceptance"], np.float64)
    best = (decoding.best_tree(acceptance, size) for size in _SIZES)
    # Where nothing was ever accepted the best tree is the root alone.
    trees = [tree for tree in dict.fromkeys(best) if tree.depth]
    return [
      Proposal(
        decoding.static_tree(heads, tree),
        float(decoding.expected_length(tree, acceptance)),
      )
      for tree in trees or [decoding.TokenTree.chain(1)]
    ]
  except (KeyError, TypeError, ValueError) as error:
    raise ValueError(
      f"{folder}: its calibration makes no trees ({type(error).__name__}:"
      f" {error}); train or calibrate the draft again, or give a tree"
    ) from error


def _heads(
  folder: pathlib.Path,
  tree: Tree | None,
  config: models.TransformerConfig,
  dtype: Any,
  max_len: int,
  progress: Progress | None,
  place: Any,
  of_model: str | None = None,
) -> Drafts:
  if not folder.exists():
    raise FileNotFoundError(
      f"draft {str(folder)!r} is neither 'none' nor 'ngram' nor an existing"
      " folder with draft heads"
    )
  topology = None if tree is None else parse_tree(tree)
  file = checkpoints.read_draft(
    folder,
    target_config=config,
    dtype=dtype,
    progress=progress,
    place=place,
  )
  heads, _ = models.functionalize_draft(file.config, dtype, max_len=max_len)
  weights = {"params": file.params, "config": file.config}
  name = str(folder)
  if topology is not None:
    return _fixed(name, decoding.static_tree(heads, topology), **weights)
  if of_model is not None:
    published = medusa_tree(of_model, heads.depth)
    trees = [Proposal(decoding.static_tree(heads, published), None)]
  else:
    trees = _trees(heads, file.calibration or {}, folder)
  size = _MAIN_SIZE if file.calibration else trees[-1].draft.size
  root = decoding.root_only(trees[-1].draft)
  return _adaptive(name, root, trees, size, **weights)


def _shipped(model_name: str) -> pathlib.Path | None:
  """The folder of the draft that comes with ldjax for a model, if any."""
  if model_name not in _SHIPPED:
    return None
  found = importlib.resources.files("ldjax").joinpath(
    "data", "drafts", _SHIPPED[model_name]
  )
  # A folder on disk, as installed; a zipped package has none.
  folder = pathlib.Path(str(found))
  return folder if folder.is_dir() else None


def medusa_tree(model_name: str, depth: int) -> decoding.TokenTree:
  """The tree that Medusa's reference code picks for a model, by its name.

  Args:
    model_name: of the target.
    depth: tokens that the heads guess ahead; deeper nodes are left out.

  Source: FasterDecoding/Medusa, its `get_medusa_choice`.
  """
  name, tree = model_name.lower(), "mc_sim_7b_63"
  if "zephyr" in name:
    tree = "zephyr_stage2"
  if "vicuna" in name:
    for size in ("7b", "13b", "33b"):
      if size in name:
        tree = f"vicuna_{size}_stage2"
  return decoding.TokenTree.medusa(tree).cut(depth)


def medusa_heads_of(model_name: str) -> pathlib.Path:
  """The folder of the Medusa heads that come with ldjax for a model.

  Args:
    model_name: `LanguageModel.name`.

  Raises:
    ValueError: for a model for which there are none.
  """
  folder = _shipped(model_name)
  heads = None if folder is None else folder.with_name(f"{folder.name}-medusa")
  if heads is None or not heads.is_dir():
    raise ValueError(
      f"no Medusa heads come with ldjax for {model_name!r}; name the folder of"
      " some (draft=FOLDER of load, medusa2:FOLDER of bench)"
    )
  return heads


def read(
  draft: Draft,
  tree: Tree | None,
  *,
  model_name: str,
  config: models.TransformerConfig,
  dtype: Any,
  max_len: int,
  file: pathlib.Path | None = None,
  progress: Progress | None = None,
  place: Any = None,
) -> Drafts:
  """Reads a draft, and lays out the trees that it can propose.

  Args:
    draft: `"auto"`, `"ngram"`, `"none"` or None, a folder, or a `DraftFn`.
    tree: one tree, see `parse_tree`; `"auto"` or None for a ladder of sizes
      where the draft has one.
    model_name: of the target, for `"auto"`.
    config: of the target.
    dtype: of the weights.
    max_len: the most tokens of a sequence.
    file: of the target, for `"auto"`: a Medusa-2 model brings its own heads.
    progress: called with a line of text as reading goes on.
    place: (path, host array) -> array, puts each parameter where it belongs.

  Returns:
    `Drafts`.

  Raises:
    FileNotFoundError: for a folder that is not there.
    ValueError: for a draft or a tree that does not fit.
  """
  if isinstance(tree, str) and tree == "auto":
    tree = None
  of_model = None
  if isinstance(draft, decoding.DraftFn):
    if tree is not None:
      raise ValueError("a DraftFn has a tree of its own; leave out tree")
    return _own(draft)
  if draft == "auto":
    draft = _shipped(model_name) or "ngram"
    if file is not None and checkpoints.has_medusa_heads(file):
      draft, of_model = file, model_name
  if draft == "ngram":
    return _ngram(tree)
  if draft in (None, "none"):
    if tree is not None and parse_tree(tree).depth:
      raise ValueError(f"draft 'none' takes no tree, but tree is {tree!r}")
    return _fixed("none", decoding.root_only())
  folder = pathlib.Path(str(draft))
  return _heads(folder, tree, config, dtype, max_len, progress, place, of_model)


def borrow(drafts: Drafts, target_params: Any) -> Any:
  """Weights of a draft, with what it borrows from the target among them.

  Args:
    drafts: from `read`.
    target_params: weights of the target; the same buffers where possible.
  """
  if drafts.config is None:
    return drafts.params
  return models.borrow(drafts.config, drafts.params, target_params)
