"""The text of one token, with tokenizers worked by hand."""

import pytest
import tokenizers

from ldjax import text


def test_byte_level(byte_level):
  tokenizer = text.Tokenizer(byte_level)
  for word in (" cat", "ß", "\n", "数独", "🙂", "x"):
    ids = tokenizer.encode(word)
    shown = "".join(text.token_text(tokenizer, token) for token in ids)
    if len(ids) == 1 or "⟨" not in shown:
      assert shown == word
    else:
      spelt = bytes.fromhex(shown.replace("⟨", "").replace("⟩", ""))
      assert spelt == word.encode()
  assert text.token_text(tokenizer, byte_level.token_to_id("</s>")) == "</s>"
  assert text.token_text(tokenizer, 99999) == "⟨id 99999⟩"
  with pytest.raises(ValueError, match="token id -1 is negative"):
    text.token_text(tokenizer, -1)


def test_half_a_character_beside_a_whole_one():
  # "a" and the first two of three bytes of U+2581.
  tokens = {"aâĸ": 0, "ģ": 1}
  backend = tokenizers.Tokenizer(tokenizers.models.BPE(tokens, []))
  backend.decoder = tokenizers.decoders.ByteLevel()
  tokenizer = text.Tokenizer(backend)
  assert text.token_text(tokenizer, 0) == "a⟨e2 96⟩"
  assert text.token_text(tokenizer, 1) == "⟨81⟩"
  assert tokenizer.decode([0, 1]) == "a▁"


def test_sentencepiece_style():
  tokens = {"▁the": 0, "re": 1, "<0x0A>": 2, "<0xE2>": 3, "▁": 4}
  backend = tokenizers.Tokenizer(tokenizers.models.BPE(tokens, []))
  decoders = tokenizers.decoders
  backend.decoder = decoders.Sequence(
    [
      decoders.Replace("▁", " "),
      decoders.ByteFallback(),
      decoders.Fuse(),
      decoders.Strip(" ", 1, 0),
    ]
  )
  tokenizer = text.Tokenizer(backend)
  shown = [text.token_text(tokenizer, token) for token in range(5)]
  assert shown == [" the", "re", "\n", "⟨e2⟩", " "]


def test_words():
  tokens = {"a": 0, "b": 1}
  backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(tokens, "a"))
  assert text.token_text(text.Tokenizer(backend), 1) == " b"
