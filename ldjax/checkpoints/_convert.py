"""From a checkpoint to another format, tensor by tensor, checked afterwards."""

import hashlib
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias

import numpy as np

from ldjax import models
from ldjax.checkpoints import (
  _draft,
  _hugging_face_out,
  _inspect,
  _medusa,
  _orbax,
  _read,
  _resolve,
  _rules,
  _safetensors,
  _weights,
  _write,
)

Format: TypeAlias = Literal["orbax", "hf", "ldjax", "medusa", "vllm"]
TokenizerWriter: TypeAlias = Callable[[pathlib.Path, pathlib.Path], None]
_OF_MODELS, _OF_HEADS = ("orbax", "hf"), ("medusa", "vllm")
_FORMATS = (*_OF_MODELS, "ldjax", *_OF_HEADS)
_TOKENIZER = (
  "tokenizer.json",
  "tokenizer_config.json",
  "special_tokens_map.json",
  "chat_template.jinja",
)


class _Digests:
  """What passed, so that it can be known again."""

  def __init__(self) -> None:
    self.seen: dict[_rules.Path, bytes] = {}

  def note(
    self, parameters: Iterator[tuple[_rules.Path, np.ndarray]]
  ) -> Iterator[tuple[_rules.Path, np.ndarray]]:
    for path, array in parameters:
      self.seen[path] = _digest(array)
      yield path, array

  def check(
    self, parameters: Iterator[tuple[_rules.Path, np.ndarray]], where: Any
  ) -> None:
    for path, array in parameters:
      if self.seen.pop(path, None) != _digest(array):
        raise OSError(
          f"{where}: {'.'.join(map(str, path))} reads back otherwise than it"
          " was written; the disk may be full or faulty"
        )
    if self.seen:
      raise OSError(f"{where}: {len(self.seen)} parameters do not read back")


def _digest(array: np.ndarray) -> bytes:
  flat = np.ascontiguousarray(array).reshape(-1)
  return hashlib.blake2b(flat.view(np.uint8).data, digest_size=16).digest()


def _write_tokenizer(
  source: pathlib.Path, folder: pathlib.Path, write: TokenizerWriter | None
) -> None:
  if not source.is_dir():
    if write is not None:
      write(source, folder)
    return
  for name in _TOKENIZER:
    if (source / name).is_file():
      shutil.copy(source / name, folder / name)


def _config_json(
  source: pathlib.Path, opened: _read.Opened, to: str
) -> dict[str, Any]:
  """What config.json is to say: what the source's says, if it has one."""
  dtype = opened.plan.dtype
  if not source.is_dir():
    says = _hugging_face_out.config_of(opened.config, dtype)
    eos = list(opened.eos_token_ids)
    return says | ({"eos_token_id": eos} if eos else {})
  says = _safetensors.read_json(source / "config.json")
  if to == "hf":
    says = _hugging_face_out.of_text(says)
  return says | {k: dtype.name for k in ("torch_dtype", "dtype") if k in says}


def _write_configs(
  source: pathlib.Path, folder: pathlib.Path, says: dict[str, Any]
) -> None:
  """config.json and generation_config.json."""
  generation = {k: v for k, v in says.items() if k == "eos_token_id"}
  if source.is_dir():
    file = source / "generation_config.json"
    generation = _safetensors.read_json(file) if file.is_file() else {}
  for name, value in (
    ("config.json", says),
    ("generation_config.json", generation),
  ):
    if value:
      (folder / name).write_text(_write.json_text(value), encoding="utf-8")


def _convert_model(
  source: pathlib.Path,
  target: pathlib.Path,
  to: str,
  dtype: Any,
  write: TokenizerWriter | None,
  force: bool,
  say: Callable[[str], None],
) -> None:
  with _weights.Reader() as reader:
    opened = _read.open_target(reader, source, dtype)
    config, plan = _hugging_face_out.with_offset(opened.config, opened.plan)
    opened = opened._replace(config=config, plan=plan)
    says = _config_json(source, opened, to)
    digests = _Digests()
    with _write.new_folder(target, force) as folder:
      parameters = digests.note(_rules.arrays(opened.plan, say))
      _write_configs(source, folder, says)
      _write_tokenizer(source, folder, write)
      if to == "orbax":
        _orbax.write_weights(folder, parameters, opened.plan.dtype)
      else:
        _hugging_face_out.write_weights(
          folder / _weights.FORMATS[0].single,
          says["model_type"],
          opened.config,
          opened.plan,
          parameters,
        )
      say("reading it back")
      with _weights.Reader() as again:
        written = _read.open_target(again, folder)
        if written.config != opened.config:
          raise ValueError(f"{target}: its config.json reads back otherwise")
        digests.check(_rules.arrays(written.plan, warn=False), target)


