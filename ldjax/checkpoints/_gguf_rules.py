"""Which tensor of a GGUF file becomes which parameter, by architecture.

The names are those of llama.cpp's converter. It interleaves the rows of q and k
for the architecture llama alone.
"""

import numpy as np

from ldjax.checkpoints import _rules

_BLOCK = r"blk\.(\d+)\."
_LAYER = "layers/{0}/"


def _line(name: str, *targets: str, transform: str = "") -> _rules.Rule:
  """Weight or bias of a layer, for one parameter or for several fused."""
  paths = tuple(f"{_LAYER}{target}/{{1}}" for target in targets)
  return _rules.Rule(
    _BLOCK + name + r"\.(weight|bias)",
    paths if len(paths) > 1 else paths[0],
    transform,
  )


_ENDS = (
  _rules.Rule(r"token_embd\.weight", "embed_tokens/weight"),
  _rules.Rule(r"output_norm\.(weight|bias)", "norm/{0}"),
  _rules.Rule(r"output\.weight", "lm_head/weight"),
  # Read by the configuration, see `_rope_factors`.
  _rules.Rule(r"rope_freqs\.weight", None),
)
_BASE = (
  *_ENDS,
  _line("attn_output", "self_attn/o_proj"),
  _line("ffn_down", "mlp/down_proj"),
  _line("attn_norm", "input_layernorm"),
  _line("ffn_norm", "post_attention_layernorm"),
)
_COMMON = (
  *_BASE,
  _line("attn_v", "self_attn/v_proj"),
  _line("ffn_gate", "mlp/gate_proj"),
  _line("ffn_up", "mlp/up_proj"),
)
_HALVES = (
  _line("attn_q", "self_attn/q_proj"),
  _line("attn_k", "self_attn/k_proj"),
)
_QK_NORMS = (
  _line("attn_q_norm", "self_attn/q_norm"),
  _line("attn_k_norm", "self_attn/k_norm"),
)
_OUTPUT_NORMS = (
  _line("post_attention_norm", "attention_output_norm"),
  _line("post_ffw_norm", "mlp_output_norm"),
)
_FUSED = _line(
  "attn_qkv", "self_attn/q_proj", "self_attn/k_proj", "self_attn/v_proj"
)
RULES = {
  "llama": (
    *_COMMON,
    _line("attn_q", "self_attn/q_proj", transform="split_query_halves"),
    _line("attn_k", "self_attn/k_proj", transform="split_key_halves"),
  ),
  "qwen2": (*_COMMON, *_HALVES),
  "qwen3": (*_COMMON, *_HALVES, *_QK_NORMS),
  "gemma": (*_COMMON, *_HALVES),
  "gemma2": (*_COMMON, *_HALVES, *_OUTPUT_NORMS),
  "gemma3": (*_COMMON, *_HALVES, *_OUTPUT_NORMS, *_QK_NORMS),
  "phi3": (
    *_BASE,
    _FUSED,
    _line("ffn_up", "mlp/gate_proj", "mlp/up_proj"),
    # Read by the configuration.
    _rules.Rule(r"rope_factors_(?:long|short)\.weight", None),
  ),
  "gpt2": (
    *_BASE,
    _FUSED,
    _line("ffn_up", "mlp/up_proj"),
    _rules.Rule(r"position_embd\.weight", "embed_positions/weight"),
  ),
}


def split_halves(array: np.ndarray, heads: int) -> np.ndarray:
  """Puts rows back from interleaved RoPE order to two halves a head.

  GGUF keeps the two halves of a llama head's rows shuffled together (0, H/2,
  1, H/2 + 1, …); here, as in Hugging Face, the halves stand one after the
  other.

  Args:
    array: `[heads * H, …]`, a weight or a bias.
    heads: N for queries, K for keys.

  Returns:
    The rows in the other order, same shape.
  """
  half = array.shape[0] // heads // 2
  paired = array.reshape(heads, half, 2, *array.shape[1:])
  return np.moveaxis(paired, 2, 1).reshape(array.shape)
