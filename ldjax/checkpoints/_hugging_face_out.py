"""Writing a target model as a Hugging Face folder."""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from ldjax import models
from ldjax.checkpoints import _config_json, _families, _rules, _write

# Families whose tensors are named as the parameters are here.
_DIRECT = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma")


def _described(
  kind: str, config: models.TransformerConfig, dtype: str
) -> dict[str, Any]:
  """What a config.json of one family says of a model, if it is of it."""
  says: dict[str, Any] = {
    "architectures": [_families.FAMILIES[kind].architecture],
    "model_type": kind,
    "attention_bias": config.qkv_bias,
    "head_dim": config.head_dim,
    "hidden_act": "gelu_pytorch_tanh" if kind == "gemma" else "silu",
    "hidden_size": config.hidden_size,
    "intermediate_size": config.intermediate_size,
    "max_position_embeddings": config.max_position_embeddings,
    "mlp_bias": config.mlp_bias,
    "num_attention_heads": config.num_heads,
    "num_hidden_layers": config.num_layers,
    "num_key_value_heads": config.num_kv_heads,
    "rms_norm_eps": config.rms_norm_eps,
    "rope_scaling": None,
    "rope_theta": config.rope_theta,
    "tie_word_embeddings": config.tie_word_embeddings,
    "torch_dtype": dtype,
    "vocab_size": config.vocab_size,
  }
  if isinstance(config.rope_scaling, models.RopeScaling):
    stretch = dataclasses.asdict(config.rope_scaling)
    says["rope_scaling"] = {"rope_type": "llama3", **stretch}
  sizes = {size for size in config.windows if size is not None}
  says["sliding_window"] = min(sizes) if sizes else None
  says["use_sliding_window"] = bool(sizes)
  if sizes and kind != "mistral":
    says["max_window_layers"] = 0
    says["layer_types"] = [
      "full_attention" if size is None else "sliding_attention"
      for size in config.windows
    ]
  if kind == "smollm3":
    says["no_rope_layers"] = [
      int(layer not in config.nope_layers) for layer in range(config.num_layers)
    ]
  return says


def config_of(
  config: models.TransformerConfig, dtype: np.dtype[Any]
) -> dict[str, Any]:
  """A config.json that is read to this model.

  Args:
    config: the model's shape.
    dtype: of its weights.

  Raises:
    ValueError: if none of the families describes it.
  """
  for kind in _DIRECT:
    says = _described(kind, config, dtype.name)
    try:
      if _config_json.parse_config(says, pathlib.Path("config.json")) == config:
        return says
    except ValueError:
      continue
  raise ValueError(
    "no config.json of "
    + ", ".join(_DIRECT)
    + " describes this model, and only these can be written"
  )


def name_of(path: _rules.Path) -> str:
  """What a parameter is called in the files of a direct family."""
  name = ".".join(map(str, path))
  return name if path[0] == "lm_head" else f"model.{name}"


def check_kind(kind: Any, where: pathlib.Path) -> None:
  """Raises ValueError for a model_type whose tensors have other names."""
  if kind not in _DIRECT:
    raise ValueError(
      f"{where}: model_type {kind!r} cannot be written in the Hugging Face"
      f" layout; {', '.join(_DIRECT)} can. Convert it to orbax"
    )


def write_weights(
  file: pathlib.Path,
  plan: _rules.Plan,
  parameters: Iterator[tuple[_rules.Path, np.ndarray]],
) -> None:
  """Writes all parameters to one safetensors file, a tensor at a time.

  Args:
    file: to write.
    plan: where the parameters come from.
    parameters: what `_rules.arrays` makes of it, or passes on.
  """

  def read() -> np.ndarray:
    return next(parameters)[1]

  sources = {
    name_of(path): _write.Source(_shape(plan, path), plan.dtype, read)
    for paths in plan.order
    for path in paths
  }
  _write.write_safetensors(file, sources)


def _shape(plan: _rules.Plan, path: _rules.Path) -> tuple[int, ...]:
  tensor, rule, rows = plan.sources[path]
  shape = tensor.shape[::-1] if rule.transposed else tensor.shape
  if rows is None:
    return shape
  return (rows.stop - rows.start, *shape[1:])
