"""One prompt with its settings, checked before any work is done."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ldjax import assemble, decoding, typing
from ldjax import sampling as sampling_lib

Array = typing.Array


class Request(NamedTuple):
  """One prompt with its settings, checked."""

  prompt: Array
  """[S] int32, zeros past its length."""
  prompt_length: int
  max_new_tokens: int
  sampling: sampling_lib.Sampling
  """With scalar leaves."""
  stop_ids: Array
  """[MAX_STOP_IDS] int32."""
  name: str
  """For messages."""


def make_request(
  model: assemble.LanguageModel,
  tokens: Sequence[int],
  *,
  max_new_tokens: int,
  sampling: sampling_lib.Sampling,
  row: int,
  stop_ids: Sequence[int],
  name: str,
) -> Request:
  """Checks a prompt against the model's limits.

  Args:
    model: what will read it.
    tokens: ids of the prompt.
    max_new_tokens: at least 0; cut to what the cache holds.
    sampling: settings of all requests.
    row: which of them is this one's.
    stop_ids: ids that end it.
    name: of the prompt, for messages.

  Raises:
    ValueError: naming the value, the limit and the remedy.
  """
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
  for token in tokens:
    if not 0 <= token < vocab:
      raise ValueError(
        f"{name} holds token {token}; the model knows 0 to {vocab - 1}"
      )
  if max_new_tokens < 0:
    raise ValueError(
      f"max_new_tokens is {max_new_tokens} for {name}; it must be at least 0"
    )
  limit = min(length + max_new_tokens, model.max_len)
  pages = -(-(limit - 1) // model.page_size)
  if model.num_pages is not None and pages > model.num_pages:
    raise ValueError(
      f"{name} with {limit - length} new tokens needs {pages} pages of"
      f" {model.page_size} positions, but the pool has {model.num_pages}; load"
      " the model with a larger num_pages"
    )
  prompt = np.zeros((model.max_len,), np.int32)
  prompt[:length] = tokens
  return Request(
    prompt=jnp.asarray(prompt),
    prompt_length=length,
    max_new_tokens=limit - length,
    sampling=jax.tree.map(lambda x: x[row], sampling),
    stop_ids=jnp.asarray(decoding.stop_ids_row(stop_ids)),
    name=name,
  )
