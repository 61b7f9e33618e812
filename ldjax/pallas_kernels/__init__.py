"""Attention and scoring: one folder a kernel, plain jnp as the definition."""

from ldjax.pallas_kernels._blocks import PrefixBlocks
from ldjax.pallas_kernels._limits import LIMITS, Limits
from ldjax.pallas_kernels._prefix_attention import prefix_attention
from ldjax.pallas_kernels._tree_attention import (
  ancestor_mask,
  tree_attention,
  window_mask,
)

__all__ = [
  "LIMITS",
  "Limits",
  "PrefixBlocks",
  "ancestor_mask",
  "prefix_attention",
  "tree_attention",
  "window_mask",
]
