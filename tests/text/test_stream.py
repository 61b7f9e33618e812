"""Streamed pieces joined are the text decoded whole, whatever the splits."""

import hypothesis
import pytest
import tokenizers
from hypothesis import strategies
from tokenizers import decoders, models

from ldjax import text

_SETTINGS = hypothesis.settings(max_examples=50, deadline=None)


def _stream(tokenizer, ids, sizes):
  """Pushes in pieces of the given sizes; checks that nothing said changes."""
  stream = text.StreamingDetokenizer(tokenizer)
  said, start = "", 0
  whole = tokenizer.decode(ids)
  for size in [*sizes, len(ids)]:
    said += stream.push(ids[start : start + size])
    start += size
    assert whole.startswith(said)
  said += stream.flush()
  assert said == whole
  assert stream.flush() == ""
  return whole


_SIZES = strategies.lists(strategies.integers(0, 4), max_size=20)
_TEXT = strategies.one_of(
  strategies.text(max_size=30),
  strategies.text("aé数🙂\ufffd \n", max_size=30),
)


def test_byte_level(byte_level):
  ours = text.Tokenizer(byte_level)

  @_SETTINGS
  @hypothesis.given(_TEXT, _SIZES)
  def texts(sample, sizes):
    assert _stream(ours, ours.encode(sample), sizes) == sample

  @_SETTINGS
  @hypothesis.given(strategies.lists(strategies.integers(0, 425)), _SIZES)
  def any_ids(ids, sizes):
    _stream(ours, ids, sizes)

  texts()
  any_ids()


def _sentence_piece(strip=True):
  vocabulary = {"<unk>": 0, "</s>": 1}
  for byte in range(256):
    vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
  for token in ["▁", "a", "▁a", "b", "▁b", "ab", "▁▁", "数", "\ufffd"]:
    vocabulary[token] = len(vocabulary)
  backend = tokenizers.Tokenizer(
    models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True)
  )
  backend.add_special_tokens(["<unk>", "</s>"])
  steps = [
    decoders.Replace("▁", " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
  ]
  if strip:
    steps.append(decoders.Strip(" ", 1, 0))
  backend.decoder = decoders.Sequence(steps)
  return text.Tokenizer(backend)


@pytest.mark.parametrize("strip", [True, False])
def test_byte_fallback(strip):
  ours = _sentence_piece(strip)
  last = ours.vocab_size - 1

  @_SETTINGS
  @hypothesis.given(
    strategies.lists(
      # Mostly words and the bytes of "€", so that runs of bytes often fit.
      strategies.one_of(
        strategies.integers(0, last),
        strategies.integers(258, last),
        strategies.sampled_from([2 + 0xE2, 2 + 0x82, 2 + 0xAC]),
      )
    ),
    _SIZES,
  )
  def check(ids, sizes):
    _stream(ours, ids, sizes)

  check()


def test_metaspace():
  tokens = ["▁a", "b", "▁", "▁b"]
  backend = tokenizers.Tokenizer(
    models.BPE({token: i for i, token in enumerate(tokens)}, [])
  )
  backend.decoder = decoders.Metaspace()
  ours = text.Tokenizer(backend)

  @_SETTINGS
  @hypothesis.given(strategies.lists(strategies.integers(0, 3)), _SIZES)
  def check(ids, sizes):
    _stream(ours, ids, sizes)

  check()


def test_half_characters_wait(byte_level):
  ours = text.Tokenizer(byte_level)
  alphabet = {
    byte: byte_level.token_to_id(char)
    for byte, char in zip(
      [0xF0, 0x9F, 0x98, 0x80], ["ð", "Ł", "ĺ", "Ģ"], strict=True
    )
  }
  ids = list(alphabet.values())
  assert None not in ids
  stream = text.StreamingDetokenizer(ours)
  assert [stream.push([token]) for token in ids] == ["", "", "", "😀"]
  assert stream.push(ids[:2]) == ""
  assert stream.flush() == "\ufffd"
  # After a flush another text begins.
  assert stream.push(ids) + stream.flush() == "😀"


def test_a_run_of_bytes_waits_for_its_end():
  ours = _sentence_piece()
  stream = text.StreamingDetokenizer(ours)
  euro = [2 + byte for byte in "€".encode()]
  word = ours.backend.token_to_id("▁a")
  # An invalid byte would turn the whole run into U+FFFD, so nothing is certain.
  assert stream.push(euro) == ""
  assert stream.push([word]) == "€ a"
  assert stream.push([*euro, 2 + 0xFF]) == ""
  assert stream.push([word]) == "\ufffd" * 4 + " a"


def test_a_space_after_a_special_token_stays():
  ours = _sentence_piece()
  a, b = (ours.backend.token_to_id(token) for token in ("▁a", "▁b"))
  stream = text.StreamingDetokenizer(ours)
  assert [stream.push([token]) for token in (1, a, 1, b)] == ["", "a", "", " b"]


def test_unknown_decoders_are_held_back():
  # This one changes text already given: "a" "." would become "a.".
  backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, ".": 1}, "a"))
  backend.decoder = decoders.WordPiece()
  stream = text.StreamingDetokenizer(text.Tokenizer(backend))
  assert stream.push([0]) + stream.push([1]) == ""
  assert stream.flush() == "a."


def test_cost_does_not_grow_with_the_text(byte_level):
  counted = []

  class Counting(text.Tokenizer):
    def decode(self, ids):
      ids = list(ids)
      counted.append(len(ids))
      return super().decode(ids)

  for backend in (byte_level, _sentence_piece().backend):
    counted.clear()
    stream = text.StreamingDetokenizer(Counting(backend))
    for _ in range(2000):
      stream.push([backend.get_vocab_size() - 2])
    assert sum(counted) <= 3 * 2000
    counted.clear()
    for _ in range(2000):  # never a whole character
      stream.push([backend.token_to_id("<0xE2>") or 100])
    assert sum(counted) <= 3 * 2000


@pytest.mark.slow
def test_demo_tokenizer(demo_model):
  ours = text.load_tokenizer(demo_model)

  @_SETTINGS
  @hypothesis.given(_TEXT, _SIZES)
  def texts(sample, sizes):
    # Not the sample itself: this vocabulary lacks some bytes, U+0016 for one.
    _stream(ours, ours.encode(sample), sizes)

  @_SETTINGS
  @hypothesis.given(strategies.lists(strategies.integers(0, 49200)), _SIZES)
  def any_ids(ids, sizes):
    _stream(ours, ids, sizes)

  texts()
  any_ids()
