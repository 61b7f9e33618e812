"""Hydra heads as published: hydra_lm_head.pt beside config.json."""

import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from ldjax import models
from ldjax.checkpoints import (
  _draft_checks,
  _read,
  _rules,
  _safetensors,
  _weights,
)

FILES = ("hydra_lm_head.safetensors", "hydra_lm_head.pt")

RULES = (
  _rules.Rule(
    r"hydra_mlp\.(\d+)\.0\.(linear|res_connection)\.(weight|bias)",
    "heads/{0}/blocks/0/{1}/{2}",
  ),
  _rules.Rule(
    r"hydra_mlp\.(\d+)\.([1-9]\d*)\.linear\.(weight|bias)",
    "heads/{0}/blocks/{1}/{2}",
  ),
  _rules.Rule(r"hydra_lm_head\.(\d+)\.(weight|bias)", "heads/{0}/lm_head/{1}"),
)

# What is supported of the keys that mean another computation.
_SUPPORTED = {
  "hydra_head_arch": "mlp",
  "grounded_heads": True,
  "hidden_state_offset": 0,
}


def holds_hydra(folder: pathlib.Path) -> bool:
  """Whether a folder holds heads for `read_hydra`."""
  return any((folder / name).is_file() for name in FILES)


def _check_config(says: Mapping[str, Any], file: pathlib.Path) -> None:
  for key, supported in _SUPPORTED.items():
    value = says.get(key, supported)
    if value != supported or type(value) is not type(supported):
      raise ValueError(
        f"{file}: {key} {value!r} is not supported; only {supported!r} is"
      )


def _layout(
  tensors: Iterable[_rules.Tensor], file: pathlib.Path
) -> models.HydraMlpConfig:
  # The file decides: counts come from the names, widths from the shapes.
  found = _rules.targets(RULES, tensors)
  blocks = {path[1:4:2] for path in found if path[2] == "blocks"}
  outputs = {path[1]: x for path, x in found.items() if path[2] == "lm_head"}
  if not blocks or not outputs:
    raise ValueError(
      f"{file}: no tensor named like 'hydra_mlp.0.0.linear.weight' or none like"
      " 'hydra_lm_head.0.weight'; these are not Hydra heads"
    )
  if not any(path[-2] == "res_connection" for path in found):
    raise ValueError(
      f"{file}: no tensor named like 'hydra_mlp.0.0.res_connection.weight';"
      " these heads do not see the drafted tokens (grounded_heads false), which"
      " is not supported"
    )
  output = found.get(("heads", 0, "lm_head", "weight"))
  if output is None or len(output.shape) != 2:
    shape = "missing" if output is None else output.shape
    raise ValueError(
      f"{file}: tensor 'hydra_lm_head.0.weight' is {shape}; a matrix of the"
      " vocabulary by the hidden size is needed"
    )
  heads = max(int(head) for head in (*outputs, *(x for x, _ in blocks)))
  return models.HydraMlpConfig(
    num_heads=1 + heads,
    num_layers=1 + max(int(layer) for _, layer in blocks),
    hidden_size=output.shape[1],
    vocab_size=output.shape[0],
    output_bias=any(path[2:] == ("lm_head", "bias") for path in found),
  )


def read_hydra(
  folder: pathlib.Path,
  target_config: models.TransformerConfig,
  dtype: Any = None,
  progress: _rules.Progress | None = None,
  place: _rules.Place | None = None,
) -> tuple[models.HydraMlpConfig, dict[Any, Any]]:
  """Reads published Hydra heads of the architecture "mlp" strictly.

  The numbers of heads and layers come from the tensors' names; if config.json
  disagrees, a warning names both numbers.

  Args:
    folder: with hydra_lm_head.safetensors or hydra_lm_head.pt and, unless
      absent, config.json.
    target_config: of the model that is to be drafted for.
    dtype: float type of the parameters; None for the file's own.
    progress: called with a line of text about once a tenth of the tensors.
    place: (path, host array) -> array, what puts each parameter where it
      belongs as soon as it is read; None for the default device.

  Returns:
    The heads' configuration and their parameters.

  Raises:
    FileNotFoundError: for a missing folder or file.
    ValueError: for heads of another model or architecture, and for what is
      damaged, missing, left over or of another shape, naming it.

  Source: the reference code (`zankner/Hydra`, hydra_heads/mlp_head.py).
  """
  wanted = _read.float_dtype(dtype)
  if not holds_hydra(folder):
    raise FileNotFoundError(
      f"{folder}: holds neither {FILES[0]} nor {FILES[1]}; Hydra heads are read"
      " from one of them"
    )
  file = next(folder / x for x in FILES if (folder / x).is_file())
  says: dict[str, Any] = {}
  if (folder / "config.json").is_file():
    says = _safetensors.read_json(folder / "config.json")
  _check_config(says, folder / "config.json")
  with _weights.Reader() as reader:
    tensors = reader.tensors(file)
    config = _layout(tensors, file)
    _draft_checks.warn_of_counts(
      says,
      folder / "config.json",
      file.name,
      (
        ("hydra_num_heads", config.num_heads, "heads"),
        ("hydra_num_layers", config.num_layers, "layers a head"),
      ),
    )
    _draft_checks.check_made_for(
      folder,
      (
        ("hidden_size", config.hidden_size, target_config.hidden_size),
        ("vocab_size", config.vocab_size, target_config.vocab_size),
      ),
    )
    planned = _rules.plan(RULES, tensors, models.abstract_draft(config))
    target = wanted or _rules.common_dtype(tensors)
    return config, _rules.execute(
      _rules.Plan(planned, {}, target), progress, place
    )
