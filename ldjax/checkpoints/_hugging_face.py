"""Target models in Hugging Face folders: config.json and weights."""

import pathlib
from typing import Any

import numpy as np

from ldjax import models
from ldjax.checkpoints import _config_json, _rules, _safetensors, _weights

_LAYER = r"(?:model\.)?layers\.(\d+)\."

RULES = (
  _rules.Rule(r"(?:model\.)?embed_tokens\.weight", "embed_tokens/weight"),
  _rules.Rule(
    _LAYER + r"(input_layernorm|post_attention_layernorm)\.weight",
    "layers/{0}/{1}/weight",
  ),
  _rules.Rule(
    _LAYER + r"self_attn\.([qkvo]_proj)\.(weight|bias)",
    "layers/{0}/self_attn/{1}/{2}",
  ),
  _rules.Rule(
    _LAYER + r"self_attn\.([qk]_norm)\.weight",
    "layers/{0}/self_attn/{1}/weight",
  ),
  _rules.Rule(
    _LAYER + r"mlp\.(gate_proj|up_proj|down_proj)\.(weight|bias)",
    "layers/{0}/mlp/{1}/{2}",
  ),
  _rules.Rule(r"(?:model\.)?norm\.weight", "norm/weight"),
  _rules.Rule(r"(?:.*\.)?rotary_emb\.inv_freq", None),
  # Of a Medusa-2 model; `read_medusa` reads them.
  _rules.Rule(r"medusa_head\..*", None),
)
UNTIED = (*RULES, _rules.Rule(r"lm_head\.weight", "lm_head/weight"))
TIED = (*RULES, _rules.Rule(r"lm_head\.weight", None))


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


def read_folder(
  folder: pathlib.Path,
  dtype: np.dtype[Any] | None,
  progress: _rules.Progress | None,
  place: _rules.Place | None = None,
) -> tuple[models.TransformerConfig, dict[Any, Any], tuple[int, ...]]:
  """Configuration, parameters and EOS ids of a Hugging Face folder."""
  config = read_folder_config(folder)
  eos = eos_of(folder)
  with _weights.Reader() as reader:
    tensors = _weights.offered(reader, folder)
    target = dtype or _rules.common_dtype(tensors)
    planned = _rules.plan(
      TIED if config.tie_word_embeddings else UNTIED,
      tensors,
      models.abstract_params(config, target),
    )
    params = _rules.execute(planned, {}, target, progress, place)
    return config, params, eos
