"""Medusa heads as published, alone, in a Medusa-2 model, and vLLM's."""

import functools
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from ldjax import models
from ldjax.checkpoints import (
  _draft_checks,
  _read,
  _rules,
  _safetensors,
  _token_ids,
  _weights,
  _write,
)

Layout: TypeAlias = Literal["medusa", "vllm"]

FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
_MODEL = "medusa_head."
"""What the heads' tensors begin with in a Medusa-2 model."""
_IDS = ("token_map", "medusa_heads.token_map")

_PUBLISHED = (
  _rules.Rule(
    r"(?:medusa_head\.)?(\d+)\.(\d+)\.linear\.(weight|bias)",
    "heads/{0}/blocks/{1}/{2}",
  ),
  _rules.Rule(
    r"(?:medusa_head\.)?(\d+)\.\d+\.weight", "heads/{0}/lm_head/weight"
  ),
)
_VLLM = (
  _rules.Rule(
    r"(?:medusa_heads\.)?blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)",
    "heads/{0}/blocks/{1}/{2}",
  ),
  _rules.Rule(
    r"(?:medusa_heads\.)?lm_heads\.(\d+)\.weight", "heads/{0}/lm_head/weight"
  ),
  _rules.Rule(r"(?:medusa_heads\.)?lm_head\.weight", "output/weight"),
  _rules.Rule(r"(?:medusa_heads\.)?token_map", "token_ids"),
)
RULES = (*_PUBLISHED, *_VLLM)
_OUTPUT = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.weight")


class _Found(NamedTuple):
  """Heads of a folder: their tensors, and what config.json says of them."""

  tensors: list[_rules.Tensor]
  where: pathlib.Path
  says: dict[str, Any]


def is_there(folder: pathlib.Path) -> bool:
  """Whether a folder has files that may hold Medusa heads."""
  return any((folder / name).is_file() for name in FILES) or any(
    _weights.is_there(folder, kind) for kind in _weights.FORMATS
  )


def _find(reader: _weights.Reader, folder: pathlib.Path) -> _Found:
  if not folder.is_dir():
    raise FileNotFoundError(f"{folder}: no such folder")
  says: dict[str, Any] = {}
  if (folder / "config.json").is_file():
    says = _safetensors.read_json(folder / "config.json")
  for name in FILES:
    if (folder / name).is_file():
      return _Found(reader.tensors(folder / name, _IDS), folder / name, says)
  if not is_there(folder):
    raise FileNotFoundError(
      f"{folder}: no Medusa heads; {' or '.join(FILES)} is needed, or the"
      " weights of a Medusa-2 model or of vLLM's layout"
    )
  if has_medusa_heads(folder):
    tensors = _weights.offered(
      reader, folder, unneeded=lambda name: not name.startswith(_MODEL)
    )
    heads = [each for each in tensors if each.name.startswith(_MODEL)]
    return _Found(heads, folder, says)
  # vLLM's own names for the two numbers, which a model's config.json has too.
  for name, key in (
    ("num_heads", "medusa_num_heads"),
    ("num_hidden_layers", "medusa_num_layers"),
  ):
    if name in says:
      says[key] = says[name]
  return _Found(_weights.offered(reader, folder, _IDS), folder, says)


def has_medusa_heads(path: str | os.PathLike[str]) -> bool:
  """Whether a model's folder holds Medusa heads as well, by its tensors.

  Args:
    path: of a model; anything but a folder of weights holds none.

  Raises:
    ValueError: for a damaged file or index.

  Example:
    >>> import tempfile
    >>> has_medusa_heads(tempfile.mkdtemp())
    False
  """
  names = _weights.names(pathlib.Path(path))
  return any(name.startswith(_MODEL) for name in names)


def are_heads(names: list[str]) -> bool:
  """Whether these tensors are Medusa heads and nothing else."""
  return all(_rules.knows(RULES, name) for name in names)


def _whole(vocab_size: int | None, found: _Found, what: str) -> int:
  if vocab_size is None:
    raise ValueError(
      f"{found.where}: the heads {what}, so the file does not tell the"
      " vocabulary's size; pass vocab_size"
    )
  return vocab_size


