"""Target models in Hugging Face folders: config.json and weights."""

import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from ldjax import models
from ldjax.checkpoints import _config_json, _rules, _safetensors, _weights

_MODEL = r"(?:model\.)?"
_TWO_NORMS = {
  "input_layernorm": "input_layernorm",
  "post_attention_layernorm": "post_attention_layernorm",
}
# Here `post_attention_layernorm` is what norms the input of the feed-forward.
_FOUR_NORMS = {
  "input_layernorm": "input_layernorm",
  "post_attention_layernorm": "attention_output_norm",
  "pre_feedforward_layernorm": "post_attention_layernorm",
  "post_feedforward_layernorm": "mlp_output_norm",
}


def _decoder(
  model: str = _MODEL, norms: Mapping[str, str] = _TWO_NORMS
) -> tuple[_rules.Rule, ...]:
  """What all but GPT-2 share: everything but q, k, v, gate and up.

  Args:
    model: the pattern of what stands before the names.
    norms: of a layer, by their names in the file.
  """
  layer = model + r"layers\.(\d+)\."
  return (
    _rules.Rule(model + r"embed_tokens\.weight", "embed_tokens/weight"),
    *(
      _rules.Rule(layer + name + r"\.weight", f"layers/{{0}}/{target}/weight")
      for name, target in norms.items()
    ),
    _rules.Rule(
      layer + r"self_attn\.o_proj\.(weight|bias)",
      "layers/{0}/self_attn/o_proj/{1}",
    ),
    _rules.Rule(
      layer + r"mlp\.down_proj\.(weight|bias)", "layers/{0}/mlp/down_proj/{1}"
    ),
    _rules.Rule(model + r"norm\.weight", "norm/weight"),
    _rules.Rule(r"(?:.*\.)?rotary_emb(?:_local)?\.inv_freq", None),
  )


def _projections(model: str = _MODEL) -> tuple[_rules.Rule, ...]:
  """q, k, v, gate and up as tensors of their own, and norms of q and k."""
  layer = model + r"layers\.(\d+)\."
  return (
    _rules.Rule(
      layer + r"self_attn\.([qkv]_proj)\.(weight|bias)",
      "layers/{0}/self_attn/{1}/{2}",
    ),
    _rules.Rule(
      layer + r"self_attn\.([qk]_norm)\.weight",
      "layers/{0}/self_attn/{1}/weight",
    ),
    _rules.Rule(
      layer + r"mlp\.(gate_proj|up_proj)\.(weight|bias)",
      "layers/{0}/mlp/{1}/{2}",
    ),
  )


_QKV = tuple(f"layers/{{0}}/self_attn/{x}_proj" for x in "qkv")
_PHI3_LAYER = _MODEL + r"layers\.(\d+)\."
_PHI3 = (
  *_decoder(),
  _rules.Rule(
    _PHI3_LAYER + r"self_attn\.qkv_proj\.weight",
    tuple(f"{path}/weight" for path in _QKV),
  ),
  _rules.Rule(
    _PHI3_LAYER + r"mlp\.gate_up_proj\.weight",
    ("layers/{0}/mlp/gate_proj/weight", "layers/{0}/mlp/up_proj/weight"),
  ),
)

_GPT2_MODEL = r"(?:transformer\.)?"
_GPT2_LAYER = _GPT2_MODEL + r"h\.(\d+)\."


def _gpt2_linear(
  name: str, target: str | tuple[str, ...], transposed: bool = True
) -> _rules.Rule:
  return _rules.Rule(
    _GPT2_LAYER + name + r"\.(weight|bias)", target, transposed=transposed
  )


