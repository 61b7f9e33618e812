"""The last words of passages, by greedy decoding."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ldjax import _settings, assemble
from ldjax.bench import _methods


def last_words(
  method: _methods.Method, passages: Sequence[str], batch_size: int = 4
) -> list[bool]:
  """Whether greedy decoding ends each passage with its own last word.

  Every token of the word has to be the likeliest one after those before it.

  Args:
    method: a model, or another one from `make_methods`.
    passages: of two words at least; nothing is put around them.
    batch_size: how many are decoded together, B.

  Raises:
    ValueError: for a passage of one word.

  Example:
    passages = ["He put up his umbrella in the rain"]
    [right] = ldjax.bench.last_words(model, passages)

  Source: Paperno et al. 2016 (LAMBADA).
  """
  if isinstance(method, assemble.LanguageModel):
    tokenizer = method.tokenizer
  else:
    tokenizer = method.model.tokenizer
  contexts, words = [], []
  for passage in passages:
    context, space, _ = passage.rstrip().rpartition(" ")
    if not space:
      raise ValueError(f"a passage has one word, {passage!r}; give two or more")
    contexts.append(tokenizer.encode(context))
    words.append(tokenizer.encode(passage.rstrip())[len(contexts[-1]) :])
  settings = _settings.Settings(max_new_tokens=max(map(len, words)))
  ended = _methods.generate(method, contexts, settings, batch_size)
  return [
    list(run.tokens[: len(word)]) == list(word)
    for run, word in zip(ended, words, strict=True)
  ]


def compare_last_words(
  methods: Mapping[str, _methods.Method], passages: Sequence[str]
) -> dict[str, dict[str, Any]]:
  """How many last words each method gets, and where they differ.

  Args:
    methods: from `make_methods`, the baseline first.
    passages: see `last_words`.

  Returns:
    By method `accuracy` (the share of passages) and `same` (passages on which
    it is right or wrong as the first method is).
  """
  found = {name: last_words(each, passages) for name, each in methods.items()}
  first = next(iter(found.values()))
  return {
    name: {
      "accuracy": statistics.fmean(right),
      "same": sum(
        one == other for one, other in zip(right, first, strict=True)
      ),
    }
    for name, right in found.items()
  }