def _layout(
  found: _Found, vocab_size: int | None
) -> tuple[models.MedusaConfig, list[_rules.Tensor]]:
  """The shape of the heads, and their tensors with all biases among them."""
  # The file decides: counts come from the names, widths from the shapes.
  known = [x for x in found.tensors if _rules.knows(RULES, x.name)]
  shapes = {
    path: tensor.shape for path, tensor in _rules.targets(RULES, known).items()
  }
  blocks = [(int(p[1]), int(p[3])) for p in shapes if "blocks" in p]
  outputs = {int(p[1]): s for p, s in shapes.items() if "lm_head" in p}
  weights = [s for p, s in shapes.items() if p[-1] == "weight"]
  if not weights:
    raise ValueError(
      f"{found.where}: no tensor named like '0.0.linear.weight', '0.1.weight'"
      " or 'blocks.0.layers.0.weight'; these are not Medusa heads"
    )
  num_heads = 1 + max([*outputs, *(head for head, _ in blocks)])
  num_layers = 1 + max((layer for _, layer in blocks), default=-1)
  for tensor in found.tensors:
    named = _OUTPUT.fullmatch(tensor.name)
    if named and int(named[2]) != num_layers:
      raise ValueError(
        f"{found.where}: tensor {tensor.name!r} should be the output of head"
        f" {named[1]} and be named '{named[1]}.{num_layers}.weight', after"
        f" {num_layers} layer(s)"
      )
  single = shapes.get(("output", "weight"))
  guessed = single or (outputs[min(outputs)] if outputs else None)
  vocab, target_vocab = guessed[0] if guessed else 0, None
  if guessed is None:
    vocab = _whole(vocab_size, found, "share the target's output matrix")
  elif ("token_ids",) in shapes:
    what = f"guess {vocab} tokens of a vocabulary"
    target_vocab = _whole(vocab_size, found, what)
  config = models.MedusaConfig(
    num_heads=num_heads,
    num_layers=num_layers,
    hidden_size=weights[0][-1],
    vocab_size=vocab,
    shared_output=guessed is None,
    single_output=single is not None,
    target_vocab_size=target_vocab,
  )
  return config, [*found.tensors, *_biases(shapes, config, found.tensors)]


def _biases(
  shapes: dict[_rules.Path, tuple[int, ...]],
  config: models.MedusaConfig,
  tensors: list[_rules.Tensor],
) -> list[_rules.Tensor]:
  """Zeros for blocks without bias, where no block at all has one."""
  if any(path[-1] == "bias" for path in shapes) or not config.num_layers:
    return []
  size, dtype = config.hidden_size, tensors[0].dtype
  return [
    _rules.Tensor(
      f"blocks.{head}.layers.{layer}.bias",
      tensors[0].file,
      (size,),
      dtype,
      functools.partial(np.zeros, (size,), dtype),
    )
    for head in range(config.num_heads)
    for layer in range(config.num_layers)
  ]


def read_medusa(
  path: str | os.PathLike[str],
  *,
  vocab_size: int | None = None,
  dtype: Any = None,
  progress: _rules.Progress | None = None,
  place: _rules.Place | None = None,
) -> tuple[models.MedusaConfig, dict[Any, Any]]:
  """Reads Medusa heads strictly, in any of the published layouts.

  Heads alone with an output matrix each (Medusa-1) or with the target's
  (version 2 of the file); those of a whole Medusa-2 model; vLLM's, with a
  matrix each or one for all, and with or without a map of ids. Files are
  safetensors or PyTorch's, which are read without torch.

  The numbers of heads and layers come from the tensors' names. A published
  `config.json` is known to be wrong about them; if it disagrees, the tensors
  win and a warning names both numbers.

  Args:
    path: the folder with `medusa_lm_head.safetensors` or `.pt`, or with the
      weights of a model; and, unless absent, `config.json`.
    vocab_size: V of the target; needed for heads that share its output matrix
      or guess a part of its vocabulary, when `config.json` does not say.
    dtype: float type of the parameters; None for the file's own.
    progress: called with a line of text about once a tenth of the tensors.
    place: (path, host array) -> array, what puts each parameter where it
      belongs as soon as it is read; None for the default device.

  Returns:
    The heads' configuration, and `{"heads": {i: {"blocks": {j: {"weight":
    [E, E], "bias": [E]}}, "lm_head": {"weight": [V, E]}}}}`, without
    "lm_head" when the output matrix is the target's, with one `{"output":
    {"weight": [V, E]}}` where it serves all heads, and "token_ids" [W] where
    they guess a part of the vocabulary.

  Raises:
    FileNotFoundError: for a missing folder or file.
    ValueError: for what is damaged, missing, left over or of another shape.
      Values that are not finite are warned of.

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

  Source: the published Medusa checkpoints (`FasterDecoding/medusa-vicuna-*`);
  vLLM's Medusa model.
  """
  folder = pathlib.Path(path)
  wanted = _read.float_dtype(dtype)
  with _weights.Reader() as reader:
    found = _find(reader, folder)
    config, tensors = _layout(found, vocab_size or found.says.get("vocab_size"))
    _draft_checks.warn_of_counts(
      found.says,
      folder / "config.json",
      found.where.name,
      (
        ("medusa_num_heads", config.num_heads, "heads"),
        ("medusa_num_layers", config.num_layers, "layers a head"),
      ),
    )
    floats = [tensor for tensor in tensors if tensor.name not in _IDS]
    target = wanted or _rules.common_dtype(floats)
    abstract = models.abstract_draft(config, target)
    planned = _rules.plan(RULES, tensors, abstract)
    added = _token_ids.read_ids(config, planned, found.where, place)
    params = _rules.execute(_rules.Plan(planned, {}, target), progress, place)
    return config, {**params, **added}


