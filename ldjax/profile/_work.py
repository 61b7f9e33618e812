"""The bytes and operations of a step, by formula."""

import math
from typing import Any, NamedTuple

import jax

from ldjax import memory, models


class StepWork(NamedTuple):
  """What the target's pass over a tree must do, at least."""

  flops: float
  """Operations; a multiplication and an addition are two."""
  weight_bytes: float
  """Weights, read once for all rows."""
  cache_bytes: float
  """Committed keys and values, read once a row."""
  other_bytes: float
  """The tree's keys and values, written, and the logits in float32, written
  and read."""

  @property
  def bytes(self) -> float:
    """All of them."""
    return self.weight_bytes + self.cache_bytes + self.other_bytes


def product_weights(config: models.TransformerConfig) -> int:
  """How many weights a token is multiplied with, output matrix included.

  Args:
    config: of the target.

  Example:
    >>> import ldjax
    >>> product_weights(ldjax.testing.tiny_model().config)
    9576
  """
  width, heads = config.hidden_size, config.num_heads * config.head_dim
  kv = config.num_kv_heads * config.head_dim
  attention = 2 * width * heads + 2 * width * kv
  feed_forward = (
    (3 if config.mlp_gate else 2) * width * (config.intermediate_size)
  )
  return (
    config.num_layers * (attention + feed_forward) + config.vocab_size * width
  )


def weight_bytes(config: models.TransformerConfig, params: Any) -> int:
  """Bytes of the weights that a pass reads whole.

  Embeddings are looked up by row, so they count only where they are the output
  matrix too.

  Args:
    config: of the target.
    params: its weights, or their shapes.
  """
  looked_up = {"embed_positions"}
  if not config.tie_word_embeddings:
    looked_up.add("embed_tokens")
  read = {name: x for name, x in params.items() if name not in looked_up}
  return sum(
    math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(read)
  )


def position_bytes(config: models.TransformerConfig, cache_dtype: Any) -> int:
  """Bytes of the keys and values of a position in one layer.

  Args:
    config: of the target.
    cache_dtype: see `memory.cache_dtype`; in eight bits each of keys and values
      has a scale in float32 besides.
  """
  dtype = memory.cache_dtype(cache_dtype)
  scales = 8 if dtype.itemsize == 1 else 0
  return config.num_kv_heads * (2 * config.head_dim * dtype.itemsize + scales)


def step_work(
  config: models.TransformerConfig,
  params: Any,
  *,
  size: int,
  batch: int = 1,
  context: int = 0,
  cache_dtype: Any = "float32",
) -> StepWork:
  """Counts what a step must read, write and compute, the draft left out.

  Products: 2 operations a weight and node; attention: 4 N H a node and position
  that it sees (all of the tree counted). Weights are read once, each row's
  positions once; activations are taken to stay in registers and caches.

  Args:
    config: of the target.
    params: its weights, or their shapes (`models.abstract_params`).
    size: T, nodes of the tree.
    batch: B.
    context: S, committed positions of each row.
    cache_dtype: of keys and values.

  Raises:
    ValueError: for a size or a batch below 1, or a context below 0.

  Example:
    >>> import ldjax
    >>> tiny = ldjax.testing.tiny_model()
    >>> one = step_work(tiny.config, tiny.params, size=1, context=10)
    >>> four = step_work(tiny.config, tiny.params, size=4, context=10)
    >>> one.weight_bytes == four.weight_bytes, one.cache_bytes
    (True, 1280)
  """
  for name, value, least in (
    ("size", size, 1),
    ("batch", batch, 1),
    ("context", context, 0),
  ):
    if value < least:
      raise ValueError(f"{name} is {value}; it must be at least {least}")
  rows = batch * size
  seen = [
    context if window is None else min(context, window)
    for window in map(config.window, range(config.num_layers))
  ]
  attention = 4 * config.num_heads * config.head_dim
  position = position_bytes(config, cache_dtype)
  return StepWork(
    flops=rows
    * (
      2 * product_weights(config)
      + attention * sum(each + size for each in seen)
    ),
    weight_bytes=weight_bytes(config, params),
    cache_bytes=batch * position * sum(seen),
    other_bytes=rows
    * (position * config.num_layers + 2 * 4 * config.vocab_size),
  )
