"""Text in, text out."""

import dataclasses
import numbers
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from ldjax import _engine, _request, assemble, text, typing
from ldjax import sampling as sampling_lib

Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or a conversation of `{"role": ..., "content": ...}`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
  """What was generated for one prompt, and how it went."""

  text: str
  """Without special tokens."""
  tokens: tuple[int, ...]
  """Emitted ids; a stop id, if one ended it, is the last."""
  prompt_tokens: int
  """Tokens of the prompt, template included."""
  finish_reason: str
  """`"stop"` (an end-of-sequence id), `"length"` (`max_new_tokens` or the end
  of the cache) or `"non_finite"` (the model's logits were not finite)."""
  rounds: int
  """Passes of the target that emitted tokens, the end of prefill included."""
  tokens_per_second: float
  """Tokens after the first over the time after the first; 0 for one token."""
  time_to_first_token_s: float
  """Seconds from the start of its prefill to its first token."""
  peak_cache_bytes: int
  """Bytes of cache pages in use when it ended, all rows together."""

  @property
  def mean_accepted(self) -> float:
    """Tokens emitted over rounds: 1 for plain decoding."""
    return len(self.tokens) / self.rounds if self.rounds else 0.0


class Stream(Iterator[str]):
  """Pieces of text as they come; joined they are the whole text.

  It can be closed in the middle; the model can be used again at once. After
  the last piece `result` holds the `Generation`.
  """

  def __init__(self, pieces: Iterator[str], finished: list[Generation]):
    self._pieces = pieces
    self._finished = finished

  def __next__(self) -> str:
    return next(self._pieces)

  def close(self) -> None:
    """Stops generating."""
    self._pieces.close()  # type: ignore[attr-defined]

  @property
  def result(self) -> Generation:
    """The finished generation.

    Raises:
      RuntimeError: before the last piece was read.
    """
    if not self._finished:
      raise RuntimeError("the stream has not been read to its end")
    return self._finished[0]


def encode_prompt(
  tokenizer: text.Tokenizer, prompt: Prompt, chat: bool | None = None
) -> list[int]:
  """Turns a prompt into token ids.

  Args:
    tokenizer: the model's.
    prompt: text, token ids (taken as they are), or a conversation.
    chat: whether to put text into the chat template as a user's turn; None
      for "if the model has a template".

  Returns:
    Token ids, with exactly one BOS where the model wants one.

  Raises:
    ValueError: for a conversation or `chat=True` without a template.

  Example:
    ids = encode_prompt(model.tokenizer, "Why is the sky blue?")
  """
  if isinstance(prompt, str):
    if chat is None:
      chat = tokenizer.has_chat_template
    if not chat:
      return tokenizer.encode(prompt)
    prompt = [{"role": "user", "content": prompt}]
  entries: list[Any] = list(prompt)
  if entries and isinstance(entries[0], Mapping):
    return tokenizer.encode(tokenizer.chat(entries))
  return [int(token) for token in entries]


def _requests(
  model: assemble.LanguageModel,
  prompts: Sequence[Prompt],
  *,
  max_new_tokens: int | Sequence[int],
  temperature: float | Sequence[float | None] | None,
  top_k: int | Sequence[int | None] | None,
  top_p: float | Sequence[float | None] | None,
  seed: int | typing.Array | Sequence[int | typing.Array],
  stop_ids: Sequence[int],
  chat: bool | None,
) -> list[_request.Request]:
  settings = sampling_lib.make_sampling(
    len(prompts), temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
  )
  limits: Any = max_new_tokens
  limits = list(limits) if np.ndim(limits) else [limits] * len(prompts)
  if len(limits) != len(prompts):
    raise ValueError(
      f"max_new_tokens has {len(limits)} entries for {len(prompts)} prompts"
    )
  requests = [
    _request.make_request(
      model,
      encode_prompt(model.tokenizer, prompt, chat),
      max_new_tokens=operator.index(limit),
      sampling=settings,
      row=row,
      stop_ids=(*model.eos_token_ids, *stop_ids),
      name=f"prompt {row}" if len(prompts) > 1 else "the prompt",
    )
    for row, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
  ]
  return requests


def _generation(
  model: assemble.LanguageModel, outcome: _engine.Outcome
) -> Generation:
  return Generation(
    text=model.tokenizer.decode(list(outcome.tokens)),
    tokens=outcome.tokens,
    prompt_tokens=outcome.prompt_tokens,
    finish_reason=outcome.finish_reason,
    rounds=outcome.rounds,
    tokens_per_second=outcome.tokens_per_second,
    time_to_first_token_s=outcome.time_to_first_token_s,
    peak_cache_bytes=outcome.peak_cache_bytes,
  )


