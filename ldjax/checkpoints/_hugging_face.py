"""Target models in Hugging Face folders: config.json and safetensors."""

import pathlib
from typing import Any

import numpy as np

from ldjax import models
from ldjax.checkpoints import _rules, _safetensors

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
    _LAYER + r"mlp\.(gate_proj|up_proj|down_proj)\.(weight|bias)",
    "layers/{0}/mlp/{1}/{2}",
  ),
  _rules.Rule(r"(?:model\.)?norm\.weight", "norm/weight"),
  _rules.Rule(r"(?:.*\.)?rotary_emb\.inv_freq", None),
)
UNTIED = (*RULES, _rules.Rule(r"lm_head\.weight", "lm_head/weight"))
TIED = (*RULES, _rules.Rule(r"lm_head\.weight", None))

_REQUIRED = (
  "vocab_size",
  "hidden_size",
  "intermediate_size",
  "num_hidden_layers",
  "num_attention_heads",
)


def _rope(
  raw: dict[str, Any], file: pathlib.Path
) -> tuple[float, models.RopeScaling | None]:
  # transformers 5 moved the base into `rope_parameters`; 4 has `rope_theta`
  # beside `rope_scaling`, whose kind is `rope_type` or, older, `type`.
  settings = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
  if not isinstance(settings, dict):
    raise ValueError(f"{file}: rope settings are {settings!r}, not an object")
  if any(isinstance(value, dict) for value in settings.values()):
    raise ValueError(
      f"{file}: rope_parameters differ by layer type ({', '.join(settings)});"
      " one set for all layers is supported"
    )
  theta = settings.get("rope_theta", raw.get("rope_theta"))
  theta = 10000.0 if theta is None else theta
  if isinstance(theta, bool) or not isinstance(theta, int | float):
    raise ValueError(f"{file}: rope_theta is {theta!r}, not a number")
  partial = settings.get(
    "partial_rotary_factor", raw.get("partial_rotary_factor")
  )
  if partial not in (None, 1, 1.0):
    raise ValueError(
      f"{file}: partial_rotary_factor {partial} is not supported; only 1"
    )
  if raw.get("rope_interleaved"):
    raise ValueError(f"{file}: rope_interleaved true is not supported")
  kind = settings.get("rope_type", settings.get("type", "default"))
  if kind == "default":
    return float(theta), None
  if kind != "llama3":
    raise ValueError(
      f"{file}: rope_type {kind!r} is not supported; 'default' and 'llama3' are"
    )
  values = {}
  for key in (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
  ):
    value = settings.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
      raise ValueError(
        f"{file}: rope_type 'llama3' needs a number for {key!r}, found"
        f" {value!r}"
      )
    values[key] = value
  return float(theta), models.RopeScaling(
    factor=float(values["factor"]),
    low_freq_factor=float(values["low_freq_factor"]),
    high_freq_factor=float(values["high_freq_factor"]),
    original_max_position_embeddings=int(
      values["original_max_position_embeddings"]
    ),
  )


def parse_config(
  raw: dict[str, Any], file: pathlib.Path
) -> models.TransformerConfig:
  """A configuration from a config.json, or a refusal by name.

  Args:
    raw: the JSON object, of transformers 4 or 5.
    file: where it was, for messages.

  Returns:
    The configuration.

  Raises:
    ValueError: for what is missing, malformed or not supported.
  """
  kind = raw.get("model_type")
  if kind != "llama":
    named = repr(kind) if kind is not None else "missing"
    raise ValueError(
      f"{file}: model_type is {named}; supported: 'llama' (architectures:"
      f" {raw.get('architectures')})"
    )
  if raw.get("quantization_config") is not None:
    method = raw["quantization_config"]
    if isinstance(method, dict):
      method = method.get("quant_method", method)
    raise ValueError(
      f"{file}: quantization_config ({method}) is not supported; use the"
      " unquantised model, or a GGUF file"
    )
  act = raw.get("hidden_act", "silu")
  if act not in ("silu", "swish"):
    raise ValueError(f"{file}: hidden_act {act!r} is not supported; only silu")

  def integer(key: str, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int):
      found = "missing" if value is None else repr(value)
      raise ValueError(f"{file}: {key} is {found}; an integer is needed")
    return value

  def flag(key: str) -> bool:
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
      raise ValueError(f"{file}: {key} is {value!r}; true or false is needed")
    return bool(value)

  sizes = {key: integer(key) for key in _REQUIRED}
  heads = sizes["num_attention_heads"]
  if raw.get("head_dim") is None and (
    heads < 1 or sizes["hidden_size"] % heads
  ):
    raise ValueError(
      f"{file}: hidden_size {sizes['hidden_size']} is not a multiple of"
      f" num_attention_heads {heads}, and head_dim is not given"
    )
  eps = raw.get("rms_norm_eps", 1e-6)
  if isinstance(eps, bool) or not isinstance(eps, int | float):
    raise ValueError(f"{file}: rms_norm_eps is {eps!r}, not a number")
  theta, scaling = _rope(raw, file)
  try:
    return models.TransformerConfig(
      vocab_size=sizes["vocab_size"],
      hidden_size=sizes["hidden_size"],
      intermediate_size=sizes["intermediate_size"],
      num_layers=sizes["num_hidden_layers"],
      num_heads=heads,
      num_kv_heads=integer("num_key_value_heads", heads),
      head_dim=integer("head_dim", sizes["hidden_size"] // heads),
      max_position_embeddings=integer("max_position_embeddings", 2048),
      rope_theta=theta,
      rope_scaling=scaling,
      rms_norm_eps=float(eps),
      tie_word_embeddings=flag("tie_word_embeddings"),
      attention_bias=flag("attention_bias"),
      mlp_bias=flag("mlp_bias"),
    )
  except ValueError as error:
    raise ValueError(f"{file}: {error}") from error


def read_folder_config(folder: pathlib.Path) -> models.TransformerConfig:
  """The configuration of a Hugging Face folder."""
  file = folder / "config.json"
  if not file.is_file():
    raise FileNotFoundError(
      f"{file}: missing; a Hugging Face folder needs config.json and"
      " model.safetensors"
    )
  return parse_config(_safetensors.read_json(file), file)


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
) -> tuple[models.TransformerConfig, dict[Any, Any], tuple[int, ...]]:
  """Configuration, parameters and EOS ids of a Hugging Face folder."""
  config = read_folder_config(folder)
  eos = eos_of(folder)
  files, index = _safetensors.locate(folder)
  with _safetensors.Reader() as reader:
    tensors = [tensor for file in files for tensor in reader.tensors(file)]
    if index:
      _safetensors.check_index(
        tensors, index, folder / "model.safetensors.index.json"
      )
    target = dtype or _rules.common_dtype(tensors)
    planned = _rules.plan(
      TIED if config.tie_word_embeddings else UNTIED,
      tensors,
      models.abstract_params(config, target),
    )
    return config, _rules.execute(planned, {}, target, progress), eos
