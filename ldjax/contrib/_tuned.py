"""Medusa-2 decoding with the tree that is fastest on this machine."""

import dataclasses
import json
import pathlib

import numpy as np

from ldjax import assemble, checkpoints, decoding, optimize
from ldjax.contrib import _medusa2

_SIZES = (2, 4, 8, 16, 32, 64)


def as_tuned_medusa2(
  model: assemble.LanguageModel,
  draft: str | pathlib.Path,
  *,
  progress: assemble.Progress | None = None,
) -> assemble.LanguageModel:
  """`as_medusa2` with the one tree that should be fastest on this machine.

  Of each size up to 64 nodes the tree that brings most tokens by the heads'
  measured acceptance, and of these the one with the most tokens a second by the
  time of this decoder's own rounds, batch 1. The time is measured once and kept
  (see `optimize.measure_costs`): a minute for the demo model on two cores.

  Args:
    model: from `load`, on one device.
    draft: a folder with Medusa heads whose acceptance was measured, as
      `ldjax train` does.
    progress: called with a line of text before each compilation.

  Returns:
    A `LanguageModel`; its `draft_name` says which tree it is.

  Raises:
    FileNotFoundError: for a folder that is not there.
    ValueError: as `as_medusa2`, and for heads without a measured acceptance.

  Example:
    print(ldjax.contrib.as_tuned_medusa2(model, "medusa_heads").draft_name)
  """
  default = _medusa2.as_medusa2(model, draft)
  calibration = checkpoints.read_draft(
    pathlib.Path(draft), target_config=model.config
  ).calibration
  if not calibration or "acceptance" not in calibration:
    raise ValueError(
      f"{draft}: nobody measured how often these heads are right, so no tree"
      " can be chosen for them; take heads of ldjax train medusa, or medusa2"
    )
  acceptance = np.asarray(calibration["acceptance"], np.float64)
  measured = _measurable(model, default, draft, acceptance)
  sizes = [rung.draft.size for rung in measured.ladder]
  curve = optimize.load_costs(measured) or optimize.measure_costs(
    measured, sizes, progress=progress
  )
  best = optimize.tree_ceiling(curve, acceptance)
  tree = decoding.best_tree(acceptance, best.size)
  paths = json.dumps(tree.paths, separators=(",", ":"))
  return dataclasses.replace(
    _medusa2.as_medusa2(model, draft, tree=tree),
    draft_name=f"{default.draft_name}, {tree.size} nodes: {paths}",
  )


def _measurable(
  model: assemble.LanguageModel,
  default: assemble.LanguageModel,
  draft: str | pathlib.Path,
  acceptance: np.ndarray,
) -> assemble.LanguageModel:
  """The same decoding in the sizes to measure, with its target in full.

  `optimize.measure_costs` puts decoders around `target`, so that here the heads
  at every node have to be part of it.
  """
  heads, weights = _medusa2.read_heads(model, draft)
  trees = dict.fromkeys(decoding.best_tree(acceptance, size) for size in _SIZES)
  full = dataclasses.replace(
    default,
    target=_medusa2.with_heads(model.target, heads),
    params=decoding.DecoderParams((model.params.target, weights), weights),
  )

  def rung(proposes: decoding.DraftFn) -> assemble.Rung:
    decoder = assemble.decoder_with(full, proposes)
    return assemble.Rung(proposes, decoder, None)

  rungs = [rung(_medusa2.propose_tree(heads, tree)) for tree in trees]
  root = rung(decoding.root_only(rungs[0].draft))
  return dataclasses.replace(
    full, ladder=(root, *rungs), start=0, fallback=root.decoder
  )
