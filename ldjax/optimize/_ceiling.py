"""The best speed that a cost curve allows, by how often drafts are right."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ldjax import decoding
from ldjax.optimize import _cost

RATES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
"""Acceptances a token that a table shows."""


class Ceiling(NamedTuple):
  """The best speed over plain decoding, and the size that gives it."""

  acceptance: float
  """How often the first guess for the next token is right."""
  size: int
  """T of the fastest tree; 1 if no tree pays."""
  tokens: float
  """Tokens a round that it expects."""
  speedup: float
  """Over a step of size 1, the draft's own time included."""
  free_size: int
  """The same if proposing cost nothing: T,"""
  free_tokens: float
  """tokens a round,"""
  free_speedup: float
  """and the speed over a step of size 1."""


def _best(
  curve: _cost.CostCurve, acceptance: float, tokens: Sequence[float]
) -> Ceiling:
  """The best of the sizes 1, 2, ... that bring `tokens`."""
  found: list[tuple[int, float, float]] = []
  for free in (False, True):
    speeds = []
    for size, brought in enumerate(tokens, 1):
      cost = curve.at(size)
      if free:  # and yet no less than a round without a draft
        cost = max(cost - curve.draft_at(size), curve.at(1))
      speeds.append(brought * curve.at(1) / cost)
    # The smallest among equals.
    at = int(np.argmax(speeds))
    found.append((at + 1, float(tokens[at]), speeds[at]))
  return Ceiling(acceptance, *found[0], *found[1])


def chain_ceiling(
  curve: _cost.CostCurve, rates: Sequence[float] = RATES
) -> tuple[Ceiling, ...]:
  """The best chain at each acceptance a token.

  A chain of T - 1 drafted tokens of which each is right with probability a,
  whatever came before, brings 1 + a + a^2 + ... + a^(T - 1) tokens a round.
  All sizes up to the largest measured one are tried.

  Args:
    curve: measured.
    rates: a, each from 0 to 1.

  Returns:
    One entry a rate.

  Raises:
    ValueError: for a rate that is none.

  Example:
    >>> curve = _cost.CostCurve(
    ...   sizes=(1, 2), seconds=(1.0, 1.25), draft_seconds=(0.0, 0.25),
    ...   batch=1, device="cpu", model="tiny")
    >>> [best] = chain_ceiling(curve, [0.5])
    >>> best.size, best.speedup, best.free_speedup
    (2, 1.2, 1.5)

  Source: Leviathan et al. 2023, section 3.
  """
  for rate in rates:
    if not 0 <= rate <= 1:
      raise ValueError(f"an acceptance of {rate}; give 0 to 1")
  powers = np.arange(curve.sizes[-1])
  return tuple(
    _best(curve, float(rate), np.cumsum(float(rate) ** powers).tolist())
    for rate in rates
  )


def tree_ceiling(curve: _cost.CostCurve, acceptance: Any) -> Ceiling:
  """The best static tree for acceptances by depth and rank.

  All sizes up to the largest measured one are tried, each with the tree of
  that size that brings most.

  Args:
    curve: measured.
    acceptance: [D, R], see `decoding.best_tree`.

  Returns:
    One entry, whose `acceptance` is that of the first guess at depth 1.

  Raises:
    ValueError: for acceptances that are none.

  Example:
    >>> curve = _cost.CostCurve(
    ...   sizes=(1, 3), seconds=(1.0, 1.2), draft_seconds=(0.0, 0.0),
    ...   batch=1, device="cpu", model="tiny")
    >>> tree_ceiling(curve, [[0.6, 0.2], [0.5, 0.1]]).size
    3
  """
  given = np.asarray(acceptance, np.float64)
  trees = (
    decoding.best_tree(given, size) for size in range(1, curve.sizes[-1] + 1)
  )
  tokens = [float(decoding.expected_length(tree, given)) for tree in trees]
  return _best(curve, float(given[0, 0]), tokens)
