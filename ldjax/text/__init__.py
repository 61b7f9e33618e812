"""Tokenizers, chat templates, and text from a stream of tokens."""

from ldjax.text._load import load_tokenizer
from ldjax.text._stream import StreamingDetokenizer
from ldjax.text._tokenizer import Tokenizer

__all__ = ["StreamingDetokenizer", "Tokenizer", "load_tokenizer"]
