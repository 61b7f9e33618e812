"""The whole state of B sequences, as one pytree."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from flax import struct

from ldjax import _base, typing
from ldjax import sampling as sampling_lib

Array = typing.Array

MAX_STOP_IDS = 16
"""Stop ids a row can have; a capacity, so that the ids are data."""


@struct.dataclass(kw_only=True)
class DecodeState:
  """Everything a step reads and writes; no shape depends on the tree."""

  cache: Any
  """A `Cache` of B rows."""
  draft: Any
  """The draft's own state."""
  tokens: Array
  """[B, S] int32, prompt and emitted tokens; anything past `length`."""
  length: Array
  """[B] int32; while a row runs, its last token is pending: emitted, its key
  and value not yet committed."""
  prompt_length: Array
  """[B] int32."""
  limit: Array
  """[B] int32, the length at which the row ends."""
  stop_ids: Array
  """[B, MAX_STOP_IDS] int32, -1 where unused."""
  sampling: sampling_lib.Sampling
  """How each row draws."""
  status: Array
  """[B] int32, see `Status`."""
  finite: Array
  """[B] bool, false if the last round met logits that are not finite."""
  needs_pages: Array
  """[B] bool, true if the last round lacked pages for the row."""
  rounds: Array
  """[B] int32, passes that drew tokens, the end of prefill included."""

  @property
  def emitted(self) -> Array:
    """[B] int32, tokens emitted so far."""
    return self.length - self.prompt_length

  @property
  def live(self) -> Array:
    """[B] bool, rows that another step would bring forward."""
    return (
      (self.status == _base.Status.RUNNING) & self.finite & ~self.needs_pages
    )


def stop_ids_row(ids: Sequence[int]) -> np.ndarray:
  """Lays out a set of stop ids.

  Args:
    ids: token ids that end a sequence, in any order.

  Returns:
    [MAX_STOP_IDS] int32.

  Raises:
    ValueError: for a negative id or more ids than fit.

  Example:
    >>> stop_ids_row([2, 7, 2])[:3].tolist()
    [2, 7, -1]
  """
  return sampling_lib.id_row(ids, MAX_STOP_IDS, "stop id")
