"""One prompt with its settings, checked before any work is done."""

import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from ldjax import _settings, assemble, decoding, text
from ldjax import sampling as sampling_lib

Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or a conversation of `{"role": ..., "content": ...}`."""


class Request(NamedTuple):
  """One prompt with its settings, checked; arrays on the host."""

  prompt: np.ndarray
  """[S] int32, zeros past its length."""
  prompt_length: int
  max_new_tokens: int
  """Cut to what the cache holds."""
  sampling: sampling_lib.Sampling
  """With scalar leaves."""
  stop_ids: np.ndarray
  """[MAX_STOP_IDS] int32."""
  settings: _settings.Settings
  tokenizer: text.Tokenizer
  name: str
  """For messages."""

  @property
  def tokens(self) -> list[int]:
    """Of the prompt."""
    return self.prompt[: self.prompt_length].tolist()


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


def is_several(prompts: Any) -> bool:
  """Whether this is a list of prompts rather than one prompt."""
  if isinstance(prompts, str):
    return False
  if hasattr(prompts, "ndim"):  # an array of ids, or one a row
    return prompts.ndim > 1
  entries = list(prompts)
  return not entries or not isinstance(entries[0], numbers.Integral | Mapping)


def make_requests(
  model: assemble.LanguageModel,
  prompt: Prompt,
  settings: _settings.Settings,
  name: str = "the prompt",
) -> list[Request]:
  """Checks a prompt against the model's limits.

  Args:
    model: what will read it.
    prompt: text, token ids, or a conversation.
    settings: `max_new_tokens` is cut to what the cache holds.
    name: of the prompt, for messages.

  Returns:
    A request for each of its samples.

  Raises:
    ValueError: naming the value, the limit and the remedy.
  """
  tokens = encode_prompt(model.tokenizer, prompt, settings.chat)
  vocab, length = model.config.vocab_size, len(tokens)
  if not length:
    raise ValueError(
      f"{name} is empty; give at least one token, for example the BOS"
    )
  if length > model.max_len:
    raise ValueError(
      f"{name} is {length} tokens long, but max_len is {model.max_len}; shorten"
      " it or load the model with a larger max_len (the model itself was made"
      f" for {model.config.max_position_embeddings})"
    )
  for kind, ids in (("token", tokens), ("banned id", settings.banned_ids)):
    for token in ids:
      if not 0 <= token < vocab:
        raise ValueError(
          f"{name} holds {kind} {token}; the model knows 0 to {vocab - 1}"
        )
  limit = min(length + settings.max_new_tokens, model.max_len)
  pages = -(-(limit - 1) // model.page_size)
  if model.num_pages is not None and pages > model.num_pages:
    raise ValueError(
      f"{name} with {limit - length} new tokens needs {pages} pages of"
      f" {model.page_size} positions, but the pool has {model.num_pages} at"
      " most; load the model with a larger num_pages or memory_budget"
    )
  padded = np.zeros((model.max_len,), np.int32)
  padded[:length] = tokens
  stop_ids = decoding.stop_ids_row((*model.eos_token_ids, *settings.stop_ids))
  return [
    Request(
      prompt=padded,
      prompt_length=length,
      max_new_tokens=limit - length,
      sampling=jax.tree.map(lambda x: x[0], settings.sampling(sample)),
      stop_ids=stop_ids,
      settings=settings,
      tokenizer=model.tokenizer,
      name=name,
    )
    for sample in range(settings.num_samples)
  ]
