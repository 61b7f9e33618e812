"""Logits against another implementation of the same weights."""

import jax.numpy as jnp
import numpy as np
import pytest

from ldjax import checkpoints, memory, models

pytestmark = pytest.mark.slow


def _logits(folder, tokens):
  """Our logits [T, V] of a whole text, in one block."""
  checkpoint = checkpoints.read(folder)
  config = checkpoint.config
  target, _ = models.functionalize(models.abstract_model(config))
  cache = memory.DenseKVCache.create(
    batch=1,
    max_len=2,
    num_layers=config.num_layers,
    num_kv_heads=config.num_kv_heads,
    head_dim=config.head_dim,
  )
  column = jnp.arange(len(tokens), dtype=jnp.int32)[None]
  output = target.forward(
    checkpoint.params,
    jnp.asarray([tokens], jnp.int32),
    column,
    column - 1,
    cache.view(),
  )
  scores = target.score(checkpoint.params, output.hidden)
  return np.asarray(scores.logits[0])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_llama(tied, bias, scaled, tmp_path):
  torch = pytest.importorskip("torch", reason="torch is not installed")
  transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed"
  )
  rope = {"rope_type": "default", "rope_theta": 5000.0}
  if scaled:
    rope = {
      "rope_type": "llama3",
      "rope_theta": 5000.0,
      "factor": 8.0,
      "low_freq_factor": 1.0,
      "high_freq_factor": 4.0,
      "original_max_position_embeddings": 16,
    }
  torch.manual_seed(0)
  config = transformers.LlamaConfig(
    vocab_size=37,
    hidden_size=30,
    intermediate_size=28,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    rope_parameters=rope,
    tie_word_embeddings=tied,
    attention_bias=bias,
    mlp_bias=bias,
    initializer_range=0.3,
  )
  model = transformers.LlamaForCausalLM(config).eval()
  with torch.no_grad():
    for name, parameter in model.named_parameters():
      if name.endswith("bias"):  # they start at zero, which proves nothing
        parameter.normal_()
  model.save_pretrained(tmp_path, safe_serialization=True)
  tokens = np.random.default_rng(0).integers(0, 37, 41).tolist()
  with torch.no_grad():
    want = model(torch.tensor([tokens])).logits[0].numpy()
  got = _logits(tmp_path, tokens)
  # Both sum about a hundred products a layer in fp32, in other orders.
  np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())
