"""What a draft without weights would have brought on texts that are known."""

import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ldjax import decoding, sampling


class Replay(NamedTuple):
  """Rounds that were walked through without the target."""

  size: int
  """T."""
  rounds: int
  """After the prefills."""
  tokens: int
  """That they bring."""
  propose_seconds: float
  """Median of proposing a tree, as a program of its own."""

  @property
  def tokens_a_round(self) -> float:
    """0 without rounds."""
    return self.tokens / self.rounds if self.rounds else 0.0


def _walk(said: np.ndarray, parents: np.ndarray, ahead: Sequence[int]) -> int:
  """Tokens of a round: those of the tree that come true, and the bonus."""
  node, count = 0, 1
  for token in ahead[:-1]:
    [found] = np.nonzero((parents == node) & (said == token))
    if not found.size:
      break
    node, count = int(found[0]), count + 1
  return count


def replay(
  draft: decoding.DraftFn,
  texts: Sequence[tuple[Sequence[int], Sequence[int]]],
  max_len: int,
) -> Replay:
  """Walks through known texts as decoding with a draft would.

  The text does not depend on the draft, so a draft that reads nothing but the
  text can be tried without the target.

  Args:
    draft: without weights or state, such as `decoding.ngram(3)`.
    texts: token ids of prompt and answer; the first of the answer comes from
      the prefill.
    max_len: positions that a row may have.

  Returns:
    `Replay`.

  Example:
    >>> from ldjax import decoding
    >>> again = replay(decoding.ngram(3), [([1, 2, 3, 4], [1, 2, 3, 4, 1])], 16)
    >>> again.rounds, again.tokens
    (1, 4)
  """
  propose: Any = jax.jit(draft.propose)
  given = sampling.make_sampling(1)
  rounds = tokens = 0
  times: list[float] = []
  for prompt, answer in texts:
    known = [*prompt, *answer]
    row = np.zeros((1, max_len), np.int32)
    length = len(prompt) + 1
    while length < len(known):
      row[0, :length] = known[:length]
      context = decoding.DraftContext(
        jnp.asarray(row), jnp.asarray([length], jnp.int32), given
      )
      began = time.perf_counter()
      tree, _ = jax.block_until_ready(propose((), (), context))
      times.append(time.perf_counter() - began)
      count = _walk(
        np.asarray(tree.tokens)[0], np.asarray(tree.parents)[0], known[length:]
      )
      rounds, tokens, length = rounds + 1, tokens + count, length + count
  # The first one compiled.
  seconds = statistics.median(times[1:]) if len(times) > 1 else 0.0
  return Replay(draft.size, rounds, tokens, seconds)
