"""Attention kernels: one folder a kernel, plain jnp as the definition."""

from ldjax.pallas_kernels._prefix_attention import prefix_attention
from ldjax.pallas_kernels._tree_attention import (
  ancestor_mask,
  tree_attention,
  window_mask,
)

__all__ = [
  "ancestor_mask",
  "prefix_attention",
  "tree_attention",
  "window_mask",
]
