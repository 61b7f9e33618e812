"""Logits against another implementation of the same weights, every family."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldjax import checkpoints, memory, models

pytestmark = pytest.mark.slow

_TEXT = 41
_WINDOW = 7

_SIZES = {
  "vocab_size": 37,
  "hidden_size": 48,
  "intermediate_size": 28,
  "num_hidden_layers": 4,
  "num_attention_heads": 6,
  "num_key_value_heads": 2,
  "max_position_embeddings": 128,
  "initializer_range": 0.3,
}
_PLAIN = {"rope_type": "default", "rope_theta": 5000.0}
_LLAMA3 = {
  "rope_type": "llama3",
  "rope_theta": 5000.0,
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 16,
}
_SLIDES = {"sliding_window": _WINDOW, "use_sliding_window": True}
_LAYERS = [
  "sliding_attention",
  "full_attention",
  "full_attention",
  "sliding_attention",
]
# class -> what differs, and our windows of the four layers
_FAMILIES = [
  ("Llama", {"head_dim": 10, "attention_bias": True, "mlp_bias": True}, ""),
  ("Llama", {"rope_parameters": _LLAMA3, "tie_word_embeddings": True}, ""),
  ("Llama", {"num_key_value_heads": None, "sliding_window": _WINDOW}, ""),
  ("Mistral", {"sliding_window": _WINDOW, "head_dim": 10}, "wwww"),
  ("Mistral", {"sliding_window": None, "tie_word_embeddings": True}, ""),
  ("Mistral", {"sliding_window": 128}, ""),  # as long as any text
  ("Qwen2", {"sliding_window": _WINDOW, "use_sliding_window": False}, ""),
  ("Qwen2", {**_SLIDES, "max_window_layers": 3}, "---w"),
  ("Qwen2", {**_SLIDES, "layer_types": _LAYERS}, "w--w"),
  ("Qwen3", {"head_dim": 10, "tie_word_embeddings": True}, ""),
  ("Qwen3", {**_SLIDES, "head_dim": 16, "max_window_layers": 0}, "wwww"),
  ("Qwen3", {"head_dim": 10, "attention_bias": True}, ""),
  ("SmolLM3", {"pad_token_id": 0}, ""),
  (
    "SmolLM3",
    {
      **_SLIDES,
      "pad_token_id": 0,
      "no_rope_layers": [0, 1, 1, 0],
      "attention_bias": True,
    },
    "w--w",
  ),
  ("Gemma", {"head_dim": 10, "tie_word_embeddings": True}, ""),
  (
    "Gemma2",
    {
      "head_dim": 10,
      "sliding_window": _WINDOW,
      "query_pre_attn_scalar": 7,
      "attn_logit_softcapping": 2.0,
      "final_logit_softcapping": 5.0,
      "tie_word_embeddings": True,
    },
    "w-w-",
  ),
  ("Phi3", {"sliding_window": _WINDOW, "pad_token_id": 0}, "wwww"),
]


def _name(family):
  return f"{family[0]}-{'-'.join(family[1])}"


@pytest.fixture(params=_FAMILIES, ids=_name)
def family(request, tmp_path):
  """A random model: its folder, theirs of a text, and our windows."""
  torch = pytest.importorskip("torch", reason="torch is not installed")
  transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed"
  )
  kind, changes, windows = request.param
  torch.manual_seed(0)
  options = {"rope_parameters": _PLAIN, "tie_word_embeddings": False}
  config = getattr(transformers, f"{kind}Config")(
    **{**_SIZES, **options, **changes}, attn_implementation="eager"
  )
  model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
  with torch.no_grad():
    for name, parameter in model.named_parameters():
      # Norms start at one and biases at zero, which proves nothing.
      if "norm" in name:
        parameter.uniform_(0.5, 1.5)
      elif name.endswith("bias"):
        parameter.normal_()
  model.save_pretrained(tmp_path, safe_serialization=True)

  def theirs(text):
    with torch.no_grad():
      return model(torch.tensor([text])).logits[0].numpy()

  return tmp_path, theirs, tuple(_WINDOW if w == "w" else None for w in windows)


def _ours(checkpoint):
  """run(tokens[T], parents[T], cache) -> logits [T, V], cache of a chain."""
  config = checkpoint.config
  target, _ = models.functionalize(models.abstract_model(config))
  cache = memory.PagedKVCache.create(
    batch=1,
    max_len=40,
    num_layers=config.num_layers,
    num_kv_heads=config.num_kv_heads,
    head_dim=config.head_dim,
    page_size=5,
  )

  @jax.jit
  def forward(params, tokens, positions, parents, cache):
    output = target.forward(params, tokens, positions, parents, cache.view())
    path = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    count = jnp.full((1,), tokens.shape[1], jnp.int32)
    longer, _ = cache.commit(output.block_kv, path, count)
    return target.score(params, output.hidden).logits[0], longer

  def run(tokens, parents, cache):
    depths = []
    for parent in parents:
      depths.append(0 if parent < 0 else depths[parent] + 1)
    positions = int(cache.length[0]) + np.array([depths], np.int32)
    return forward(
      checkpoint.params,
      np.array([tokens], np.int32),
      positions,
      np.array([parents], np.int32),
      cache,
    )

  return run, cache


def test_chains_and_trees(family):
  folder, theirs, windows = family
  checkpoint = checkpoints.read(folder)
  assert checkpoint.config.windows == windows
  run, empty = _ours(checkpoint)
  rng = np.random.default_rng(0)
  text = rng.integers(0, 37, _TEXT).tolist()
  want = theirs(text)
  # Both sum about a hundred products a layer in fp32, in other orders.
  tolerance = 3e-5 * np.abs(want).max()
  whole, _ = run(text, range(-1, _TEXT - 1), empty)
  np.testing.assert_allclose(whole, want, rtol=0, atol=tolerance)

  cache, parts = empty, []
  for begin in range(0, 24, 12):
    logits, cache = run(text[begin : begin + 12], range(-1, 11), cache)
    parts.append(logits)
  np.testing.assert_allclose(
    np.concatenate(parts), want[:24], rtol=0, atol=tolerance
  )

  # A tree of depth 8, deeper than the window, over a prefix longer than it.
  parents = [-1, 0, 0, 1, 2, 3, 5, 6, 7, 4, 8, 10]
  tokens = rng.integers(0, 37, len(parents)).tolist()
  got, _ = run(tokens, parents, cache)
  chains = []
  for node, parent in enumerate(parents):
    chains.append([*(chains[parent] if parent >= 0 else ()), tokens[node]])
  assert max(map(len, chains)) > _WINDOW
  for node in (9, 11, 2):
    alone = theirs(text[:24] + chains[node])[-1]
    np.testing.assert_allclose(got[node], alone, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
  "family", [one for one in _FAMILIES if one[2]], ids=_name, indirect=True
)
def test_the_window_matters(family):
  """Without it other logits come out, so that the comparison means something.

  transformers#38002: a window that is switched off was applied all the same.
  """
  folder, theirs, _ = family
  checkpoint = checkpoints.read(folder)
  unlimited = dataclasses.replace(checkpoint.config, windows=())
  run, cache = _ours(checkpoint._replace(config=unlimited))
  text = np.random.default_rng(0).integers(0, 37, _TEXT).tolist()
  got, _ = run(text, range(-1, _TEXT - 1), cache)
  want = theirs(text)
  limit = 3e-5 * np.abs(want).max()
  np.testing.assert_allclose(got[:_WINDOW], want[:_WINDOW], rtol=0, atol=limit)
  assert np.abs(got - want)[_WINDOW:].max() > 1000 * limit
