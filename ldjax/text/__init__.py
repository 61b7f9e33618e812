"""Tokenizers, chat templates, and text from a stream of tokens."""

from ldjax.text._load import load_tokenizer
from ldjax.text._save import save_tokenizer
from ldjax.text._stream import StreamingDetokenizer
from ldjax.text._token_text import token_text
from ldjax.text._tokenizer import Tokenizer
from ldjax.text._transcript import Transcript

__all__ = [
  "StreamingDetokenizer",
  "Tokenizer",
  "Transcript",
  "load_tokenizer",
  "save_tokenizer",
  "token_text",
]
