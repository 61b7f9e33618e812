"""Tokenizers built here, small enough to work by hand."""

import pathlib
from typing import Any

import gguf
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

_CORPUS = [
  "the cat sat on the mat, and the dog's bone was theirs; it isn't 12345.",
  "für größere Häuser brauchen wir mehr Straße",
  "数独は楽しい。数独は数独です。",
  "emoji 🙂🙂🙃 and 👩‍👩‍👧 families\n\n\ttabs\r\nlines",
]


@pytest.fixture(scope="session")
def byte_level() -> tokenizers.Tokenizer:
  """A byte-level BPE trained on a few lines, with two special tokens."""
  backend = tokenizers.Tokenizer(models.BPE())
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = decoders.ByteLevel()
  backend.train_from_iterator(
    _CORPUS,
    trainers.BpeTrainer(
      vocab_size=420,
      show_progress=False,
      special_tokens=["<s>", "</s>"],
      initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    ),
  )
  return backend


@pytest.fixture
def write_gguf(tmp_path):
  """Writes a GGUF file that holds nothing but a tokenizer."""

  def write(model: str, tokens: list[str], **fields: Any) -> pathlib.Path:
    path = tmp_path / "tokenizer.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    for key, value in fields.items():
      getattr(writer, f"add_{key}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

  return write
