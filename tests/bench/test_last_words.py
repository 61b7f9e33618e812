"""Last words, by decoding and by reading."""

import dataclasses

import numpy as np
import pytest

from ldjax import bench

# Bytes are tokens: after the letter the script says what comes.
_PASSAGES = ["say ab", "say ac", "so abd", "so bb"]


@pytest.fixture
def method(scripted, bigram):
  encode = scripted(bigram()).tokenizer.encode
  a, b, d, space = (encode(c)[-1] for c in "abd ")
  return scripted(bigram({space: a, a: b, b: d}))


def test_by_hand(method):
  # The word's own space is its first token: "y" and "o" must say it.
  space = method.tokenizer.encode(" ")[-1]
  before = [method.tokenizer.encode(c)[-1] for c in "yo"]
  logits = np.array(method.params.target["logits"])
  logits[before, space] = 20
  params = method.params._replace(
    target={**method.params.target, "logits": logits}
  )
  ready = dataclasses.replace(method, params=params)
  assert bench.last_words(ready, _PASSAGES) == [True, False, True, False]
  # And so it is when the whole text is read at once.
  context, whole = map(ready.tokenizer.encode, ("say", "say ab"))
  found = bench.read_logits(ready, whole[:-1], len(context) - 1)
  np.testing.assert_array_equal(found, logits[whole[len(context) - 1 : -1]])
  report = bench.compare_last_words({"one": ready, "two": method}, _PASSAGES)
  assert report == {
    "one": {"accuracy": 0.5, "same": 4},
    "two": {"accuracy": 0.0, "same": 2},
  }


def test_one_word(tiny):
  with pytest.raises(ValueError, match="a passage has one word, 'hello'"):
    bench.last_words(tiny, ["one two", "hello"])
