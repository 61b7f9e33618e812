"""Stop strings: cut at one place, however the tokens come."""

import hypothesis
import hypothesis.strategies as st
import pytest
import tokenizers

from ldjax import text


@pytest.fixture(scope="module")
def tokenizer():
  """Tokens of several characters, one that is special, and bytes."""
  words = ("a", "b", "ab", "ba", "c", "Ã", "©", "bcb")  # Ã©: the bytes of é
  vocab = {word: i for i, word in enumerate(words)}
  backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "a"))
  backend.decoder = tokenizers.decoders.ByteLevel()
  backend.add_special_tokens(["<end>"])  # 8
  return text.Tokenizer(backend)


def _run(tokenizer, tokens, stop, sizes=(), min_tokens=0):
  """All that a transcript says, and what it handed out."""
  transcript = text.Transcript(tokenizer, stop, min_tokens)
  given, start = [], 0
  for size in [*sizes, len(tokens)]:
    given.append(transcript.push(tokens[start : start + size]))
    start += size
  given.append(transcript.finish())
  assert "".join(given) == transcript.text
  assert len(transcript.tokens) == len(transcript.pieces)
  return transcript, given


@pytest.mark.parametrize(
  ("tokens", "stop", "want_tokens", "want_text"),
  [
    ([0, 1, 4], ["bc"], [0], "a"),
    ([0, 1, 4], ["c"], [0, 1], "ab"),
    ([0, 1, 4], ["abc"], [], ""),
    ([2, 4], ["bc"], [2], "a"),  # it begins inside a token, which is kept
    ([0, 7, 0], ["cb"], [0, 7], "ab"),  # ... or ends inside one
    ([0, 7, 0], ["bc", "ab"], [], ""),  # the one that begins first
    ([0, 7, 0], ["x", "bcb"], [0], "a"),
    ([0, 8, 1], ["b"], [0], "a"),  # a token without text goes as well
    ([0, 5, 6, 1], ["é"], [0], "a"),  # both halves of it
    ([0, 5, 6, 1], ["b"], [0, 5, 6], "aé"),
    ([0, 1], ["x"], [0, 1], "ab"),
    ([0, 5], ["\ufffd"], [0], "a"),  # what an end makes of half a character
    ([0, 5], [], [0, 5], "a\ufffd"),
    ([], ["a"], [], ""),
  ],
)
def test_by_hand(tokenizer, tokens, stop, want_tokens, want_text):
  transcript, _ = _run(tokenizer, tokens, stop)
  assert transcript.tokens == want_tokens
  assert transcript.text == want_text
  assert transcript.stopped == (tokenizer.decode(tokens) != want_text)


def test_what_may_begin_a_stop_string_waits(tokenizer):
  transcript = text.Transcript(tokenizer, ["abc", "bb"])
  # "a" may begin "abc"; "ab" may; "b" of "abb" completes "bb".
  pushes = [transcript.push([token]) for token in (4, 0, 0, 1, 1, 4)]
  assert pushes == ["c", "", "a", "", "a", ""]
  assert (transcript.stopped, transcript.text) == (True, "caa")


def test_stop_strings_count_after_min_tokens(tokenizer):
  for minimum, want in ((0, ""), (1, "ab"), (2, "ab"), (4, "ababc")):
    transcript, _ = _run(tokenizer, [0, 1, 0, 1, 4], ["ab"], (), minimum)
    # One that reaches back before them does not count either.
    assert transcript.text == want
    assert transcript.stopped == (minimum < 3)


_tokens = st.lists(st.integers(0, 8), max_size=14)
_stops = st.lists(st.text(alphabet="abcé", min_size=1, max_size=4), max_size=3)


@hypothesis.given(_tokens, _stops, st.lists(st.integers(0, 3), max_size=6))
def test_the_same_however_the_tokens_come(tokenizer, tokens, stop, sizes):
  whole = tokenizer.decode(tokens)
  transcript, given = _run(tokenizer, tokens, stop, sizes)
  single, _ = _run(tokenizer, tokens, stop, [1] * len(tokens))
  assert transcript.tokens == single.tokens
  assert transcript.pieces == single.pieces
  assert transcript.stopped == single.stopped
  # Against the definition: the first token at which a string is complete.
  cut = None
  for end in range(1, len(tokens) + 1):
    stable = tokenizer.decode(tokens[:end])
    if end < len(tokens):
      stable = stable.rstrip("\ufffd")
    places = [stable.find(each) for each in stop if each in stable]
    if places:
      cut = min(places)
      break
  assert transcript.stopped == (cut is not None)
  assert transcript.text == (whole if cut is None else whole[:cut])
  if cut is None:
    assert transcript.tokens == tokens
  else:
    # The fewest tokens that bring it.
    assert tokens[: len(transcript.tokens)] == transcript.tokens
    kept = tokenizer.decode(transcript.tokens)
    assert kept.startswith(transcript.text)
    if transcript.tokens:
      fewer = tokenizer.decode(transcript.tokens[:-1]).rstrip("\ufffd")
      assert len(fewer) < cut
  assert all("\ufffd" not in piece for piece in given[:-1]) or "\ufffd" in whole
