"""What a file or folder holds, without reading its weights."""

import collections
import dataclasses
import json
import math
import os
import pathlib
from typing import Any

import numpy as np

from ldjax import models
from ldjax.checkpoints import (
  _eagle_file,
  _gguf_file,
  _hydra_file,
  _medusa,
  _orbax,
  _read,
  _rules,
  _safetensors,
  _weights,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contents:
  """What `inspect` found.

  Args:
    path: where.
    holds: `"model"`, `"draft"`, or `"model and draft"` for a Medusa-2 folder.
    layout: `"gguf"`, `"safetensors"`, `"pytorch"`, `"orbax"`, `"ldjax"` for a
      draft of `ldjax train`, or `"config"` where there is nothing else.
    family: what the files call the kind of model or draft.
    config: the model's shape; None for a draft.
    draft: the kind of draft, `"medusa"` and so on; "" for none.
    parameters: how many numbers; of a model by its configuration.
    tensors: how many, by type; empty without weights.
    size: bytes of the weight files.
  """

  path: pathlib.Path
  holds: str
  layout: str
  family: str
  config: models.TransformerConfig | None
  draft: str
  parameters: int
  tensors: dict[str, int]
  size: int

  def rows(self) -> dict[str, str]:
    """The same as text, for a table."""
    said = {
      "holds": self.holds,
      "layout": self.layout,
      "family": self.family,
      "draft": self.draft,
      "parameters": f"{self.parameters:,}" if self.parameters else "",
      "tensors": ", ".join(f"{n} {kind}" for kind, n in self.tensors.items()),
      "bytes": f"{self.size:,}" if self.size else "",
    }
    if self.config is not None:
      default = {
        field.name: field.default for field in dataclasses.fields(self.config)
      }
      for key, value in dataclasses.asdict(self.config).items():
        if value != default[key]:
          said[key] = json.dumps(value)
    return {key: value for key, value in said.items() if value}


def _count(tree: Any) -> int:
  leaves = _rules.flatten(tree).values()
  return sum(math.prod(leaf.shape) for leaf in leaves)


def _model(
  path: pathlib.Path, layout: str, family: str, **fields: Any
) -> Contents:
  config = _read.read_config(path)
  return Contents(
    path=path,
    layout=layout,
    family=family,
    config=config,
    parameters=_count(models.abstract_params(config)),
    **{"holds": "model", "draft": "", "tensors": {}, "size": 0, **fields},
  )


def _kinds(tensors: list[Any]) -> dict[str, int]:
  return dict(collections.Counter(x.dtype.name for x in tensors))


def _holds(folder: pathlib.Path, kind: _weights.Format) -> bool:
  """Whether there are weights, and not only an index of them."""
  return _weights.is_there(folder, kind) and any(
    (folder / name).is_file() for name in _weights.named(folder, kind)
  )


def _draft_kind(folder: pathlib.Path) -> str:
  if _hydra_file.holds_hydra(folder):
    return "hydra"
  if any((folder / name).is_file() for name in _medusa.FILES):
    return "medusa"
  if not any(_holds(folder, kind) for kind in _weights.FORMATS):
    return ""
  if _eagle_file.holds_eagle(folder):
    return "eagle"
  return "medusa" if _medusa.are_heads(_weights.names(folder)) else ""


def inspect(path: str | os.PathLike[str]) -> Contents:
  """Says what a checkpoint holds, without reading its weights.

  Headers, names, shapes and configurations are read; a folder that holds a
  config.json alone is answered too.

  Args:
    path: a `.gguf` file, or a folder with a model, a draft or both.

  Returns:
    `Contents`.

  Raises:
    FileNotFoundError: for a missing file or folder, or one with nothing in it
      that is known.
    ValueError: for what is damaged or not supported, by name.

  Example:
    >>> import json, pathlib, tempfile, ldjax
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "config.json").write_text(json.dumps({
    ...   "model_type": "llama", "vocab_size": 31, "hidden_size": 24,
    ...   "intermediate_size": 40, "num_hidden_layers": 2,
    ...   "num_attention_heads": 3}))
    >>> found = ldjax.checkpoints.inspect(folder)
    >>> found.layout, found.parameters
    ('config', 11976)
  """
  path = pathlib.Path(path)
  if not path.exists():
    raise FileNotFoundError(f"{path}: no such file or folder")
  if not path.is_dir():
    config = _read.read_config(path)
    contents = _gguf_file.open_gguf(path)
    kinds = collections.Counter(info.kind.name for info in contents.tensors)
    return Contents(
      path=path,
      holds="model",
      layout="gguf",
      family=str(contents.metadata.get("general.architecture")),
      config=config,
      draft="",
      parameters=_count(models.abstract_params(config)),
      tensors=dict(kinds),
      size=path.stat().st_size,
    )
  file = path / "config.json"
  raw = _safetensors.read_json(file) if file.is_file() else {}
  family = str(raw.get("model_type", raw.get("kind", "")))
  if "format" in raw:
    return _own_draft(path, raw)
  if _orbax.is_there(path):
    size = sum(
      x.stat().st_size for x in (path / _orbax.FOLDER).rglob("*") if x.is_file()
    )
    return _model(path, "orbax", family, size=size)
  kind = _draft_kind(path)
  if kind:
    return _published(path, kind, family)
  for each in _weights.FORMATS:
    if not _holds(path, each):
      continue
    layout = "pytorch" if each.single.endswith(".bin") else "safetensors"
    size = sum(
      (path / name).stat().st_size for name in _weights.named(path, each)
    )
    both = _medusa.has_medusa_heads(path)
    with _weights.Reader() as reader:
      opened = _read.open_target(reader, path)
      tensors = [source.tensor for source in opened.plan.sources.values()]
      tensors = list({tensor.name: tensor for tensor in tensors}.values())
      return _model(
        path,
        layout,
        family,
        holds="model and draft" if both else "model",
        draft="medusa" if both else "",
        tensors=_kinds(tensors),
        size=size,
      )
  if not raw:
    raise FileNotFoundError(
      f"{path}: holds no config.json and no weights that are known"
    )
  return _model(path, "config", family)


def _own_draft(path: pathlib.Path, raw: dict[str, Any]) -> Contents:
  file = path / "draft.safetensors"
  if not file.is_file():
    raise FileNotFoundError(f"{file}: missing; the draft's weights are in it")
  with _safetensors.Reader() as reader:
    tensors = reader.tensors(file, ("token_ids",))
    return Contents(
      path=path,
      holds="draft",
      layout="ldjax",
      family=str(raw.get("kind", "")),
      config=None,
      draft=str(raw.get("kind", "")),
      parameters=_numbers(tensors),
      tensors=_kinds(tensors),
      size=file.stat().st_size,
    )


def _published(path: pathlib.Path, kind: str, family: str) -> Contents:
  names = [*_medusa.FILES, *_hydra_file.FILES]
  file = next((path / x for x in names if (path / x).is_file()), None)
  with _weights.Reader() as reader:
    if file is not None:
      tensors = reader.tensors(file, unneeded=_never_read)
      files, layout = [file], file.suffix
    else:
      tensors = _weights.offered(reader, path, unneeded=_never_read)
      files = [path / name for name in {x.file for x in tensors}]
      layout = files[0].suffix
    return Contents(
      path=path,
      holds="draft",
      layout="safetensors" if layout == ".safetensors" else "pytorch",
      family=family,
      config=None,
      draft=kind,
      parameters=_numbers(tensors),
      tensors={"tensors": len(tensors)},
      size=sum(x.stat().st_size for x in files),
    )


def _never_read(name: str) -> bool:
  del name
  return True


def _numbers(tensors: list[_rules.Tensor]) -> int:
  return sum(int(np.prod(x.shape, dtype=np.int64)) for x in tensors)