# Its weights are [in, out]; biases have one axis and do not mind.
_GPT2 = (
  _rules.Rule(_GPT2_MODEL + r"wte\.weight", "embed_tokens/weight"),
  _rules.Rule(_GPT2_MODEL + r"wpe\.weight", "embed_positions/weight"),
  _rules.Rule(_GPT2_MODEL + r"ln_f\.(weight|bias)", "norm/{0}"),
  _gpt2_linear(r"ln_1", "layers/{0}/input_layernorm/{1}", False),
  _gpt2_linear(r"ln_2", "layers/{0}/post_attention_layernorm/{1}", False),
  _gpt2_linear(r"attn\.c_attn", tuple(f"{path}/{{1}}" for path in _QKV)),
  _gpt2_linear(r"attn\.c_proj", "layers/{0}/self_attn/o_proj/{1}"),
  _gpt2_linear(r"mlp\.c_fc", "layers/{0}/mlp/up_proj/{1}"),
  _gpt2_linear(r"mlp\.c_proj", "layers/{0}/mlp/down_proj/{1}"),
  # The causal mask and the number that masks.
  _rules.Rule(_GPT2_LAYER + r"attn\.(?:masked_)?bias", None),
)

# Files name the text model before or after its container.
_GEMMA3_MODEL = r"(?:model\.language_model\.|language_model\.model\.)"

RULES = (*_decoder(), *_projections())
_GEMMA = (*_decoder(norms=_FOUR_NORMS), *_projections())
# By model_type, where the names are not those of `RULES`.
TABLES: dict[str, tuple[_rules.Rule, ...]] = {
  "gemma2": _GEMMA,
  "gemma3_text": _GEMMA,
  "gemma3": (
    *_decoder(_GEMMA3_MODEL, _FOUR_NORMS),
    *_projections(_GEMMA3_MODEL),
    # Only text is read.
    _rules.Rule(
      r"(?:model\.)?(?:vision_tower|multi_modal_projector)\..*", None
    ),
  ),
  "gpt2": _GPT2,
  "phi3": _PHI3,
}


def rules_of(kind: Any, tied: bool) -> tuple[_rules.Rule, ...]:
  """The table of a model_type.

  Args:
    kind: the model_type.
    tied: whether the embedding is the output matrix; a file may hold it twice.
  """
  target = None if tied else "lm_head/weight"
  outer = r"(?:language_model\.)?" if kind == "gemma3" else ""
  output = _rules.Rule(outer + r"lm_head\.weight", target)
  # Of a Medusa-2 model; `read_medusa` reads them.
  heads = _rules.Rule(r"medusa_head\..*", None)
  return (*TABLES.get(kind, RULES), output, heads)


def read_folder_config(folder: pathlib.Path) -> models.TransformerConfig:
  """The configuration of a Hugging Face folder."""
  file = folder / "config.json"
  if not file.is_file():
    raise FileNotFoundError(
      f"{file}: missing; a Hugging Face folder needs config.json and"
      " model.safetensors"
    )
  return _config_json.parse_config(_safetensors.read_json(file), file)


def eos_of(folder: pathlib.Path) -> tuple[int, ...]:
  """EOS ids of config.json and generation_config.json together."""
  found: dict[int, None] = {}
  for name in ("config.json", "generation_config.json"):
    file = folder / name
    if not file.is_file():
      continue
    value = _safetensors.read_json(file).get("eos_token_id")
    if value is None:
      continue
    for token in value if isinstance(value, list) else [value]:
      if isinstance(token, bool) or not isinstance(token, int) or token < 0:
        raise ValueError(
          f"{file}: eos_token_id is {value!r}; a token id or a list of them is"
          " needed"
        )
      found[token] = None
  return tuple(found)


def open_folder(
  reader: _weights.Reader, folder: pathlib.Path, dtype: np.dtype[Any] | None
) -> tuple[models.TransformerConfig, _rules.Plan, tuple[int, ...]]:
  """Configuration, plan and EOS ids of a Hugging Face folder.

  Args:
    reader: keeps the files open.
    folder: with config.json and weights.
    dtype: of the parameters; None for the files' own.
  """
  config = read_folder_config(folder)
  kind = _safetensors.read_json(folder / "config.json").get("model_type")
  rules = rules_of(kind, config.tie_word_embeddings)
  unneeded = functools.partial(_rules.unneeded, rules)
  eos = eos_of(folder)
  tensors = _weights.offered(reader, folder, unneeded=unneeded)
  target = dtype or _rules.common_dtype(
    tensor for tensor in tensors if not unneeded(tensor.name)
  )
  planned = _rules.plan(rules, tensors, models.abstract_params(config, target))
  return config, _rules.Plan(planned, {}, target), eos
