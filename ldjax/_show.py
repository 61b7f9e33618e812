"""One row of one round, made readable."""

import dataclasses
from collections.abc import Callable

import numpy as np

from ldjax import _base, _render, text

_ENDED = {
  _base.Status.STOPPED: "ended by a stop id",
  _base.Status.LENGTH: "ended by its limit",
}
_IDLE = {
  _base.Status.FREE: "no sequence in this row",
  _base.Status.PREFILLING: "still reading its prompt",
  _base.Status.STOPPED: "had ended by a stop id",
  _base.Status.LENGTH: "had ended by its limit",
}


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class RoundView:
  """What a round did in one row; it shows itself as a picture or in text."""

  parents: tuple[int, ...]
  """The parent of each of T nodes, -1 for the root."""
  labels: tuple[str | None, ...]
  """T texts of their tokens; None for a node without a token."""
  path: tuple[int, ...]
  """Nodes that the walk passed, root first; empty if it emitted nothing."""
  bonus: str | None
  """Text of the token that was drawn at the walk's end."""
  titles: tuple[str, ...]
  """T texts that say more of a node, and one of the bonus token."""
  notes: tuple[str, ...]
  """What else there is to say of the row."""

  def _repr_svg_(self) -> str:
    return _render.tree_svg(
      self.parents,
      self.labels,
      path=self.path,
      bonus=self.bonus,
      titles=self.titles,
      notes=self.notes,
    )

  def __repr__(self) -> str:
    return _render.tree_text(
      self.parents,
      self.labels,
      path=self.path,
      bonus=self.bonus,
      notes=self.notes,
    )


def _notes(
  count: int, status: int, finite: bool, needs_pages: bool
) -> tuple[str, ...]:
  if needs_pages:
    return ("lacks pages: nothing was done",)
  notes = []
  if count:
    notes.append(f"{count} token{'s' if count > 1 else ''} in one pass")
    if status in _ENDED:
      notes.append(_ENDED[status])
  elif finite:
    notes.append(f"nothing emitted: {_IDLE.get(status, 'nothing drawn')}")
  if not finite:
    notes.append("logits that are not finite")
  return tuple(notes)


def show_round(
  round: _base.Round,
  row: int = 0,
  tokenizer: text.Tokenizer | Callable[[int], str] | None = None,
  root: int | None = None,
) -> RoundView:
  """Makes one row of one round readable: its tree, its walk, what it emitted.

  The last token that was drawn is shown as the bonus token, also where a stop
  id or a limit ended the walk.

  Args:
    round: from a decoder's `step` or `prefill`, or one of those that
      `decoding.trace` stacks, `jax.tree.map(lambda x: x[i], rounds)`.
    row: which of the R rows that the round worked on.
    tokenizer: the model's, or id -> text; None to show ids.
    root: id of the pending token that the round began with, which the round
      does not hold; None if it is not known.

  Returns:
    `RoundView`: a picture in a notebook, lines of text in a terminal.

  Raises:
    ValueError: for stacked rounds, or a row that is not there.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> import ldjax
    >>> from ldjax import decoding, sampling
    >>> tiny = ldjax.testing.tiny_model()
    >>> decoder = decoding.speculative(
    ...   tiny.target, decoding.ngram(2), tiny.init_cache, max_len=48)
    >>> params = decoding.DecoderParams(tiny.params)
    >>> state = jax.jit(decoder.init)(
    ...   params, jnp.array([[1, 2, 3]]), jnp.array([3]),
    ...   sampling=sampling.make_sampling(1), max_new_tokens=8)
    >>> root = state.tokens[0, state.length[0] - 1]
    >>> state, round = jax.jit(decoder.step)(params, state)
    >>> print(show_round(round, root=root))  # doctest: +ELLIPSIS
    ● ...
    └╌◌ ...
    1 token in one pass
    2 nodes without a token not shown
  """
  counts = np.asarray(round.count)
  if counts.ndim != 1:
    raise ValueError(
      f"count has shape {list(counts.shape)}, that of stacked rounds; give one"
      " of them, jax.tree.map(lambda x: x[i], rounds)"
    )
  if not 0 <= row < counts.shape[0]:
    raise ValueError(
      f"row is {row}; this round has {counts.shape[0]} rows, counted from 0"
    )
  if tokenizer is None:
    name: Callable[[int], str] = str
  elif callable(tokenizer):
    name = tokenizer
  else:
    whole = tokenizer
    name = lambda token: text.token_text(whole, token)  # noqa: E731

  count = int(counts[row])
  tokens = [int(x) for x in np.asarray(round.tokens)[row, :count]]
  carried = [int(x) for x in np.asarray(round.candidates.tokens)[row]]
  path = tuple(int(x) for x in np.asarray(round.path)[row, :count])
  logprobs = [float(x) for x in np.asarray(round.logprobs)[row, :count]]
  labels = [None if token < 0 else name(token) for token in carried]
  titles = [f"node {i}, token {token}" for i, token in enumerate(carried)]
  labels[0] = "⟨root⟩" if root is None else name(int(root))
  titles[0] = "the pending token" + (
    "" if root is None else f", token {int(root)}"
  )
  # Of the tokens drawn, the last one stands at no node.
  drawn = [*path[1:], len(titles)][:count]
  if count:
    titles.append(f"token {tokens[-1]}")
  if any(logprobs):  # 0 where nobody asked
    for node, value in zip(drawn, logprobs, strict=True):
      titles[node] += f", logprob {value:.3f}"
  return RoundView(
    parents=tuple(int(x) for x in np.asarray(round.candidates.parents)[row]),
    labels=tuple(labels),
    path=path,
    bonus=name(tokens[-1]) if count else None,
    titles=tuple(titles),
    notes=_notes(
      count,
      int(np.asarray(round.status)[row]),
      bool(np.asarray(round.finite)[row]),
      bool(np.asarray(round.needs_pages)[row]),
    ),
  )
