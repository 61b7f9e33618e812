"""Drafts on disk: config.json beside draft.safetensors, or Medusa heads."""

import dataclasses
import functools
import os
import pathlib
import re
import typing
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ldjax import models
from ldjax.checkpoints import (
  _fields,
  _published,
  _read,
  _rules,
  _safetensors,
  _token_ids,
  _write,
)

_FORMAT, _VERSION = "ldjax-draft", 1
_WEIGHTS = "draft.safetensors"
_IDS = _token_ids.NAME
_KINDS = {cls.kind: cls for cls in typing.get_args(models.DraftConfig)}
_SIZES = ("hidden_size", "vocab_size", "num_layers")


class DraftTarget(NamedTuple):
  """The model that a draft was made for.

  Args:
    name: what it calls itself.
    hidden_size: E.
    vocab_size: V.
    num_layers: L.
  """

  name: str
  hidden_size: int
  vocab_size: int
  num_layers: int


class DraftFile(NamedTuple):
  """A draft as read from a folder.

  Args:
    config: its shape.
    params: its own parameters, nested dicts; `models.borrow` adds what it
      borrows from the target.
    target: the name of the model it was made for, "" where the files don't say.
    calibration: what calibration found, as JSON; {} for a published draft.
  """

  config: models.DraftConfig
  params: dict[Any, Any]
  target: str
  calibration: dict[str, Any]


def _parse_config(raw: dict[str, Any], file: pathlib.Path) -> Any:
  cls = _KINDS.get(str(raw.get("kind")))
  if cls is None:
    raise ValueError(
      f"{file}: kind is {raw.get('kind')!r}; known are"
      f" {', '.join(sorted(_KINDS))}"
    )
  return _fields.parse(cls, _fields.section(raw, "sizes", file), "sizes", file)


def _parse_target(raw: dict[str, Any], file: pathlib.Path) -> DraftTarget:
  says = _fields.section(raw, "target", file)
  _fields.only(says, DraftTarget._fields, "target", file)
  for key, value in says.items():
    kind = str if key == "name" else int
    if type(value) is not kind:
      raise ValueError(
        f"{file}: the target's {key} is {value!r}; {_fields.word(kind)} is"
        " wanted there"
      )
  return DraftTarget(**says)


def _check_same(
  config: models.DraftConfig, target: DraftTarget, where: str
) -> None:
  vocab = config.target_vocab_size or config.vocab_size
  for key, have, want in (
    ("hidden_size", models.target_width(config), target.hidden_size),
    ("vocab_size", vocab, target.vocab_size),
  ):
    if have != want:
      raise ValueError(
        f"{where}the draft is made for a {key} of {have}, but its target's is"
        f" {want}"
      )


def _check_target(
  target: DraftTarget, config: models.TransformerConfig, folder: pathlib.Path
) -> None:
  if any(getattr(target, key) != getattr(config, key) for key in _SIZES):
    made, this = (
      ", ".join(f"{key} {getattr(x, key)}" for key in _SIZES)
      for x in (target, config)
    )
    raise ValueError(
      f"{folder}: made for {target.name!r} with {made}; this target has {this}."
      " Train a draft for this one"
    )


def _name(path: _rules.Path) -> str:
  return ".".join(str(part) for part in path)


def _read_weights(
  config: models.DraftConfig,
  file: pathlib.Path,
  dtype: np.dtype[Any] | None,
  progress: _rules.Progress | None,
  place: _rules.Place | None,
) -> dict[Any, Any]:
  if not file.is_file():
    raise FileNotFoundError(f"{file}: missing; the draft's weights are in it")
  with _safetensors.Reader() as reader:
    tensors = reader.tensors(file, (_IDS,))
    floats = [tensor for tensor in tensors if tensor.name != _IDS]
    for tensor in tensors:
      if tensor.name == _IDS and tensor.dtype != np.int32:
        raise ValueError(
          f"{file}: tensor {_IDS!r} is of type {tensor.dtype.name}; only int32"
          " can be read"
        )
    dtype = dtype or _rules.common_dtype(floats)
    abstract = models.abstract_draft(config, dtype)
    rules = [
      _rules.Rule(re.escape(_name(path)), "/".join(map(str, path)))
      for path in _rules.flatten(abstract)
    ]
    planned = _rules.plan(rules, tensors, abstract)
    added = _token_ids.read_ids(config, planned, file, place)
    params = _rules.execute(_rules.Plan(planned, {}, dtype), progress, place)
    return {**params, **added}


