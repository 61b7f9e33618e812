"""Which tokens a draft scores."""

import pathlib
from collections.abc import Callable

import numpy as np


def choose_tokens(counts: np.ndarray, size: int) -> np.ndarray:
  """The most frequent tokens, as the map of a trimmed vocabulary.

  Args:
    counts: [V], how often the target wrote each token. Among tokens that are
      equally frequent the lower id goes first, because tokenizers give the
      more common ones the lower ids.
    size: W.

  Returns:
    [W] int32, ascending.

  Raises:
    ValueError: for a size below 1 or above V.

  Example:
    >>> import numpy as np
    >>> choose_tokens(np.array([0, 5, 0, 7, 0]), 3).tolist()
    [0, 1, 3]
  """
  if not 1 <= size <= len(counts):
    raise ValueError(
      f"vocab_size is {size}; the target's vocabulary allows 1 to {len(counts)}"
    )
  best = np.lexsort((np.arange(len(counts)), -counts))[:size]
  return np.sort(best).astype(np.int32)


def inverse(token_ids: np.ndarray, vocab_size: int) -> np.ndarray:
  """Where each of the target's ids stands in the draft's vocabulary.

  Args:
    token_ids: [W] int32.
    vocab_size: V.

  Returns:
    [V] int32, -1 for ids that the draft lacks.

  Example:
    >>> inverse(np.array([0, 3], np.int32), 5).tolist()
    [0, -1, -1, 1, -1]
  """
  index = np.full((vocab_size,), -1, np.int32)
  index[token_ids] = np.arange(len(token_ids), dtype=np.int32)
  return index


def kept_tokens(
  file: pathlib.Path, choose: Callable[[], np.ndarray], *, go_on: bool
) -> np.ndarray:
  """The vocabulary that training began with, which more texts do not change.

  Args:
    file: where it is kept.
    choose: makes one.
    go_on: whether training was under way; then the file is read.

  Raises:
    ValueError: for a file that should be there and cannot be read.
  """
  if not go_on:
    token_ids = choose()
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".part")
    with partial.open("wb") as out:
      np.save(out, token_ids)
    partial.replace(file)
    return token_ids
  try:
    with file.open("rb") as raw:
      return np.load(raw, allow_pickle=False)
  except (ValueError, EOFError, OSError) as error:
    raise ValueError(
      f"{file} is not the vocabulary of the checkpoint beside it ({error});"
      " delete the checkpoint to begin anew"
    ) from error
