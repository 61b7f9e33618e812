"""A target writes the texts that its draft learns from."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ldjax import decoding
from ldjax.training import _corpus, _rollout

_GROUP = 64
"""Conversations that share a temperature, and texts of a shard."""
_SAMPLED = 5
"""One group in so many is sampled, the others are greedy. Whole groups,
because a single sampled row makes every row of a batch pay for noise."""
_QUESTION_TOKENS = 120


class ChatFrame(NamedTuple):
  """What stands around a user's question, as token ids."""

  head: list[int]
  """Up to the place where the question begins."""
  tail: list[int]
  """From the question's end to where the answer begins."""


def _settings(name: int, seed: int, temperature: float) -> dict[str, Any]:
  sampled = name // _GROUP % _SAMPLED == _SAMPLED - 1
  return {"temperature": temperature if sampled else 0.0, "seed": seed + name}


def self_distill(
  target: decoding.TargetFn,
  target_params: Any,
  init_cache: Callable[[int], Any],
  corpus: _corpus.Corpus,
  *,
  prompts: Sequence[Sequence[int]] | None = None,
  frame: ChatFrame | None = None,
  tokens: int,
  max_len: int,
  feature_size: int,
  stop_ids: tuple[int, ...],
  max_new_tokens: int = 256,
  temperature: float = 0.8,
  seed: int = 0,
  batch: int = 32,
  on_tokens: Callable[[int], None] | None = None,
) -> int:
  """Decodes answers until the corpus holds enough of them.

  Four of five groups of answers are greedy, one is sampled. Each text is a
  function of its number and the seed, so that a run that was interrupted goes
  on with the texts that are missing; what was finished when Ctrl-C came is
  kept.

  Args:
    target: the model.
    target_params: its weights.
    init_cache: batch -> empty cache of `max_len` positions.
    corpus: where the texts go.
    prompts: token ids of each; None to let the model write its own.
    frame: needed without prompts: the model goes on from `frame.head` with a
      question, sampled, which it then answers.
    tokens: of answers that the corpus is to hold.
    max_len: tokens of a text at most.
    feature_size: X, of the target.
    stop_ids: that end a question or an answer.
    max_new_tokens: of an answer.
    temperature: of the sampled groups.
    seed: another gives other texts.
    batch: rows that run together.
    on_tokens: called with the answers' tokens so far, first and after each
      text.

  Returns:
    Tokens of answers in the corpus; fewer than asked for if the prompts ran
    out.

  Raises:
    ValueError: without prompts and frame, or for a prompt that does not fit.
  """
  if prompts is None and frame is None:
    raise ValueError(
      "give prompts, or a frame for questions of the model's own"
    )
  known, have = corpus.counts()
  if on_tokens is not None:
    on_tokens(have)
  if have >= tokens:
    return have

  def decode(jobs, limit):
    return _rollout.rollout(
      target,
      target_params,
      init_cache,
      jobs,
      max_len=max_len,
      feature_size=feature_size,
      max_new_tokens=limit,
      stop_ids=stop_ids,
      batch=batch,
    )

  def questions(names: list[int]) -> Iterator[tuple[int, list[int]]]:
    assert frame is not None
    drawn = {"temperature": 1.0, "top_p": 0.95}
    jobs = (
      _rollout.Job(name, frame.head, {**drawn, "seed": seed + name})
      for name in names
    )
    asked = sorted(decode(jobs, _QUESTION_TOKENS), key=lambda text: text.name)
    for text in asked:
      question = text.tokens[text.start : -1].tolist()
      # One that did not come to an end, or says nothing, is no question.
      if text.tokens[-1] in stop_ids and len(question) >= 3:
        yield text.name, [*frame.head, *question, *frame.tail]

  def jobs() -> Iterator[_rollout.Job]:
    for group in itertools.count():
      names = list(range(group * _GROUP, (group + 1) * _GROUP))
      if prompts is not None:
        names = [name for name in names if name < len(prompts)]
        if not names:
          return
      missing = [name for name in names if name not in known]
      if prompts is None:
        # A question that failed is missing for ever: only whole groups count.
        if len(missing) < len(names):
          continue
        pairs = questions(missing)
      else:
        pairs = ((name, list(prompts[name])) for name in missing)
      for name, prompt in pairs:
        yield _rollout.Job(name, prompt, _settings(name, seed, temperature))

  fresh: list[_rollout.Sequence] = []
  try:
    for text in decode(jobs(), max_new_tokens):
      fresh.append(text)
      have += len(text.tokens) - text.start
      if on_tokens is not None:
        on_tokens(have)
      if have >= tokens:
        break
      if len(fresh) == _GROUP:
        done, fresh = fresh, []
        corpus.write(done)
  finally:
    if fresh:
      corpus.write(fresh)
  return have
