"""Attention and scoring: one folder a kernel, plain jnp as the definition."""

from ldjax.pallas_kernels._blocks import (
  PrefixBlocks,
  PrefixProblem,
  ScoreBlocks,
  ScoreProblem,
  write_tuned,
)
from ldjax.pallas_kernels._limits import LIMITS, Limits
from ldjax.pallas_kernels._prefix_attention import (
  kernels_wanted,
  prefix_attention,
  without_kernels,
)
from ldjax.pallas_kernels._score import Scored, score
from ldjax.pallas_kernels._tree_attention import (
  ancestor_mask,
  tree_attention,
  window_mask,
)

__all__ = [
  "LIMITS",
  "Limits",
  "PrefixBlocks",
  "PrefixProblem",
  "ScoreBlocks",
  "ScoreProblem",
  "Scored",
  "ancestor_mask",
  "kernels_wanted",
  "prefix_attention",
  "score",
  "tree_attention",
  "window_mask",
  "without_kernels",
  "write_tuned",
]
