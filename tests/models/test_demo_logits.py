"""The demo model, as it was loaded, against NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from ldjax import checkpoints, memory, models

pytestmark = pytest.mark.slow


def test_logits_of_the_demo_model(demo_model, numpy_forward):
  checkpoint = checkpoints.read(demo_model)
  config = checkpoint.config
  target, _ = models.functionalize(models.abstract_model(config))
  size = 13
  tokens = np.random.default_rng(0).integers(0, config.vocab_size, size)
  cache = memory.DenseKVCache.create(
    batch=1,
    max_len=2,
    num_layers=config.num_layers,
    num_kv_heads=config.num_kv_heads,
    head_dim=config.head_dim,
  )
  column = jnp.arange(size, dtype=jnp.int32)[None]
  output = target.forward(
    checkpoint.params,
    jnp.asarray(tokens[None], jnp.int32),
    column,
    column - 1,
    cache.view(),
  )
  got = target.score(checkpoint.params, output.hidden).logits[0]
  want = numpy_forward(
    config,
    checkpoint.params,
    tokens,
    np.arange(size),
    np.tril(np.ones((size, size), bool)),
  )["logits"]
  # fp32 against float64: thirty layers, each some sums of up to 1,536 terms,
  # whose errors add up like a random walk: about sqrt(30 * 1536) * 2**-24.
  limit = 2e-5 * np.abs(want).max()
  np.testing.assert_allclose(np.asarray(got), want, atol=limit)
