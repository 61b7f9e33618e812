"""Grouped-query attention of tree nodes over a cached prefix."""

import jax
import jax.numpy as jnp
from flax import nnx

from ldjax import _base, memory, pallas_kernels, typing
from ldjax.models import _config, _layers, _linear

Array = typing.Array


class Attention(nnx.Module):
  """Projections, norms and rotary embedding around `tree_attention`.

  Args:
    config: its shape.
    inputs: width of what it reads; None for E.
    dtype: of the parameters.
    rngs: for random parameters.

  Source: Ainslie et al. 2023 (grouped queries); Dehghani et al. 2023 (norms of
  queries and keys); Kazemnejad et al. 2023 (no positional encoding).
  """

  def __init__(
    self,
    config: _config.TransformerConfig,
    *,
    inputs: int | None = None,
    dtype: jax.typing.DTypeLike,
    rngs: nnx.Rngs,
  ):
    self.config = config
    width = config.hidden_size
    inputs = width if inputs is None else inputs
    query_width = config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim

    def make(inputs, outputs, use_bias):
      return _linear.Linear(
        inputs, outputs, use_bias=use_bias, dtype=dtype, rngs=rngs
      )

    def norm():
      return _layers.make_norm(config, config.head_dim, dtype)

    widths = (query_width, kv_width, kv_width)
    if "qkv" in config.fused:
      self.qkv_proj = make(inputs, sum(widths), config.qkv_bias)
    else:
      self.q_proj, self.k_proj, self.v_proj = (
        make(inputs, each, config.qkv_bias) for each in widths
      )
    self.o_proj = make(query_width, width, config.o_bias)
    self.q_norm = norm() if config.qk_norm else None
    self.k_norm = norm() if config.qk_norm else None

  def project(
    self,
    x: Array,
    angles: tuple[Array, Array] | None,
  ) -> tuple[Array, Array]:
    """Queries, and keys with values, of a block of nodes.

    Args:
      x: [R, T, E], or of the width `inputs`.
      angles: cosines and sines, each [R, T, H/2]; None for a layer without
        rotary embedding.

    Returns:
      [R, T, N, H], and [R, T, K, 2H] as computed.
    """
    rows, num_nodes, _ = x.shape

    def heads(y):
      return y.reshape(rows, num_nodes, -1, self.config.head_dim)

    def place(y, norm):
      y = heads(y) if norm is None else norm(heads(y))
      return y if angles is None else _layers.rotate(y, *angles)

    if "qkv" in self.config.fused:
      width = self.config.num_heads * self.config.head_dim
      kv_width = self.config.num_kv_heads * self.config.head_dim
      query, key, value = jnp.split(
        self.qkv_proj(x), (width, width + kv_width), axis=-1
      )
    else:
      query, key, value = self.q_proj(x), self.k_proj(x), self.v_proj(x)
    query, key = place(query, self.q_norm), place(key, self.k_norm)
    value = heads(value)
    return query, jnp.concatenate([key, value], axis=-1)

  def __call__(
    self,
    x: Array,
    angles: tuple[Array, Array] | None,
    mask: Array,
    start: Array | None,
    pages: _base.KV,
    block_table: Array,
    length: Array,
  ) -> tuple[Array, _base.KV]:
    """Attends a block of nodes.

    Args:
      x: [R, T, E].
      angles: see `project`.
      mask: [R, T, T], which node sees which.
      start: [R, T], the first position that each node sees, or None for 0.
      pages: [P, K, Z, 2H] of this layer.
      block_table: [R, M].
      length: [R], committed positions.

    Returns:
      [R, T, E], and the block's keys and values [R, T, K, 2H] in the dtype of
      the pages.
    """
    rows, num_nodes, _ = x.shape
    config = self.config
    query, computed = self.project(x, angles)
    # Through the cache's dtype first: a node must look to its block as it
    # will look once committed, or wide and narrow passes would differ.
    block_kv = memory.cast_kv(computed, pages.dtype)
    out = pallas_kernels.tree_attention(
      query,
      block_kv,
      pages,
      block_table,
      length,
      mask,
      scale=config.query_scale or config.head_dim**-0.5,
      start=start,
      soft_cap=config.attn_soft_cap,
    )
    return self.o_proj(out.reshape(rows, num_nodes, -1)), block_kv
