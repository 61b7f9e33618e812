"""Writing a target model as a Hugging Face folder."""

import dataclasses
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from ldjax import models
from ldjax.checkpoints import (
  _config_json,
  _families,
  _hugging_face,
  _rules,
  _write,
)

# The keys beside the language model's own that say something about its text.
_OUTER = ("eos_token_id", "bos_token_id", "pad_token_id", "torch_dtype")


def _rope(config: models.TransformerConfig) -> dict[str, Any]:
  says: dict[str, Any] = {
    "rope_theta": config.rope_theta,
    "rope_scaling": None,
  }
  match config.rope_scaling:
    case models.RopeScaling() as stretch:
      says["rope_scaling"] = {
        "rope_type": "llama3",
        **dataclasses.asdict(stretch),
      }
    case models.LinearRopeScaling() as linear:
      says["rope_scaling"] = {"rope_type": "linear", "factor": linear.factor}
    case models.RopeFactors() as divisors:
      # Of a context that ends where the long factors would begin.
      says["original_max_position_embeddings"] = config.max_position_embeddings
      says["rope_scaling"] = {
        "type": "longrope",
        "short_factor": list(divisors.factors),
        "long_factor": list(divisors.factors),
        "attention_factor": divisors.attention_factor,
      }
  return says


def _windows(kind: str, config: models.TransformerConfig) -> dict[str, Any]:
  family = _families.FAMILIES[kind]
  sizes = {size for size in config.windows if size is not None}
  says: dict[str, Any] = {"sliding_window": min(sizes) if sizes else None}
  if family.switch:
    says |= {"use_sliding_window": bool(sizes), "max_window_layers": 0}
  if family.windows == "pattern" or (family.switch and sizes):
    windows = config.windows or (None,) * config.num_layers
    says["layer_types"] = [
      "full_attention" if size is None else "sliding_attention"
      for size in windows
    ]
  return says


def _scales(kind: str, config: models.TransformerConfig) -> dict[str, Any]:
  """What a Gemma after the first scales and caps."""
  if "query_pre_attn_scalar" not in _families.FAMILIES[kind].absent:
    return {}
  scalar: float = config.head_dim
  if config.query_scale is not None:
    scalar = config.query_scale**-2
    whole = round(scalar)
    scalar = whole if whole and whole**-0.5 == config.query_scale else scalar
  says = {
    "query_pre_attn_scalar": scalar,
    "attn_logit_softcapping": config.attn_soft_cap,
    "final_logit_softcapping": config.final_soft_cap,
  }
  if config.rope_local_theta is not None:
    says["rope_local_base_freq"] = config.rope_local_theta
  return says


def _described(
  kind: str, config: models.TransformerConfig, dtype: str
) -> dict[str, Any]:
  """What a config.json of one family says of a model, if it is of it."""
  family = _families.FAMILIES[kind]
  says: dict[str, Any] = {
    "architectures": [family.architecture],
    "model_type": kind,
    "hidden_size": config.hidden_size,
    "intermediate_size": config.intermediate_size,
    "max_position_embeddings": config.max_position_embeddings,
    "num_attention_heads": config.num_heads,
    "num_hidden_layers": config.num_layers,
    "num_key_value_heads": config.num_kv_heads,
    "rms_norm_eps": config.rms_norm_eps,
    "tie_word_embeddings": config.tie_word_embeddings,
    "torch_dtype": dtype,
    "vocab_size": config.vocab_size,
  }
  for key, known in family.activations.items():
    names = [name for name, ours in known.items() if ours == config.activation]
    if names:
      says[key] = names[-1] if kind == "gemma" else names[0]
  if not family.fixed.get("learned_positions"):
    says |= {
      "attention_bias": config.qkv_bias,
      "head_dim": config.head_dim,
      "mlp_bias": config.mlp_bias,
      **_rope(config),
      **_windows(kind, config),
      **_scales(kind, config),
    }
  if family.windows == "nope":
    says["no_rope_layers"] = [
      int(layer not in config.nope_layers) for layer in range(config.num_layers)
    ]
  return {family.names.get(key, key): value for key, value in says.items()}


def _less_one(tensor: _rules.Tensor) -> _rules.Tensor:
  """A norm that holds w, for one that holds 1 + w."""

  def read() -> np.ndarray:
    array = tensor.read()
    less = array - np.ones((), array.dtype)
    if not np.array_equal(less + np.ones((), array.dtype), array):
      raise ValueError(
        f"{tensor.file}: tensor {tensor.name!r} holds 1 + w, and there is no"
        f" such w in {array.dtype.name} that 1 + w is the same again; use the"
        " Hugging Face folder that the file was made of"
      )
    return less

  return dataclasses.replace(tensor, read=read)