def _published(config: models.MedusaConfig) -> tuple[str, dict[str, Any]]:
  for field, what in (
    ("target_vocab_size", "guess a part of the vocabulary"),
    ("single_output", "share an output matrix of their own"),
  ):
    if getattr(config, field):
      raise ValueError(
        f"the heads {what} ({field} is {getattr(config, field)}), which"
        " Medusa's layout can't hold; use layout='vllm' or write_draft"
      )
  says: dict[str, Any] = {
    "medusa_num_heads": config.num_heads,
    "medusa_num_layers": config.num_layers,
    "hidden_size": config.hidden_size,
    "vocab_size": config.vocab_size,
  }
  if config.shared_output:
    says["version"] = "2"
  return FILES[0], says


def _vllm(config: models.MedusaConfig) -> tuple[str, dict[str, Any]]:
  if config.shared_output:
    raise ValueError(
      "the heads use the target's output matrix, which vLLM's layout can't"
      " hold; use layout='medusa', or write_draft"
    )
  whole = config.target_vocab_size or config.vocab_size
  says = {
    "architectures": ["MedusaModel"],
    "model_type": "medusa",
    "hidden_size": config.hidden_size,
    "num_heads": config.num_heads,
    "num_hidden_layers": config.num_layers,
    "vocab_size": whole,
    "truncated_vocab_size": config.vocab_size,
    "medusa_fc_bias": True,
    "original_lm_head": config.single_output,
  }
  return _weights.FORMATS[0].single, says


def _name(layout: Layout, config: models.MedusaConfig, key: Any) -> str:
  """What a parameter is called in a file."""
  if layout == "medusa":
    layer = f"{key[3]}.linear" if key[2] == "blocks" else config.num_layers
    return f"{key[1]}.{layer}.{key[-1]}"
  match key:
    case ("heads", head, "blocks", layer, part):
      return f"blocks.{head}.layers.{layer}.{part}"
    case ("heads", head, "lm_head", "weight"):
      return f"lm_heads.{head}.weight"
    case ("output", "weight"):
      return "lm_head.weight"
  return "token_map"


_LAYOUTS: dict[str, Callable[..., tuple[str, dict[str, Any]]]] = {
  "medusa": _published,
  "vllm": _vllm,
}


def write_medusa(
  path: str | os.PathLike[str],
  config: models.MedusaConfig,
  params: dict[Any, Any],
  *,
  layout: Layout = "medusa",
) -> None:
  """Writes Medusa heads as `read_medusa` and others read them.

  Args:
    path: the folder; made if absent, and files of the same names replaced.
    config: the heads' configuration.
    params: nested dicts of arrays as `read_medusa` returns them.
    layout: `"medusa"` for `medusa_lm_head.safetensors` as the reference code
      reads it, `"vllm"` for vLLM's `model.safetensors`.

  Raises:
    ValueError: for heads that the layout can't hold, or if a parameter is
      missing, too many or of another shape; nothing is written then.

  Example:
    See `read_medusa`.

  Source: the published Medusa checkpoints (`FasterDecoding/medusa-vicuna-*`);
  vLLM's Medusa model.
  """
  if layout not in _LAYOUTS:
    raise ValueError(
      f"layout is {layout!r}; known are {', '.join(map(repr, _LAYOUTS))}"
    )
  file, says = _LAYOUTS[layout](config)
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
    array = np.asarray(given[key])
    if key == ("token_ids",):
      array = models.check_token_ids(config, array).astype(np.int64)
    tensors[_name(layout, config, key)] = array
  write = functools.partial(
    _write.write_safetensors, sources=_write.of_arrays(tensors)
  )
  text = _write.text_writer(_write.json_text(says))
  _write.write_files(pathlib.Path(path), [(file, write), ("config.json", text)])
