"""Reading a target model, whatever kind of file it is in."""

import os
import pathlib
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ldjax import models
from ldjax.checkpoints import (
  _gguf,
  _gguf_file,
  _hugging_face,
  _orbax,
  _rules,
  _weights,
)

_FLOATS = ("float32", "bfloat16", "float16")


class Checkpoint(NamedTuple):
  """A target model as read from a file or a folder.

  Args:
    config: the model's shape.
    params: nested dicts of arrays, linear weights `[out, in]`.
    eos_token_ids: every id that ends a text.
    name: what the model calls itself.
  """

  config: models.TransformerConfig
  params: dict[Any, Any]
  eos_token_ids: tuple[int, ...]
  name: str


class Opened(NamedTuple):
  """A target model whose weights are still in their files.

  Args:
    config: the model's shape.
    plan: where each parameter comes from.
    eos_token_ids: every id that ends a text.
    name: what the model calls itself.
  """

  config: models.TransformerConfig
  plan: _rules.Plan
  eos_token_ids: tuple[int, ...]
  name: str


def float_dtype(dtype: Any) -> np.dtype[Any] | None:
  """A float type weights can have, None for None.

  Raises:
    ValueError: naming a type that is none of the three.
  """
  if dtype is None:
    return None
  try:
    result = np.dtype(jnp.dtype(dtype))
  except TypeError as error:
    raise ValueError(
      f"dtype {dtype!r} is not a type; use one of {', '.join(_FLOATS)}"
    ) from error
  if result.name not in _FLOATS:
    raise ValueError(
      f"dtype {result.name} cannot hold weights; use one of"
      f" {', '.join(_FLOATS)}"
    )
  return result


def is_gguf(path: pathlib.Path) -> bool:
  """Whether a file is meant to be GGUF, by its first bytes or its name."""
  if path.suffix == ".gguf":
    return True
  with open(path, "rb") as file:
    return file.read(4) == b"GGUF"


def _kind(path: pathlib.Path) -> str:
  if path.is_dir():
    if not (path / "config.json").is_file():
      inside = sorted(item.name for item in path.glob("*.gguf"))
      if inside:
        raise ValueError(
          f"{path}: holds {', '.join(inside)} and no config.json; name the"
          " .gguf file itself"
        )
    return "folder"
  if not path.exists():
    raise FileNotFoundError(
      f"{path}: no such file or folder; a model is a .gguf file or a Hugging"
      " Face folder with config.json and safetensors"
    )
  if is_gguf(path):
    return "gguf"
  raise ValueError(
    f"{path}: not a GGUF file; for safetensors name the folder that holds"
    " config.json"
  )


def _folder_name(path: pathlib.Path) -> str:
  # A Hugging Face cache keeps org/name as models--org--name/snapshots/COMMIT.
  path = path.absolute()
  owner = path.parent.parent.name
  if path.parent.name == "snapshots" and owner.startswith("models--"):
    return owner.removeprefix("models--").replace("--", "/", 1)
  return path.name


def read_name(path: pathlib.Path) -> str:
  """What a target model calls itself, without its weights."""
  if _kind(path) == "gguf":
    return _gguf.name_of(_gguf_file.open_gguf(path))
  return _folder_name(path)


def open_target(
  reader: _weights.Reader, path: str | os.PathLike[str], dtype: Any = None
) -> Opened:
  """Opens a target model and checks all but the values of its weights.

  Args:
    reader: keeps the files open.
    path: see `read`, as is `dtype`.
    dtype: of the parameters.

  Raises:
    FileNotFoundError: for a missing file, shard or folder.
    ValueError: for what is damaged, does not fit or is not supported.
  """
  path = pathlib.Path(path)
  wanted = float_dtype(dtype)
  if _kind(path) == "gguf":
    return Opened(*_gguf.open_file(path, wanted))
  if _orbax.is_there(path):
    return Opened(*_orbax.open_folder(path, wanted), _folder_name(path))
  opened = _hugging_face.open_folder(reader, path, wanted)
  return Opened(*opened, _folder_name(path))


def read(
  path: str | os.PathLike[str],
  dtype: Any = None,
  progress: _rules.Progress | None = None,
  place: _rules.Place | None = None,
) -> Checkpoint:
  """Reads a target model strictly: every parameter once, nothing left over.

  Configuration, tensor names, shapes and types are checked before the first
  weight is read. A tensor with values that are not finite is warned of by name.

  Args:
    path: a `.gguf` file; a Hugging Face folder with `config.json` and
      `model.safetensors`, `pytorch_model.bin` or shards of either by their
      index; or a folder that `ldjax.convert` wrote.
    dtype: float type of the parameters; None for the files' own (the narrowest
      that holds all tensors without loss), float32 for GGUF.
    progress: called with a line of text about once a tenth of the tensors.
    place: (path, host array) -> array, what puts each parameter where it
      belongs as soon as it is read; None for the default device.

  Returns:
    Configuration, parameters, EOS ids and name.

  Raises:
    FileNotFoundError: for a missing file, shard or folder.
    ValueError: for what is damaged, does not fit or is not supported.

  Example:
    >>> import ldjax
    >>> ldjax.checkpoints.read("nowhere.gguf")
    Traceback (most recent call last):
    ...
    FileNotFoundError: nowhere.gguf: no such file or folder; a model is a \
.gguf file or a Hugging Face folder with config.json and safetensors

  Source: the GGUF specification; the safetensors format; the key names of
  transformers' Llama, Mistral, Qwen2, Qwen3, SmolLM3, Gemma 1 to 3, Phi-3 and
  GPT-2.
  """
  with _weights.Reader() as reader:
    opened = open_target(reader, path, dtype)
    params = _rules.execute(opened.plan, progress, place)
    return Checkpoint(opened.config, params, opened.eos_token_ids, opened.name)


def read_config(path: str | os.PathLike[str]) -> models.TransformerConfig:
  """Reads only the configuration of a target model.

  Args:
    path: as for `read`.

  Returns:
    The model's shape.

  Raises:
    FileNotFoundError: for a missing file or folder.
    ValueError: for what is damaged or not supported.

  Example:
    >>> import json, pathlib, tempfile, ldjax
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "config.json").write_text(json.dumps({
    ...   "model_type": "llama", "vocab_size": 31, "hidden_size": 24,
    ...   "intermediate_size": 40, "num_hidden_layers": 2,
    ...   "num_attention_heads": 3}))
    >>> ldjax.checkpoints.read_config(folder).head_dim
    8

  Source: transformers' configuration classes; the GGUF specification.
  """
  path = pathlib.Path(path)
  if _kind(path) == "folder":
    return _hugging_face.read_folder_config(path)
  return _gguf.parse_config(_gguf_file.open_gguf(path))
