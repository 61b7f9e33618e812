"""The best tree of a size, from how often guesses were right."""

import heapq

import numpy as np

from ldjax.decoding import _tree


def _checked(acceptance: np.ndarray) -> np.ndarray:
  """The probabilities as float64 [D, R]."""
  rates = np.asarray(acceptance, np.float64)
  if rates.ndim != 2 or not rates.size:
    raise ValueError(
      f"acceptance has shape {rates.shape}; give [D, R], a row a depth and a"
      " column a rank"
    )
  wrong = ~((rates >= 0) & (rates <= 1))  # NaN included
  if wrong.any():
    depth, rank = np.argwhere(wrong)[0]
    raise ValueError(
      f"acceptance[{depth}, {rank}] is {rates[depth, rank]}; it must be a"
      " probability, from 0 to 1"
    )
  total = rates.sum(axis=1)
  # The guesses at a node are different tokens, of which one at most is right.
  if total.max() > 1 + 1e-4:
    depth = int(total.argmax())
    raise ValueError(
      f"acceptance[{depth}] sums to {total[depth]}; the ranks of a depth"
      " exclude each other, so it can be at most 1"
    )
  return rates


def best_tree(
  acceptance: np.ndarray, size: int, max_depth: int | None = None
) -> _tree.TokenTree:
  """Finds the tree of a size that brings the most tokens a round.

  A node is accepted as often as the product of the rates along its path says,
  and brings one token then. A child never brings more than its parent, so
  taking the best node that stands on the tree, again and again, is optimal.

  Args:
    acceptance: [D, R], how often the guess of rank r at depth d + 1 is the
      target's token, given that its parent was accepted.
    size: T, nodes with the root.
    max_depth: the deepest a node may stand; default D.

  Returns:
    A tree of `size` nodes; fewer where all others would never be accepted.

  Raises:
    ValueError: for a size below 1, a negative depth, or rates that are no
      probabilities or sum to more than 1 at a depth.

  Example:
    >>> import numpy as np
    >>> best_tree(np.array([[0.6, 0.2], [0.5, 0.1]]), 4).paths
    ((0,), (1,), (0, 0))

  Source: Cai et al. 2024 (Medusa), section 3.3; Chen et al. 2024 (Sequoia).
  """
  rates = _checked(acceptance)
  if size < 1:
    raise ValueError(f"size is {size}; the root alone is 1")
  if max_depth is not None and max_depth < 0:
    raise ValueError(f"max_depth is {max_depth}; it must be at least 0")
  deepest = len(rates) if max_depth is None else min(max_depth, len(rates))
  # Of equals the shallower one is taken, then the one of better rank.
  waiting: list[tuple[float, int, tuple[int, ...]]] = []

  def offer(path, reached):
    if len(path) < deepest:
      for rank, rate in enumerate(rates[len(path)]):
        if reached * rate > 0:
          child = (*path, rank)
          heapq.heappush(waiting, (-reached * rate, len(child), child))

  paths: list[tuple[int, ...]] = []
  offer((), 1.0)
  while waiting and len(paths) < size - 1:
    value, _, path = heapq.heappop(waiting)
    paths.append(path)
    offer(path, -value)
  return _tree.TokenTree.from_paths(paths)


def expected_length(tree: _tree.TokenTree, acceptance: np.ndarray) -> float:
  """Tokens a round that a tree is expected to bring, the bonus token included.

  Args:
    tree: the tree.
    acceptance: [D, R], see `best_tree`.

  Returns:
    One, and for each node the product of the rates along its path.

  Raises:
    ValueError: for a tree that is deeper than D or ranks more than R, with
      both numbers, or rates that are no probabilities.

  Example:
    >>> import numpy as np
    >>> from ldjax import decoding
    >>> rates = np.array([[0.5, 0.25], [0.5, 0.0]])
    >>> expected_length(decoding.TokenTree.chain(2), rates)
    1.75
  """
  rates = _checked(acceptance)
  if tree.depth > len(rates):
    raise ValueError(
      f"the tree is {tree.depth} deep but acceptance has {len(rates)} rows;"
      " give one for each depth"
    )
  widest = max(tree.ranks) + 1
  if widest > rates.shape[1]:
    raise ValueError(
      f"the tree ranks {widest} tokens but acceptance has {rates.shape[1]}"
      " columns; give one for each rank"
    )
  reached = [1.0]
  for parent, depth, rank in zip(
    tree.parents[1:], tree.depths[1:], tree.ranks[1:], strict=True
  ):
    reached.append(reached[parent] * float(rates[depth - 1, rank]))
  return sum(reached)