def with_offset(
  config: models.TransformerConfig, plan: _rules.Plan
) -> tuple[models.TransformerConfig, _rules.Plan]:
  """The same model with norms that hold w, where those of a GGUF hold 1 + w.

  Args:
    config: the model's shape.
    plan: where its parameters come from.
  """
  if config.norm_offset != 0.0:
    return config, plan
  sources = {
    path: source._replace(tensor=_less_one(source.tensor))
    if str(path[-2]).endswith("norm")
    else source
    for path, source in plan.sources.items()
  }
  return (
    dataclasses.replace(config, norm_offset=1.0),
    plan._replace(sources=sources),
  )


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
  kinds = [kind for kind, x in _families.FAMILIES.items() if not x.nested]
  for kind in kinds:
    says = _described(kind, config, dtype.name)
    try:
      if _config_json.parse_config(says, pathlib.Path("config.json")) == config:
        return says
    except ValueError:
      continue
  raise ValueError(
    f"no config.json of {', '.join(kinds)} describes this model, and only"
    " these can be written"
  )


def of_text(says: Mapping[str, Any]) -> dict[str, Any]:
  """A config.json of the language model alone, for one that says more."""
  nested = _families.FAMILIES[says["model_type"]].nested
  if not nested:
    return dict(says)
  kind = f"{says['model_type']}_text"
  return {
    **{key: says[key] for key in _OUTER if key in says},
    **says[nested],
    "model_type": kind,
    "architectures": [_families.FAMILIES[kind].architecture],
  }


def _backwards(rule: _rules.Rule, path: str) -> tuple[str, int] | None:
  """The tensor that a rule makes a parameter of, and which part of it."""
  if rule.target is None:
    return None
  named = (rule.target,) if isinstance(rule.target, str) else rule.target
  for part, target in enumerate(named):
    pattern = re.sub(r"\{(\d)\}", r"(?P<group\1>[^/]+)", target)
    found = re.fullmatch(pattern, path)
    if found is None:
      continue
    # A pattern is a name with dots escaped, groups, and an optional prefix
    # that written files have.
    name = re.sub(r"^\(\?:(.*?)\)\?", r"\1", rule.pattern)
    for group in range(len(found.groups())):
      value = found[f"group{group}"]
      name = re.sub(r"\([^()]*\)", value, name, count=1)
    name = name.replace(r"\.", ".")
    if re.fullmatch(rule.pattern, name):
      return name, part
  return None


def tensors_of(
  rules: Iterable[_rules.Rule], paths: Iterable[_rules.Path]
) -> dict[str, tuple[list[_rules.Path], bool]]:
  """A family's table read backwards.

  Args:
    rules: the table.
    paths: of all parameters.

  Returns:
    For each tensor of a file the parameters that it holds, one below the other,
    and whether it holds them with the axes in the other order. A tensor comes
    where the last of its parameters came.

  Raises:
    ValueError: for a parameter that no rule or more than one rule gives.
  """
  rules = tuple(rules)
  parts: dict[str, dict[int, _rules.Path]] = {}
  transposed: dict[str, bool] = {}
  for path in paths:
    shown = "/".join(map(str, path))
    found = [(rule, hit) for rule in rules if (hit := _backwards(rule, shown))]
    if len(found) != 1:
      raise ValueError(
        f"{shown} is given by {len(found)} rules of the table; exactly one is"
        " needed to write it"
      )
    ((rule, (name, part)),) = found
    held = parts.pop(name, {})
    parts[name] = {**held, part: path}
    transposed[name] = rule.transposed
  return {
    name: ([held[part] for part in sorted(held)], transposed[name])
    for name, held in parts.items()
  }


def write_weights(
  file: pathlib.Path,
  kind: str,
  config: models.TransformerConfig,
  plan: _rules.Plan,
  parameters: Iterator[tuple[_rules.Path, np.ndarray]],
) -> None:
  """Writes all parameters to one safetensors file, a tensor at a time.

  Args:
    file: to write.
    kind: the model_type of its config.json.
    config: the model's shape.
    plan: where the parameters come from.
    parameters: what `_rules.arrays` makes of it, or passes on.
  """
  shapes = _rules.flatten(models.abstract_params(config))
  rules = _hugging_face.rules_of(kind, config.tie_word_embeddings)
  came: dict[_rules.Path, np.ndarray] = {}

  def source(paths: list[_rules.Path], transposed: bool) -> _write.Source:
    first = shapes[paths[0]].shape
    shape = (sum(shapes[path].shape[0] for path in paths), *first[1:])

    def read() -> np.ndarray:
      while not all(path in came for path in paths):
        path, array = next(parameters)
        came[path] = array
      pieces = [came.pop(path) for path in paths]
      whole = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
      return np.ascontiguousarray(whole.T) if transposed else whole

    return _write.Source(shape[::-1] if transposed else shape, plan.dtype, read)

  order = [path for paths in plan.order for path in paths]
  sources = {
    name: source(*held) for name, held in tensors_of(rules, order).items()
  }
  _write.write_safetensors(file, sources)
