"""What is counted in a compiled round, against a formula worked by hand."""

import functools

import jax
from flax import nnx

from ldjax import bench, decoding, memory, models

_CONFIG = models.TransformerConfig(
  vocab_size=512,
  hidden_size=192,
  intermediate_size=256,
  num_layers=2,
  num_heads=3,
  num_kv_heads=1,
  head_dim=64,
  max_position_embeddings=64,
  tie_word_embeddings=True,
)
_MAX_LEN, _NODES = 64, 8


def _init_cache(batch):
  return memory.PagedKVCache.create(
    batch=batch,
    max_len=_MAX_LEN,
    num_layers=2,
    num_kv_heads=1,
    head_dim=64,
    page_size=16,
  )


def test_a_round_of_a_tree():
  target, weights = models.functionalize(
    models.Transformer(_CONFIG, rngs=nnx.Rngs(0))
  )
  decoder = decoding.speculative(
    target, decoding.ngram(_NODES - 1), _init_cache, max_len=_MAX_LEN
  )
  params = decoding.DecoderParams(weights)
  state = jax.eval_shape(functools.partial(decoder.empty, batch=1), params)
  work = bench.work_of(jax.jit(decoder.step).lower(params, state).compile())
  # Two for each weight of a matrix and each node; the embedding is the output
  # matrix too.
  matrices = sum(x.size for x in jax.tree.leaves(weights) if x.ndim == 2)
  products = 2 * matrices * _NODES
  # Scores and values, of the prefix's one block and of the nodes, per layer.
  seen = _MAX_LEN + _NODES
  attention = 2 * 2 * 2 * 3 * 64 * _NODES * seen
  # Norms, softmaxes and the draw come on top; without the attention or any
  # one of the matrices it would be less.
  assert 1 < work.flops / (products + attention) < 1.05
  # The weights are read once.
  assert work.bytes > 4 * matrices
