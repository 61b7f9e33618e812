"""Loading a tokenizer from a Hugging Face folder or a GGUF file."""

import json
import os
import pathlib
from typing import Any

import tokenizers

from ldjax import checkpoints
from ldjax.text import _gguf, _tokenizer

_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


def _object(path: pathlib.Path) -> dict[str, Any]:
  if not path.is_file():
    return {}
  try:
    value = json.loads(path.read_text(encoding="utf-8"))
  except (UnicodeDecodeError, json.JSONDecodeError) as error:
    raise ValueError(f"{path}: not readable as JSON: {error}") from error
  if not isinstance(value, dict):
    raise ValueError(f"{path}: holds a {type(value).__name__}, not an object")
  return value


def _text(value: Any) -> str | None:
  if isinstance(value, dict):
    value = value.get("content")
  return value if isinstance(value, str) and value else None


def _template(folder: pathlib.Path, settings: dict[str, Any]) -> str | None:
  file = folder / "chat_template.jinja"
  if file.is_file():
    return file.read_text(encoding="utf-8")
  value = settings.get("chat_template")
  if isinstance(value, list):
    named = {item["name"]: item["template"] for item in value}
    value = named.get("default")
    if value is None and named:
      raise ValueError(
        f"{folder}: several chat templates ({', '.join(sorted(named))}) and"
        " none is named 'default'"
      )
  return _text(value)


def _from_folder(folder: pathlib.Path) -> _tokenizer.Tokenizer:
  file = folder / "tokenizer.json"
  if not file.is_file():
    hint = (
      "; it holds tokenizer.model: convert it with transformers'"
      " AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
      if (folder / "tokenizer.model").is_file()
      else ""
    )
    raise FileNotFoundError(f"{file}: missing{hint}")
  text = file.read_text(encoding="utf-8")
  try:
    backend = tokenizers.Tokenizer.from_str(text)
  except Exception as error:  # tokenizers raises nothing narrower
    raise ValueError(f"{file}: not a tokenizer: {error}") from error
  settings = _object(folder / "tokenizer_config.json")
  mapped = _object(folder / "special_tokens_map.json")
  special = {
    name: value
    for name in _NAMES
    if (value := _text(settings.get(name, mapped.get(name)))) is not None
  }
  ids: dict[str, int] = {}
  for name, value in special.items():
    number = backend.token_to_id(value)
    if number is None:
      raise ValueError(
        f"{folder}: {name} is {value!r}, which tokenizer.json does not know"
      )
    ids[name] = number
  bos = ids.get("bos_token")
  add_bos = settings.get("add_bos_token")
  if add_bos is None:
    # Nothing is said: the file's own post-processor tells.
    add_bos = bos is not None and backend.encode("").ids[:1] == [bos]
  eos = ids.get("eos_token")
  return _tokenizer.Tokenizer(
    backend,
    add_bos=bool(add_bos),
    bos_token_id=bos,
    eos_token_ids=() if eos is None else (eos,),
    chat_template=_template(folder, settings),
    special=special,
    name=str(folder),
  )


def load_tokenizer(path: str | os.PathLike[str]) -> _tokenizer.Tokenizer:
  """Loads a model's tokenizer and chat template.

  Args:
    path: a Hugging Face folder with `tokenizer.json` (and
      `tokenizer_config.json`, `special_tokens_map.json`,
      `chat_template.jinja` where there are), or a `.gguf` file.

  Returns:
    The tokenizer.

  Raises:
    FileNotFoundError: if the file, or the folder's `tokenizer.json`, is
      missing.
    ValueError: for what is damaged or not supported.

  Example:
    >>> import pathlib, tempfile, tokenizers, ldjax
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> words = tokenizers.models.WordLevel({"a": 0}, unk_token="a")
    >>> tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))
    >>> ldjax.text.load_tokenizer(folder).encode("a")
    [0]

  Source: transformers' tokenizer files; the GGUF specification.
  """
  path = pathlib.Path(path)
  if path.is_dir():
    return _from_folder(path)
  if not path.exists():
    raise FileNotFoundError(f"{path}: no such file or folder")
  return _gguf.from_metadata(checkpoints.read_gguf_metadata(path), path)