def generate(
  model: assemble.LanguageModel,
  prompts: Prompt | Sequence[Prompt],
  *,
  max_new_tokens: int | Sequence[int] = 128,
  temperature: float | Sequence[float | None] | None = None,
  top_k: int | Sequence[int | None] | None = None,
  top_p: float | Sequence[float | None] | None = None,
  seed: int | typing.Array | Sequence[int | typing.Array] = 0,
  stop_ids: Sequence[int] = (),
  chat: bool | None = None,
  batch_size: int = 8,
  progress: assemble.Progress | None = None,
) -> Any:
  """Generates text for one prompt or for a list of them.

  The text is the same with any draft, tree, batch size and order of prompts.

  Args:
    model: from `load`.
    prompts: one prompt (text, token ids, or a conversation) or a list of
      them. More prompts than `batch_size` take turns: a row that ends is
      given to the next prompt while the others go on.
    max_new_tokens: tokens to emit at most, one for all or one a prompt; the
      end of the cache (`model.max_len`) ends a sequence too.
    temperature: 0 or None is greedy. This and the following: one for all or
      one a prompt.
    top_k: how many of the most likely tokens may be drawn.
    top_p: the share of probability to draw from.
    seed: an integer or key; the same for a prompt wherever it stands.
    stop_ids: token ids that end a sequence, besides the model's own.
    chat: whether to put text into the chat template; None for "if there is
      one".
    batch_size: rows that run together at most.
    progress: called with a line of text before a long compilation.

  Returns:
    A `Generation` for one prompt, a list of them for a list.

  Raises:
    ValueError: for settings out of range, an empty prompt, or one that does
      not fit; before any work is done.

  Example:
    ldjax.generate(model, "Name three rivers.", max_new_tokens=32).text
  """
  many = _is_batch(prompts)
  requests = _requests(
    model,
    prompts if many else [prompts],  # type: ignore[arg-type, list-item]
    max_new_tokens=max_new_tokens,
    temperature=temperature,
    top_k=top_k,
    top_p=top_p,
    seed=seed,
    stop_ids=stop_ids,
    chat=chat,
  )
  results: list[Generation | None] = [None] * len(requests)
  for event in _engine.run(model, requests, batch_size, progress):
    if event.outcome is not None:
      results[event.request] = _generation(model, event.outcome)
  return results if many else results[0]


def _is_batch(prompts: Any) -> bool:
  """Whether this is a list of prompts rather than one prompt."""
  if isinstance(prompts, str):
    return False
  if hasattr(prompts, "ndim"):  # an array of ids, or one a row
    return prompts.ndim > 1
  entries = list(prompts)
  return not entries or not isinstance(entries[0], numbers.Integral | Mapping)


def stream(
  model: assemble.LanguageModel,
  prompt: Prompt,
  *,
  max_new_tokens: int = 128,
  temperature: float | None = None,
  top_k: int | None = None,
  top_p: float | None = None,
  seed: int | typing.Array = 0,
  stop_ids: Sequence[int] = (),
  chat: bool | None = None,
  progress: assemble.Progress | None = None,
) -> Stream:
  """Generates text for one prompt, piece by piece.

  Args:
    model: from `load`.
    prompt: text, token ids, or a conversation.
    max_new_tokens: see `generate`, as are the others.
    temperature: 0 or None is greedy.
    top_k: how many of the most likely tokens may be drawn.
    top_p: the share of probability to draw from.
    seed: an integer or key.
    stop_ids: token ids that end the sequence, besides the model's own.
    chat: whether to put text into the chat template.
    progress: called with a line of text before a long compilation.

  Returns:
    `Stream`, an iterator of str that never ends inside a character.

  Raises:
    ValueError: as `generate` does, at the call.

  Example:
    for piece in ldjax.stream(model, "Tell me a story."):
      print(piece, end="", flush=True)
  """
  if _is_batch(prompt):
    raise ValueError("stream takes one prompt; give a list to generate")
  requests = _requests(
    model,
    [prompt],
    max_new_tokens=max_new_tokens,
    temperature=temperature,
    top_k=top_k,
    top_p=top_p,
    seed=seed,
    stop_ids=stop_ids,
    chat=chat,
  )
  finished: list[Generation] = []

  def pieces() -> Iterator[str]:
    detokenizer = text.StreamingDetokenizer(model.tokenizer)
    for event in _engine.run(model, requests, 1, progress):
      piece = detokenizer.push(list(event.tokens))
      if event.outcome is not None:
        finished.append(_generation(model, event.outcome))
        piece += detokenizer.flush()
      if piece:
        yield piece

  return Stream(pieces(), finished)
