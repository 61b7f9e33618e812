"""What each model_type of a config.json stands for, as data."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ldjax.checkpoints import _config_rope

_SILU = {"hidden_act": {"silu": "silu", "swish": "silu"}}
_GELU = {"hidden_activation": {"gelu_pytorch_tanh": "gelu_tanh"}}


class Family(NamedTuple):
  """What a model_type stands for where its config.json is silent.

  Args:
    architecture: the only class whose weights are read.
    fixed: fields of the configuration that no key of the file changes.
    absent: what transformers takes for a key that is missing.
    names: what the file calls a key, where it is not the name used here.
    nested: the key of the object that describes the language model, if the
      file describes more than that.
    activations: the keys that may name the activation, the first that is given
      counts, and for each the names that can be read.
    only: keys that may hold this value and no other.
    rope: what is supported of rotary embedding.
    windows: which layers a sliding window concerns: "none", "all", "upper"
      (from `max_window_layers` on), "nope" (those without rotary embedding) or
      "pattern" (all but each `sliding_window_pattern`-th).
    switch: whether the window needs `use_sliding_window`, and `layer_types` may
      name the layers.
    widening: feed-forward width over E where the file gives none.
    gemma: whether embeddings, scores and logits are scaled as in a Gemma.
  """

  architecture: str
  fixed: Mapping[str, Any] = {}
  absent: Mapping[str, Any] = {}
  names: Mapping[str, str] = {}
  nested: str = ""
  activations: Mapping[str, Mapping[str, str]] = _SILU
  only: Mapping[str, Any] = {}
  rope: _config_rope.Support = _config_rope.Support()
  windows: str = "none"
  switch: bool = False
  widening: int | None = None
  gemma: bool = False


_GEMMA: dict[str, Any] = {
  "fixed": {"mlp_bias": False, "norm_offset": 1.0, "activation": "gelu_tanh"},
  "only": {"use_bidirectional_attention": False},
  "gemma": True,
}
_GEMMA3 = {
  **_GEMMA,
  "fixed": {**_GEMMA["fixed"], "output_norms": True, "qk_norm": True},
  "absent": {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
  },
  "activations": _GELU,
  "rope": _config_rope.Support(kinds=("default", "linear"), local=True),
  "windows": "pattern",
}
FAMILIES = {
  "llama": Family("LlamaForCausalLM"),
  "mistral": Family(
    "MistralForCausalLM",
    fixed={"qkv_bias": False, "o_bias": False, "mlp_bias": False},
    absent={
      "num_key_value_heads": 8,
      "max_position_embeddings": 131072,
      "sliding_window": 4096,
    },
    windows="all",
  ),
  "qwen2": Family(
    "Qwen2ForCausalLM",
    fixed={"qkv_bias": True, "o_bias": False, "mlp_bias": False},
    absent={
      "num_key_value_heads": 32,
      "max_position_embeddings": 32768,
      "sliding_window": 4096,
    },
    windows="upper",
    switch=True,
  ),
  "qwen3": Family(
    "Qwen3ForCausalLM",
    fixed={"mlp_bias": False, "qk_norm": True},
    absent={
      "head_dim": 128,
      "num_key_value_heads": 32,
      "max_position_embeddings": 32768,
      "sliding_window": 4096,
    },
    windows="upper",
    switch=True,
  ),
  "smollm3": Family(
    "SmolLM3ForCausalLM",
    absent={
      "num_key_value_heads": 4,
      "max_position_embeddings": 32768,
      "rope_theta": 2000000.0,
      "tie_word_embeddings": True,
    },
    windows="nope",
    switch=True,
  ),
  "phi3": Family(
    "Phi3ForCausalLM",
    fixed={"qkv_bias": False, "o_bias": False, "mlp_bias": False},
    absent={
      "max_position_embeddings": 4096,
      "original_max_position_embeddings": 4096,
      "rms_norm_eps": 1e-5,
    },
    rope=_config_rope.Support(kinds=("default", "longrope", "su")),
    windows="all",
  ),
  "gpt2": Family(
    "GPT2LMHeadModel",
    fixed={
      "learned_positions": True,
      "norm": "layer",
      "activation": "gelu_tanh",
      "mlp_gate": False,
      "qkv_bias": True,
      "o_bias": True,
      "mlp_bias": True,
    },
    absent={
      "max_position_embeddings": 1024,
      "rms_norm_eps": 1e-5,
      "tie_word_embeddings": True,
    },
    names={
      "hidden_size": "n_embd",
      "intermediate_size": "n_inner",
      "num_hidden_layers": "n_layer",
      "num_attention_heads": "n_head",
      "num_key_value_heads": "n_head",
      "max_position_embeddings": "n_positions",
      "rms_norm_eps": "layer_norm_epsilon",
    },
    activations={
      "activation_function": {
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
      }
    },
    only={
      "scale_attn_weights": True,
      "scale_attn_by_inverse_layer_idx": False,
      "add_cross_attention": False,
    },
    widening=4,
  ),
  "gemma": Family(
    "GemmaForCausalLM",
    **_GEMMA,
    absent={
      "num_key_value_heads": 16,
      "head_dim": 256,
      "max_position_embeddings": 8192,
      "tie_word_embeddings": True,
    },
    activations={
      **_GELU,
      # The first files say gelu, and mean the tanh form all the same.
      "hidden_act": {"gelu": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"},
    },
  ),
  "gemma2": Family(
    "Gemma2ForCausalLM",
    fixed={**_GEMMA["fixed"], "output_norms": True},
    absent={
      "num_key_value_heads": 4,
      "head_dim": 256,
      "max_position_embeddings": 8192,
      "query_pre_attn_scalar": 256,
      "attn_logit_softcapping": 50.0,
      "final_logit_softcapping": 30.0,
      "sliding_window": 4096,
      "sliding_window_pattern": 2,
      "tie_word_embeddings": True,
    },
    activations=_GELU,
    only={**_GEMMA["only"], "sliding_window_pattern": 2},
    windows="pattern",
    gemma=True,
  ),
  "gemma3_text": Family("Gemma3ForCausalLM", **_GEMMA3),
  "gemma3": Family(
    "Gemma3ForConditionalGeneration", nested="text_config", **_GEMMA3
  ),
}
