"""Medusa heads as published: medusa_lm_head.safetensors beside config.json."""

import json
import os
import pathlib
import warnings
from typing import Any

import numpy as np
import safetensors.numpy

from ldjax import models
from ldjax.checkpoints import _read, _rules, _safetensors

FILE = "medusa_lm_head.safetensors"

RULES = (
  _rules.Rule(
    r"(\d+)\.(\d+)\.linear\.(weight|bias)", "heads/{0}/blocks/{1}/{2}"
  ),
  _rules.Rule(r"(\d+)\.\d+\.weight", "heads/{0}/lm_head/weight"),
)


def _layout(
  tensors: list[_rules.Tensor], vocab_size: int | None, file: pathlib.Path
) -> models.MedusaConfig:
  # The file decides: counts come from the names, widths from the shapes.
  blocks: set[tuple[int, int]] = set()
  outputs: dict[int, tuple[int, _rules.Tensor]] = {}
  hidden: int | None = None
  for tensor in tensors:
    parts = tensor.name.split(".")
    digits = [part.isdecimal() for part in parts[:2]]
    if digits == [True, True] and parts[2:] == ["weight"]:
      outputs[int(parts[0])] = int(parts[1]), tensor
      hidden = hidden or tensor.shape[-1]
    elif digits == [True, True] and parts[2:] == ["linear", "weight"]:
      blocks.add((int(parts[0]), int(parts[1])))
      hidden = tensor.shape[-1]
  if hidden is None:
    raise ValueError(
      f"{file}: no tensor named like '0.0.linear.weight' or '0.1.weight'; these"
      " are not Medusa heads"
    )
  num_heads = 1 + max([*outputs, *(head for head, _ in blocks)])
  num_layers = 1 + max((layer for _, layer in blocks), default=-1)
  for head, (index, tensor) in outputs.items():
    if index != num_layers:
      raise ValueError(
        f"{file}: tensor {tensor.name!r} should be the output of head {head}"
        f" and be named '{head}.{num_layers}.weight', after {num_layers}"
        " layer(s)"
      )
  if outputs:
    vocab_size = outputs[min(outputs)][1].shape[0]
  if vocab_size is None:
    raise ValueError(
      f"{file}: the heads share the target's output matrix, so the file does"
      " not tell the vocabulary's size; pass vocab_size"
    )
  return models.MedusaConfig(
    num_heads=num_heads,
    num_layers=num_layers,
    hidden_size=hidden,
    vocab_size=vocab_size,
    shared_output=not outputs,
  )


def _folder_file(folder: pathlib.Path) -> pathlib.Path:
  if not folder.is_dir():
    raise FileNotFoundError(f"{folder}: no such folder")
  file = folder / FILE
  if file.is_file():
    return file
  if (folder / "medusa_lm_head.pt").is_file():
    raise ValueError(
      f"{folder / 'medusa_lm_head.pt'}: PyTorch pickles are not read; convert"
      " it where torch is installed: safetensors.torch.save_file(torch.load("
      f"'medusa_lm_head.pt', weights_only=True), '{FILE}')"
    )
  raise FileNotFoundError(f"{file}: missing; Medusa heads are read from it")


