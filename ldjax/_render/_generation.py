"""A generation: its text, and which round brought which part of it."""

import html
import math
from collections.abc import Iterator, Sequence

from ldjax._render import _labels

# Rounds take turns. Translucent, so that the page's own text colour reads on
# them; of Okabe and Ito's palette the four, in the order, whose neighbours
# differ most to any eye: blue, orange, sky blue, vermillion.
PALETTE = ((0, 114, 178), (230, 159, 0), (86, 180, 233), (213, 94, 0))
ALPHA = 0.3
_FAINT = '<span style="opacity:0.5;user-select:none">{}</span>'


def _rounds(
  pieces: Sequence[str], round_tokens: Sequence[int]
) -> Iterator[tuple[int, range]]:
  """(number from 1, its tokens) of each round that brought any."""
  if min(round_tokens, default=0) < 0 or sum(round_tokens) != len(pieces):
    raise ValueError(
      f"round_tokens {list(round_tokens)} add up to {sum(round_tokens)}, but"
      f" there are {len(pieces)} pieces; give the tokens of each round"
    )
  start = 0
  for number, count in enumerate(round_tokens, 1):
    if count:
      yield number, range(start, start + count)
    start += count


def _piece(piece: str) -> str:
  """A piece of text as HTML; what would be invisible gets a faint mark."""
  if not piece:
    return _FAINT.format("◦")
  text = html.escape(_labels.harmless(piece))
  return text.replace("\n", _FAINT.format("↵") + "\n")


def generation_html(
  pieces: Sequence[str],
  round_tokens: Sequence[int],
  *,
  tokens: Sequence[int],
  logprobs: Sequence[float] | None = None,
  caption: str = "",
) -> str:
  """Shows a text with the tokens of one round in one colour.

  A round begins with a line, neighbours differ in colour, and the pointer
  tells a token's id, its round and its log-probability.

  Args:
    pieces: the text that each token brought; joined they are the text.
    round_tokens: how many tokens each round brought.
    tokens: the id of each token.
    logprobs: the log-probability of each token, if known.
    caption: a line to put below.

  Returns:
    A `<div>` without scripts and without style sheets.

  Raises:
    ValueError: for numbers of tokens that differ.

  Example:
    >>> page = generation_html(
    ...   ["Paris", " &", " Rome"], [1, 2], tokens=[7, 8, 9], caption="&")
    >>> '<span title="token 8, round 2"> &amp;</span>' in page
    True
  """
  for name, values in (("tokens", tokens), ("logprobs", logprobs)):
    if values is not None and len(values) != len(pieces):
      raise ValueError(
        f"there are {len(pieces)} pieces and {len(values)} {name}; give one a"
        " token"
      )
  parts = []
  for number, members in _rounds(pieces, round_tokens):
    red, green, blue = PALETTE[(number - 1) % len(PALETTE)]
    parts.append(
      f'<span style="background-color:rgba({red},{green},{blue},{ALPHA});'
      f'border-left:2px solid rgb({red},{green},{blue})">'
    )
    for index in members:
      title = f"token {tokens[index]}, round {number}"
      if logprobs is not None and not math.isnan(logprobs[index]):
        title += f", logprob {logprobs[index]:.3f}"
      parts.append(f'<span title="{title}">{_piece(pieces[index])}</span>')
    parts.append("</span>")
  below = html.escape(_labels.harmless(caption))
  below = below and f'<div style="opacity:0.75;font-size:90%">{below}</div>'
  return (
    '<div><div dir="auto" style="white-space:pre-wrap;overflow-wrap:anywhere;'
    f'line-height:1.6">{"".join(parts)}</div>{below}</div>'
  )


def generation_text(pieces: Sequence[str], round_tokens: Sequence[int]) -> str:
  """Shows a text with a thin bar where another round begins.

  Args:
    pieces: the text that each token brought; joined they are the text.
    round_tokens: how many tokens each round brought.

  Returns:
    The text; line ends and tabs are kept, other control characters, and so
    escape sequences of terminals, are spelt out.

  Raises:
    ValueError: for numbers of tokens that differ.

  Example:
    >>> generation_text([" Paris", ",", " which"], [1, 2])
    ' Paris│, which'
  """
  return "│".join(
    "".join(_labels.harmless(pieces[index]) for index in members)
    for _, members in _rounds(pieces, round_tokens)
  )
