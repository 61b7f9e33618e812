"""Batches of windows over a corpus, as a function of the step alone."""

import functools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from ldjax.training import _corpus, _loss

_HELD_OUT = 50
"""One text in so many is never trained on."""


class Windows:
  """Texts of a corpus laid end to end, cut into windows.

  All of it is held in memory: 2 X + 9 bytes a token.

  Args:
    corpus: with at least one text.
    size: S, tokens a window.
    held_out: whether to take the texts that are kept for the report instead of
      those for training.

  Raises:
    ValueError: if there is less than one window of text.
  """

  def __init__(
    self, corpus: _corpus.Corpus, size: int, *, held_out: bool = False
  ):
    texts = [
      text
      for file in corpus.files
      for text in corpus.read(file).texts()
      if (text.name % _HELD_OUT == 0) == held_out
    ]
    self.size = size
    self.num_tokens = sum(len(text.tokens) for text in texts)
    if self.num_tokens < size:
      kind = "held out" if held_out else "to train on"
      raise ValueError(
        f"{corpus.folder} has {self.num_tokens} tokens {kind}, a window takes"
        f" {size}; make a larger corpus or a smaller window"
      )
    width = texts[0].features.shape[1]
    self._features = np.zeros((self.num_tokens, width), np.float16)
    self._tokens = np.concatenate([text.tokens for text in texts])
    self._texts = np.zeros((self.num_tokens,), np.int32)
    self._answers = np.zeros((self.num_tokens,), bool)
    begin = 0
    for number, text in enumerate(texts):
      end = begin + len(text.tokens)
      self._features[begin : end - 1] = text.features
      self._texts[begin:end] = number
      self._answers[begin + text.start : end] = True
      begin = end

  @property
  def feature_size(self) -> int:
    """X."""
    return self._features.shape[1]

  def count_answers(self, vocab_size: int) -> np.ndarray:
    """How often the target wrote each token: [V] int64."""
    return np.bincount(self._tokens[self._answers], minlength=vocab_size)

  def batches_an_epoch(self, batch: int) -> int:
    """Whole batches in one pass over the texts, at least 1."""
    # An epoch begins anywhere in the first window, so it may lose one.
    return max((self.num_tokens // self.size - 1) // batch, 1)

  def at(self, step: int, batch: int, seed: int) -> _loss.Batch:
    """The batch of a step.

    Each epoch cuts the texts at other places and takes the windows in another
    order; both follow from the seed and the step, so that training that was
    interrupted goes on with the same batches.

    Args:
      step: from 0.
      batch: B.
      seed: of the order.
    """
    epoch, index = divmod(step, self.batches_an_epoch(batch))
    draw = np.random.default_rng((seed, epoch))
    offset = int(draw.integers(min(self.size, self.num_tokens - self.size + 1)))
    windows = draw.permutation((self.num_tokens - offset) // self.size)
    chosen = np.resize(windows, (index + 1) * batch)[index * batch :]
    return self._take(offset + chosen * self.size)

  def in_order(self, batch: int) -> list[Callable[[], _loss.Batch]]:
    """Makers of the batches that cover all windows once, for a report."""
    begins = np.arange(0, self.num_tokens - self.size + 1, self.size)
    parts = [begins[i : i + batch] for i in range(0, len(begins), batch)]
    return [functools.partial(self._take, part) for part in parts]

  def _take(self, begins: np.ndarray) -> _loss.Batch:
    place = begins[:, None] + np.arange(self.size)[None]
    return _loss.Batch(
      *(
        jnp.asarray(x[place])
        for x in (self._tokens, self._features, self._texts, self._answers)
      )
    )