def read_medusa(
  path: str | os.PathLike[str],
  *,
  vocab_size: int | None = None,
  dtype: Any = None,
  progress: _rules.Progress | None = None,
  place: _rules.Place | None = None,
) -> tuple[models.MedusaConfig, dict[Any, Any]]:
  """Reads Medusa heads strictly, in the Medusa-1 or the shared layout.

  The numbers of heads and layers come from the tensors' names. A published
  `config.json` is known to be wrong about them; if it disagrees, the tensors
  win and a warning names both numbers.

  Args:
    path: the folder with `medusa_lm_head.safetensors` and, unless absent,
      `config.json`.
    vocab_size: V of the target; needed for heads that share its output matrix
      when `config.json` does not say.
    dtype: float type of the parameters; None for the file's own.
    progress: called with a line of text about once a tenth of the tensors.
    place: (path, host array) -> array, what puts each parameter where it
      belongs as soon as it is read; None for the default device.

  Returns:
    The heads' configuration, and `{"heads": {i: {"blocks": {j: {"weight":
    [E, E], "bias": [E]}}, "lm_head": {"weight": [V, E]}}}}`, without
    "lm_head" when the output matrix is the target's.

  Raises:
    FileNotFoundError: for a missing folder or file.
    ValueError: for what is damaged, missing, left over or of another shape.

  Example:
    >>> import tempfile, jax.numpy as jnp, ldjax
    >>> config = ldjax.models.MedusaConfig(
    ...   num_heads=1, num_layers=1, hidden_size=2, vocab_size=3,
    ...   shared_output=True)
    >>> block = {"weight": jnp.zeros((2, 2)), "bias": jnp.zeros(2)}
    >>> folder = tempfile.mkdtemp()
    >>> ldjax.checkpoints.write_medusa(
    ...   folder, config, {"heads": {0: {"blocks": {0: block}}}})
    >>> ldjax.checkpoints.read_medusa(folder)[0] == config
    True

  Source: the published Medusa checkpoints (`FasterDecoding/medusa-vicuna-*`).
  """
  folder = pathlib.Path(path)
  wanted = _read.float_dtype(dtype)
  file = _folder_file(folder)
  says: dict[str, Any] = {}
  if (folder / "config.json").is_file():
    says = _safetensors.read_json(folder / "config.json")
  with _safetensors.Reader() as reader:
    tensors = reader.tensors(file)
    config = _layout(tensors, vocab_size or says.get("vocab_size"), file)
    for key, number, what in (
      ("medusa_num_heads", config.num_heads, "heads"),
      ("medusa_num_layers", config.num_layers, "layers a head"),
    ):
      if says.get(key, number) != number:
        warnings.warn(
          f"{folder / 'config.json'}: {key} is {says[key]}, but {FILE} holds"
          f" {number} {what}; using the {number} of the file",
          stacklevel=2,
        )
    target = wanted or _rules.common_dtype(tensors)
    abstract = models.abstract_draft(config, target)
    planned = _rules.plan(RULES, tensors, abstract)
    params = _rules.execute(planned, {}, target, progress, place)
    return config, params


def write_medusa(
  path: str | os.PathLike[str],
  config: models.MedusaConfig,
  params: dict[Any, Any],
) -> None:
  """Writes Medusa heads as `read_medusa` and the reference code read them.

  Args:
    path: the folder; made if absent, and files of the same names replaced.
    config: the heads' configuration.
    params: nested dicts of arrays as `read_medusa` returns them.

  Raises:
    ValueError: for heads of a trimmed vocabulary, which the layout can't hold,
      or if a parameter is missing, too many or of another shape; nothing is
      written then.

  Example:
    See `read_medusa`.

  Source: the published Medusa checkpoints (`FasterDecoding/medusa-vicuna-*`).
  """
  if config.target_vocab_size is not None:
    raise ValueError(
      f"the heads guess {config.vocab_size} of {config.target_vocab_size}"
      " tokens, and Medusa's layout has no map of ids; use write_draft"
    )
  given = _rules.flatten(params)
  wanted = _rules.flatten(models.abstract_draft(config))
  tensors: dict[str, np.ndarray] = {}
  for key in (*wanted, *given):
    name = ".".join(str(part) for part in key)
    if key not in given:
      raise ValueError(f"params lack {name}, which the configuration has")
    if key not in wanted:
      raise ValueError(f"params hold {name}, which the configuration has not")
    if tuple(given[key].shape) != tuple(wanted[key].shape):
      raise ValueError(
        f"params {name} has shape {tuple(given[key].shape)}; the configuration"
        f" asks for {tuple(wanted[key].shape)}"
      )
    layer = f"{key[3]}.linear" if key[2] == "blocks" else config.num_layers
    tensors[f"{key[1]}.{layer}.{key[-1]}"] = np.ascontiguousarray(given[key])
  folder = pathlib.Path(path)
  folder.mkdir(parents=True, exist_ok=True)
  says: dict[str, Any] = {
    "medusa_num_heads": config.num_heads,
    "medusa_num_layers": config.num_layers,
    "hidden_size": config.hidden_size,
    "vocab_size": config.vocab_size,
  }
  if config.shared_output:
    says["version"] = "2"
  partial = folder / f"{FILE}.part"
  try:
    safetensors.numpy.save_file(tensors, partial)
    partial.replace(folder / FILE)
  finally:
    partial.unlink(missing_ok=True)
  text = json.dumps(says, indent=2) + "\n"
  (folder / "config.json").write_text(text, encoding="utf-8")