def read_draft(
  path: str | os.PathLike[str],
  *,
  target_config: models.TransformerConfig | None,
  dtype: Any = None,
  progress: _rules.Progress | None = None,
  place: _rules.Place | None = None,
) -> DraftFile:
  """Reads a draft strictly, and only for the model it was made for.

  Args:
    path: a folder that `write_draft` made, or one with a published draft:
      Medusa heads in any layout (see `read_medusa`), also those of a Medusa-2
      model, Hydra heads, EAGLE-1, -2 or -3, or one of `speculators`.
    target_config: of the model that is to be drafted for; None to read a draft
      that `write_draft` made for whatever model.
    dtype: float type of the parameters; None for the file's own.
    progress: called with a line of text about once a tenth of the tensors.
    place: (path, host array) -> array, what puts each parameter where it
      belongs as soon as it is read; None for the default device.

  Returns:
    `DraftFile`.

  Raises:
    FileNotFoundError: for a missing folder or file.
    ValueError: for a draft of another model, format or version, and for what
      is damaged, missing, left over or of another shape, naming it. Values
      that are not finite are warned of.

  Example:
    See `write_draft`.
  """
  folder = pathlib.Path(path)
  wanted = _read.float_dtype(dtype)
  if not folder.is_dir():
    raise FileNotFoundError(f"{folder}: no such folder")
  file = folder / "config.json"
  raw = _safetensors.read_json(file) if file.is_file() else {}
  if "format" not in raw and (raw or _published.is_there(folder)):
    if target_config is None:
      raise ValueError(
        f"{folder}: a published draft; it is read for a target, so give"
        " target_config"
      )
    return DraftFile(
      *_published.read_published(
        folder, target_config, dtype=dtype, progress=progress, place=place
      ),
      target="",
      calibration={},
    )
  if not raw:
    raise FileNotFoundError(
      f"{folder}: holds neither a draft (config.json with {_WEIGHTS}) nor"
      " one of others (medusa_lm_head.safetensors, hydra_lm_head.pt,"
      " model.safetensors)"
    )
  for key, known in (("format", _FORMAT), ("version", _VERSION)):
    if raw.get(key) != known:
      raise ValueError(
        f"{file}: {key} is {raw.get(key)!r}; this ldjax reads {known!r}"
      )
  keys = ("format", "version", "kind", "sizes", "target", "calibration")
  _fields.only(raw, keys, "it", file)
  config, target = _parse_config(raw, file), _parse_target(raw, file)
  _check_same(config, target, f"{file}: ")
  if target_config is not None:
    _check_target(target, target_config, folder)
  calibration = _fields.section(raw, "calibration", file)
  params = _read_weights(config, folder / _WEIGHTS, wanted, progress, place)
  return DraftFile(config, params, target.name, calibration)


def _stored(
  config: models.DraftConfig, params: Any, dtype: np.dtype[Any] | None
) -> dict[str, np.ndarray]:
  given = _rules.flatten(params)
  tensors = {}
  for path, like in _rules.flatten(models.abstract_draft(config)).items():
    name = _name(path)
    if path not in given:
      raise ValueError(f"params lack {name}, which the configuration has")
    array = np.asarray(given.pop(path))
    if array.shape != tuple(like.shape):
      raise ValueError(
        f"params {name} has shape {array.shape}; the configuration asks for"
        f" {tuple(like.shape)}"
      )
    if name == _IDS:
      array = models.check_token_ids(config, array)
    else:
      array = _rules.cast(array, dtype or array.dtype, name)
      _read.float_dtype(array.dtype)
      bad = _rules.count_not_finite(array)
      if bad:
        raise ValueError(
          f"params: tensor {name!r} holds {bad} values that are not finite, of"
          f" {array.size}"
        )
    tensors[name] = np.ascontiguousarray(array)
  borrowed = {("embed", "weight")}
  if config.shared_output:
    borrowed.add(("output", "weight"))
  for path in given:
    if path not in borrowed:
      raise ValueError(
        f"params hold {_name(path)}, which the configuration has not"
      )
  return tensors


def write_draft(
  path: str | os.PathLike[str],
  config: models.DraftConfig,
  params: Mapping[Any, Any],
  *,
  target: DraftTarget,
  calibration: Mapping[str, Any] | None = None,
  dtype: Any = None,
) -> None:
  """Writes a draft as `read_draft` reads it.

  Each file takes its place whole. What the draft borrows from its target is
  left out.

  Args:
    path: the folder; made if absent, and files of the same names replaced.
    config: the draft's shape.
    params: its parameters, nested dicts, with or without what is borrowed.
    target: the model that it was made for.
    calibration: what to keep with it, as JSON.
    dtype: float type to store; None for the parameters' own.

  Raises:
    ValueError: if a parameter is missing, too many, of another shape, not
      finite or too large for `dtype`, or if the target is of other sizes;
      nothing is written then.

  Example:
    >>> import jax, tempfile, ldjax
    >>> tiny = ldjax.testing.tiny_model().config
    >>> config = ldjax.models.RecurrentConfig(
    ...   depth=2, num_layers=1, target_size=24, hidden_size=16,
    ...   intermediate_size=20, vocab_size=31)
    >>> folder = tempfile.mkdtemp()
    >>> ldjax.checkpoints.write_draft(
    ...   folder, config, ldjax.models.init_draft(config, jax.random.key(0)),
    ...   target=ldjax.checkpoints.DraftTarget("tiny", 24, 31, 2))
    >>> file = ldjax.checkpoints.read_draft(folder, target_config=tiny)
    >>> file.config == config, file.target
    (True, 'tiny')
  """
  _check_same(config, target, "")
  tensors = _stored(config, params, _read.float_dtype(dtype))
  says = {
    "format": _FORMAT,
    "version": _VERSION,
    "kind": config.kind,
    "sizes": dataclasses.asdict(config),
    "target": target._asdict(),
    "calibration": dict(calibration or {}),
  }
  text = _write.json_text(says)
  write = functools.partial(
    _write.write_safetensors, sources=_write.of_arrays(tensors)
  )
  _write.write_files(
    pathlib.Path(path),
    [(_WEIGHTS, write), ("config.json", _write.text_writer(text))],
  )
