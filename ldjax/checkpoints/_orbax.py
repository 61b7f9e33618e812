"""Target models in Orbax: config.json of Hugging Face, weights by layers.

Each layer, and each matrix outside of them, is an Orbax checkpoint of its own
under `orbax/`, so that a model is written and read one layer at a time.
"""

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from ldjax import models
from ldjax.checkpoints import _hugging_face, _rules, _safetensors, _write

Restore: TypeAlias = Callable[[pathlib.Path, tuple[str, ...]], Any]

FOLDER = "orbax"
_INDEX = "ldjax-model.json"
_FORMAT, _VERSION = "ldjax-model", 1


def is_there(folder: pathlib.Path) -> bool:
  """Whether a folder is a model in this format."""
  return (folder / _INDEX).is_file()


def _group(path: _rules.Path) -> str:
  return f"layers.{path[1]}" if path[0] == "layers" else str(path[0])


def _leaf(path: _rules.Path) -> str:
  return ".".join(map(str, path[2 if path[0] == "layers" else 1 :]))


def write_weights(
  folder: pathlib.Path,
  parameters: Iterator[tuple[_rules.Path, np.ndarray]],
  dtype: np.dtype[Any],
) -> None:
  """Writes parameters as they come, and what says that they are there.

  Args:
    folder: an existing one.
    parameters: paths and arrays, each layer's one after the other.
    dtype: of them all.
  """
  import orbax.checkpoint as ocp

  groups = []
  with ocp.PyTreeCheckpointer() as checkpointer:
    for group, members in itertools.groupby(
      parameters, lambda item: _group(item[0])
    ):
      tree = {_leaf(path): array for path, array in members}
      checkpointer.save((folder / FOLDER / group).absolute(), tree)
      groups.append(group)
  says = {
    "format": _FORMAT,
    "version": _VERSION,
    "dtype": dtype.name,
    "groups": groups,
  }
  text = _write.text_writer(_write.json_text(says))
  _write.write_files(folder, [(_INDEX, text)])


def _restore(folder: pathlib.Path, names: tuple[str, ...]) -> Any:
  import orbax.checkpoint as ocp

  with ocp.PyTreeCheckpointer() as checkpointer:
    return checkpointer.restore(
      folder.absolute(),
      restore_args={
        name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names
      },
    )


def _read(
  restore: Restore, folder: pathlib.Path, names: tuple[str, ...], name: str
) -> np.ndarray:
  try:
    return np.asarray(restore(folder, names)[name])
  # Orbax and its stores raise what they like for damaged files.
  except Exception as error:
    raise ValueError(
      f"{folder}: {name} cannot be restored ({type(error).__name__}:"
      f" {error:.200}); it is damaged, convert the model again"
    ) from error


def _stored(name: Any, file: pathlib.Path) -> np.dtype[Any]:
  if name not in ("float32", "bfloat16", "float16"):
    raise ValueError(f"{file}: dtype is {name!r}, which is no type of weights")
  return np.dtype(jnp.dtype(name))


def open_folder(
  folder: pathlib.Path, dtype: np.dtype[Any] | None
) -> tuple[models.TransformerConfig, _rules.Plan, tuple[int, ...]]:
  """Configuration, plan and EOS ids of a model in this format.

  Raises:
    FileNotFoundError: for a missing config.json.
    ValueError: for another format or version, or layers that are not there.
  """
  file = folder / _INDEX
  says = _safetensors.read_json(file)
  for key, known in (("format", _FORMAT), ("version", _VERSION)):
    if says.get(key) != known:
      raise ValueError(
        f"{file}: {key} is {says.get(key)!r}; this ldjax reads {known!r}"
      )
  config = _hugging_face.read_folder_config(folder)
  stored = _stored(says.get("dtype"), file)
  shapes = _rules.flatten(models.abstract_params(config, stored))
  leaves: dict[str, list[str]] = {}
  for path in shapes:
    leaves.setdefault(_group(path), []).append(_leaf(path))
  for group in leaves:
    if not (folder / FOLDER / group).is_dir():
      raise ValueError(
        f"{folder / FOLDER / group}: missing, and config.json asks for it;"
        " convert the model again"
      )
  # A layer's parameters are read one after the other.
  restore = functools.lru_cache(maxsize=1)(_restore)
  sources = {}
  for path, like in shapes.items():
    where = folder / FOLDER / _group(path)
    names = tuple(leaves[_group(path)])
    tensor = _rules.Tensor(
      ".".join(map(str, path)),
      str(where),
      tuple(like.shape),
      stored,
      functools.partial(_read, restore, where, names, _leaf(path)),
    )
    rule = _rules.Rule(tensor.name, "/".join(map(str, path)))
    sources[path] = _rules.Source(_checked(tensor), rule, None)
  eos = _hugging_face.eos_of(folder)
  return config, _rules.Plan(sources, {}, dtype or stored), eos


def _checked(tensor: _rules.Tensor) -> _rules.Tensor:
  def read() -> np.ndarray:
    array = tensor.read()
    if array.shape != tensor.shape or array.dtype != tensor.dtype:
      raise ValueError(
        f"{tensor.file}: {tensor.name} is {array.dtype.name} of shape"
        f" {array.shape}; {tensor.dtype.name} of shape {tensor.shape} is wanted"
      )
    return array

  return dataclasses.replace(tensor, read=read)
