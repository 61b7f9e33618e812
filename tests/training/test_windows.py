"""Batches: every place right, a function of the step alone."""

import numpy as np
import pytest

from ldjax import training


@pytest.fixture(scope="module")
def windows(corpus):
  return training.Windows(corpus, 16)


def test_windows_hold_what_the_corpus_holds(corpus, windows):
  texts = [t for f in corpus.files for t in corpus.read(f).texts()]
  by_name = {text.name: text for text in texts}
  kept = [text for text in texts if text.name % 50]
  assert windows.num_tokens == sum(len(text.tokens) for text in kept)
  stream = [
    (text.name, place) for text in kept for place in range(len(text.tokens))
  ]
  begins = {
    tuple(text.tokens[:4].tolist()) for text in kept
  }  # prompts differ, so that places can be told
  assert len(begins) > 100
  batch = windows.at(3, 5, seed=1)
  # Find each window in the stream by its tokens, and compare all else.
  everything = np.concatenate([text.tokens for text in kept])
  views = np.lib.stride_tricks.sliding_window_view(everything, 16)
  for row in range(5):
    places = np.flatnonzero((views == np.asarray(batch.tokens[row])).all(1))
    assert places.size
    matches = 0
    for place in places:
      want = [stream[place + i] for i in range(16)]
      answers = [at >= by_name[name].start for name, at in want]
      last = [at == len(by_name[name].tokens) - 1 for name, at in want]
      features = np.stack(
        [
          np.zeros(24, np.float16) if end else by_name[name].features[at]
          for (name, at), end in zip(want, last, strict=True)
        ]
      )
      matches += (
        np.array_equal(answers, batch.answers[row])
        and np.array_equal(features, batch.features[row])
        and np.array_equal(
          np.diff([name for name, _ in want]) != 0,
          np.diff(np.asarray(batch.texts[row])) != 0,
        )
      )
    assert matches


def test_held_out_texts_are_the_others(corpus, windows):
  held = training.Windows(corpus, 16, held_out=True)
  texts = [t for f in corpus.files for t in corpus.read(f).texts()]
  assert held.num_tokens + windows.num_tokens == sum(
    len(text.tokens) for text in texts
  )
  assert held.num_tokens == sum(
    len(text.tokens) for text in texts if text.name in (0, 50, 100)
  )


def test_a_batch_follows_from_its_step(corpus, windows):
  again = training.Windows(corpus, 16)
  for step in (0, 7, 500):
    for one, other in zip(
      windows.at(step, 4, 3), again.at(step, 4, 3), strict=True
    ):
      np.testing.assert_array_equal(one, other)
  first, second = (np.asarray(windows.at(s, 4, 3).tokens) for s in (0, 1))
  assert not np.array_equal(first, second)
  other = np.asarray(windows.at(0, 4, seed=4).tokens)
  assert not np.array_equal(first, other)


def test_an_epoch_takes_each_window_once(windows):
  count = windows.batches_an_epoch(4)
  seen = np.concatenate(
    [np.asarray(windows.at(step, 4, 0).features) for step in range(count)]
  )
  distinct = np.unique(seen.reshape(len(seen), -1), axis=0)
  assert len(distinct) == 4 * count
  assert 4 * count * 16 > windows.num_tokens - 5 * 16


def test_in_order_covers_everything(windows):
  total = sum(part().tokens.size for part in windows.in_order(7))
  assert total == windows.num_tokens // 16 * 16


def test_batch_larger_than_the_corpus(windows):
  batch = windows.at(2, 1000, 0)
  assert batch.tokens.shape == (1000, 16)


def test_too_little_text(corpus):
  with pytest.raises(ValueError, match="to train on, a window takes 100000"):
    training.Windows(corpus, 100000)


def test_counts(corpus, windows):
  counts = windows.count_answers(31)
  texts = [t for f in corpus.files for t in corpus.read(f).texts()]
  want = np.zeros(31, int)
  for text in texts:
    if text.name % 50:
      np.add.at(want, text.tokens[text.start :], 1)
  np.testing.assert_array_equal(counts, want)
