"""Drafting from the text itself: what followed an earlier repeat of its end."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from ldjax import _base, typing
from ldjax.decoding import _draft

Array = typing.Array


def _check_sizes(depth: int, max_match: int) -> None:
  for name, value in (("depth", depth), ("max_match", max_match)):
    if value < 1:
      raise ValueError(f"{name} is {value}; it must be at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NgramGuess:
  """An n-gram's chain for `dynamic_tree`, and how far to trust it.

  Args:
    depth: tokens to draft, at least 1.
    max_match: longest suffix to compare, in tokens, at least 1.
    acceptance: entry m - 1 is how often a token drafted after a match of m
      tokens is right, given that those before it were; `max_match` numbers
      from 0 to 1.

  Raises:
    ValueError: for a depth or match below 1, or acceptances that are too few,
      too many or no probabilities.

  Example:
    >>> NgramGuess(depth=3, max_match=2, acceptance=(0.25, 0.75)).depth
    3
  """

  depth: int
  max_match: int
  acceptance: tuple[float, ...]

  def __post_init__(self):
    _check_sizes(self.depth, self.max_match)
    # A list would do as well, but for its hash.
    object.__setattr__(self, "acceptance", tuple(map(float, self.acceptance)))
    if len(self.acceptance) != self.max_match:
      raise ValueError(
        f"acceptance has {len(self.acceptance)} entries; give one for each"
        f" length of a match, {self.max_match}"
      )
    for value in self.acceptance:
      if not 0 <= value <= 1:
        raise ValueError(
          f"acceptance holds {value}; it must be a probability, from 0 to 1"
        )

  def log_acceptance(self, matched: Array) -> Array:
    """Log-probability [B] float32 of one token, -inf after no match.

    Args:
      matched: [B] int32, tokens that matched.
    """
    with np.errstate(divide="ignore"):
      table = np.log(np.array([0.0, *self.acceptance], np.float32))
    return jnp.asarray(table)[matched]


def continuation(
  tokens: Array, length: Array, depth: int, max_match: int
) -> tuple[Array, Array]:
  """What followed the longest, then latest, repeat of each text's end.

  Args:
    tokens: [B, S] int32.
    length: [B] int32, tokens of each text.
    depth: D, tokens to draft.
    max_match: longest suffix to compare.

  Returns:
    Tokens [B, D] int32, -1 where nothing matched, and the length of the match
    [B] int32.
  """

  def one(tokens, length):
    place = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    matching = place < length - 1
    matched = jnp.zeros_like(place)
    for back in range(min(max_match, tokens.shape[0])):
      wanted = tokens.at[length - 1 - back].get(mode="clip")
      # roll() wraps around; entries from before the text do not count.
      matching &= (jnp.roll(tokens, back) == wanted) & (place >= back)
      matching &= length - 1 - back >= 0
      matched += matching.astype(jnp.int32)
    # Longest match first, latest among equals; neither product overflows
    # below 2**31 / max_match positions.
    score = jnp.where(matched > 0, matched * tokens.shape[0] + place, -1)
    found = jnp.argmax(score).astype(jnp.int32)
    period = jnp.maximum(length - 1 - found, 1)
    ahead = found + 1 + jnp.arange(depth, dtype=jnp.int32) % period
    drafted = tokens.at[ahead].get(mode="fill", fill_value=-1)
    return jnp.where(score[found] >= 0, drafted, -1), matched[found]

  return jax.vmap(one)(tokens, length)


def ngram(depth: int = 3, max_match: int = 4) -> _base.DraftFn:
  """Drafts what followed the longest, then latest, repeat of the text's end.

  It needs no weights and no training, and runs on the device inside the step.
  A repeat that runs into the end of the text is taken to go on repeating.

  Args:
    depth: tokens to draft, at least 1.
    max_match: longest suffix to compare, in tokens, at least 1.

  Returns:
    `DraftFn` of a chain, without a state.

  Raises:
    ValueError: for a depth or match below 1.

  Example:
    >>> import jax.numpy as jnp
    >>> from ldjax import decoding, sampling
    >>> draft = ngram(3)
    >>> context = decoding.DraftContext(
    ...   jnp.array([[5, 6, 7, 8, 5, 6, 0, 0]]), jnp.array([6]),
    ...   sampling.make_sampling(1))
    >>> candidates, _ = draft.propose((), (), context)
    >>> candidates.tokens.tolist()
    [[-1, 7, 8, 5]]

  Source: Saxena 2023, "Prompt lookup decoding"; Yang et al. 2023 (LLMA).
  """
  _check_sizes(depth, max_match)
  return _ngram(depth, max_match)


@functools.lru_cache(maxsize=64)
def _ngram(depth: int, max_match: int) -> _base.DraftFn:
  def propose(draft_params, draft_state, context):
    del draft_params
    tokens, _ = continuation(context.tokens, context.length, depth, max_match)
    parents = jnp.arange(depth, dtype=jnp.int32)
    parents = jnp.broadcast_to(parents[None], tokens.shape)
    return _draft.with_root(tokens, parents), draft_state

  return _draft.root_only()._replace(
    propose=propose, size=depth + 1, depth=depth
  )
