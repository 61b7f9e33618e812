"""Grouped-query attention of tree nodes over a cached prefix."""

import jax
import jax.numpy as jnp
from flax import nnx

from ldjax import pallas_kernels, typing
from ldjax.models import _config, _layers, _linear

Array = typing.Array


class Attention(nnx.Module):
  """Projections and rotary embedding around `tree_attention`.

  Source: Ainslie et al. 2023 (grouped queries).
  """

  def __init__(
    self,
    config: _config.TransformerConfig,
    *,
    dtype: jax.typing.DTypeLike,
    rngs: nnx.Rngs,
  ):
    self.config = config
    width = config.hidden_size
    query_width = config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim

    def make(inputs, outputs):
      return _linear.Linear(
        inputs, outputs, use_bias=config.attention_bias, dtype=dtype, rngs=rngs
      )

    self.q_proj = make(width, query_width)
    self.k_proj = make(width, kv_width)
    self.v_proj = make(width, kv_width)
    self.o_proj = make(query_width, width)

  def __call__(
    self,
    x: Array,
    angles: tuple[Array, Array],
    mask: Array,
    pages: Array,
    block_table: Array,
    length: Array,
  ) -> tuple[Array, Array]:
    """Attends a block of nodes.

    Args:
      x: [R, T, E].
      angles: cosines and sines, each [R, T, H/2].
      mask: [R, T, T], which node sees which.
      pages: [P, K, Z, 2H] of this layer.
      block_table: [R, M].
      length: [R], committed positions.

    Returns:
      [R, T, E], and the block's keys and values [R, T, K, 2H] in the dtype of
      the pages.
    """
    rows, num_nodes, _ = x.shape
    head_dim = self.config.head_dim

    def heads(y):
      return y.reshape(rows, num_nodes, -1, head_dim)

    query = _layers.rotate(heads(self.q_proj(x)), *angles)
    key = _layers.rotate(heads(self.k_proj(x)), *angles)
    value = heads(self.v_proj(x))
    # Through the cache's dtype first: a node must look to its block as it
    # will look once committed, or wide and narrow passes would differ.
    block_kv = jnp.concatenate([key, value], axis=-1).astype(pages.dtype)
    out = pallas_kernels.tree_attention(
      query, block_kv, pages, block_table, length, mask, scale=head_dim**-0.5
    )
    return self.o_proj(out.reshape(rows, num_nodes, -1)), block_kv