def _heads(
  source: pathlib.Path, found: _inspect.Contents, dtype: Any
) -> tuple[models.MedusaConfig, dict[Any, Any]]:
  if found.draft != "medusa":
    raise ValueError(
      f"{source}: holds {found.draft or 'no'} heads; the layouts"
      f" {' and '.join(_OF_HEADS)} are of Medusa heads, to='ldjax' takes any"
    )
  if found.layout != "ldjax":
    vocab = None if found.config is None else found.config.vocab_size
    return _medusa.read_medusa(source, vocab_size=vocab, dtype=dtype)
  file = _draft.read_draft(source, target_config=None, dtype=dtype)
  assert isinstance(file.config, models.MedusaConfig)
  return file.config, file.params


def _convert_heads(
  source: pathlib.Path,
  target: pathlib.Path,
  to: Any,
  dtype: Any,
  force: bool,
  found: _inspect.Contents,
) -> None:
  config, params = _heads(source, found, dtype)
  with _write.new_folder(target, force) as folder:
    _medusa.write_medusa(folder, config, params, layout=to)
    vocab = config.target_vocab_size or config.vocab_size
    again, same = _medusa.read_medusa(folder, vocab_size=vocab)
    _check_same(target, (config, params), (again, same))


def _check_same(target: pathlib.Path, one: Any, other: Any) -> None:
  """Compares two drafts, (configuration, parameters) each, bit by bit."""
  want, have = (
    {key: _digest(np.asarray(x)) for key, x in _rules.flatten(params).items()}
    for _, params in (one, other)
  )
  if one[0] != other[0] or want != have:
    raise OSError(f"{target}: reads back otherwise than it was written")


def _convert_draft(
  source: pathlib.Path,
  target: pathlib.Path,
  model: pathlib.Path | None,
  dtype: Any,
  force: bool,
  found: _inspect.Contents,
) -> None:
  """Writes a published draft as one of ours."""
  if not found.draft:
    raise ValueError(f"{source}: holds no draft, which to='ldjax' is for")
  if found.layout == "ldjax":
    raise ValueError(f"{source}: is a draft of ldjax's format already; copy it")
  if model is None and found.config is None:
    raise ValueError(
      f"{source}: a draft is read for the model that it was made for; name it,"
      " target=MODEL (--target)"
    )
  made_for = model or source
  config = _read.read_config(made_for)
  draft = _draft.read_draft(source, target_config=config, dtype=dtype)
  wanted = _draft.DraftTarget(
    name=_read.read_name(made_for),
    hidden_size=config.hidden_size,
    vocab_size=config.vocab_size,
    num_layers=config.num_layers,
  )
  with _write.new_folder(target, force) as folder:
    _draft.write_draft(folder, draft.config, draft.params, target=wanted)
    again = _draft.read_draft(folder, target_config=config)
    _check_same(target, draft[:2], again[:2])


def convert(
  src: str | os.PathLike[str],
  dst: str | os.PathLike[str],
  *,
  to: Format = "orbax",
  dtype: Any = None,
  target: str | os.PathLike[str] | None = None,
  write_tokenizer: TokenizerWriter | None = None,
  force: bool = False,
  progress: Callable[[str], None] | None = None,
) -> _inspect.Contents:
  """Converts a checkpoint; see `ldjax.convert`, which brings the tokenizer.

  Args:
    src: see there, as are all but `write_tokenizer`.
    dst: the folder to make.
    to: the format.
    dtype: of the weights.
    target: the model that a draft was made for.
    write_tokenizer: (source, folder) -> None, writes the tokenizer of a GGUF
      file; a folder's is copied.
    force: whether to replace what is at `dst`.
    progress: called with lines of text.

  Raises:
    FileExistsError, FileNotFoundError, OSError, ValueError: see there.
  """
  if to not in _FORMATS:
    raise ValueError(f"to is {to!r}; known are {', '.join(_FORMATS)}")
  if target is not None and to != "ldjax":
    raise ValueError(
      f"target is {os.fspath(target)!r}, but to is {to!r}; only to='ldjax' asks"
      " for which model a draft is"
    )
  say = progress or (lambda line: None)
  place = pathlib.Path(dst)
  _write.check_free(place, force)
  source = _resolve.resolve(src, progress)
  if place.exists() and place.resolve() in (
    source.resolve(),
    *source.resolve().parents,
  ):
    raise ValueError(f"{place} holds the source itself; give another place")
  found = _inspect.inspect(source)
  say(f"{source}: {found.holds}, {found.layout}, {found.parameters:,} numbers")
  if found.layout == "config":
    raise FileNotFoundError(f"{source}: holds a configuration and no weights")
  if to == "ldjax":
    model = None if target is None else _resolve.resolve(target, progress)
    _convert_draft(source, place, model, dtype, force, found)
  elif to in _OF_HEADS:
    _convert_heads(source, place, to, dtype, force, found)
  elif found.config is None:
    raise ValueError(
      f"{source}: holds a draft ({found.draft}), and {to} is a format of"
      " models; give to='ldjax', or for Medusa heads 'medusa' or 'vllm'"
    )
  else:
    _convert_model(source, place, to, dtype, write_tokenizer, force, say)
  return _inspect.inspect(place)
