"""Writing a tokenizer as a Hugging Face folder holds it."""

import json
import os
import pathlib
from typing import Any

from ldjax.text import _tokenizer


def save_tokenizer(
  tokenizer: _tokenizer.Tokenizer, path: str | os.PathLike[str]
) -> None:
  """Writes `tokenizer.json` and `tokenizer_config.json`.

  `load_tokenizer` makes the same tokenizer of them, whatever kind of file the
  first one came from. A folder has one end-of-sequence token; where there are
  more, `generation_config.json` of the model is the place for them.

  Args:
    tokenizer: with its chat template, if it has one.
    path: an existing folder; files of the same names are replaced.

  Raises:
    FileNotFoundError: if the folder is not there.

  Example:
    >>> import pathlib, tempfile, tokenizers, ldjax
    >>> words = tokenizers.models.WordLevel({"<s>": 0, "a": 1}, "a")
    >>> one = ldjax.text.Tokenizer(
    ...   tokenizers.Tokenizer(words), add_bos=True, bos_token_id=0)
    >>> folder = tempfile.mkdtemp()
    >>> save_tokenizer(one, folder)
    >>> ldjax.text.load_tokenizer(folder).encode("a")
    [0, 1]

  Source: transformers' tokenizer files.
  """
  folder = pathlib.Path(path)
  if not folder.is_dir():
    raise FileNotFoundError(f"{folder}: no such folder")
  says: dict[str, Any] = dict(tokenizer.special)
  for name, ids in (
    ("bos_token", [tokenizer.bos_token_id]),
    ("eos_token", tokenizer.eos_token_ids[:1]),
  ):
    for number in ids:
      if number is not None:
        says[name] = tokenizer.backend.id_to_token(number)
  says["add_bos_token"] = tokenizer.add_bos
  if tokenizer.chat_template is not None:
    says["chat_template"] = tokenizer.chat_template
  text = json.dumps(says, indent=2, ensure_ascii=False) + "\n"
  (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
  tokenizer.backend.save(str(folder / "tokenizer.json"))
