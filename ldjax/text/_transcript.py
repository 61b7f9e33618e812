"""The text of one sequence as its tokens come, up to a stop string."""

from collections.abc import Iterable, Sequence

from ldjax.text import _stream, _tokenizer


class Transcript:
  """Turns tokens into text, token by token, and ends at a stop string.

  Where it ends depends on the tokens alone, not on how many came at a time.
  Text, tokens and pieces are cut at one place: the text just before the stop
  string, the tokens to the last one that brought any of that text. What is
  handed out can no longer change: half a character waits for its rest, and
  what may yet turn out to begin a stop string waits as well.

  Args:
    tokenizer: the model's.
    stop: strings that end the text and are not part of it.
    min_tokens: how many tokens come before stop strings are looked for.

  Example:
    >>> import tokenizers, ldjax
    >>> words = tokenizers.models.WordLevel({"a": 0, "b": 1, "c": 2}, "a")
    >>> backend = tokenizers.Tokenizer(words)
    >>> backend.decoder = tokenizers.decoders.Fuse()
    >>> transcript = Transcript(ldjax.text.Tokenizer(backend), ["bc"])
    >>> transcript.push([0, 1]), transcript.push([1, 2, 0])
    ('a', 'b')
    >>> transcript.stopped, transcript.tokens, transcript.text
    (True, [0, 1], 'ab')
  """

  def __init__(
    self,
    tokenizer: _tokenizer.Tokenizer,
    stop: Sequence[str] = (),
    min_tokens: int = 0,
  ):
    self.tokens: list[int] = []
    """Ids so far."""
    self.pieces: list[str] = []
    """The text that each of them brought."""
    self.stopped = False
    """Whether a stop string was met."""
    self._detokenizer = _stream.StreamingDetokenizer(tokenizer)
    self._stop = tuple(stop)
    self._min_tokens = min_tokens
    # The end of the text in which a stop string may have begun.
    self._tail = ""
    self._reach = max(map(len, self._stop), default=1) - 1
    self._held = ""

  @property
  def text(self) -> str:
    """The text so far, what is still held back included."""
    return "".join(self.pieces)

  def push(self, tokens: Iterable[int]) -> str:
    """Takes further tokens; those after a stop string are dropped.

    Args:
      tokens: ids.

    Returns:
      The text that is now certain; may be empty.
    """
    certain = self._held
    for token in tokens:
      if self.stopped:
        break
      piece = self._detokenizer.push([token])
      self.tokens.append(int(token))
      self.pieces.append(piece)
      certain += piece
      certain = certain[: len(certain) - self._look(piece)]
    return self._hand_out(certain)

  def finish(self) -> str:
    """Ends the text.

    Returns:
      What was held back.
    """
    certain, self._held = self._held, ""
    if self.stopped:
      return certain
    rest = self._detokenizer.flush()
    if rest:
      self.pieces[-1] += rest
      certain += rest
      certain = certain[: len(certain) - self._look(rest)]
    return certain

  def _look(self, piece: str) -> int:
    """Looks for a stop string that `piece` completes; cuts there.

    Returns:
      How many characters are cut off.
    """
    if not self._stop or not piece or len(self.tokens) <= self._min_tokens:
      return 0
    window = self._tail + piece
    found = [at for each in self._stop if (at := window.find(each)) >= 0]
    if not found:
      self._tail = window[max(len(window) - self._reach, 0) :]
      return 0
    self.stopped = True
    cut = len(window) - min(found)
    left = cut
    while left and left >= len(self.pieces[-1]):
      left -= len(self.pieces.pop())
      self.tokens.pop()
    if left:
      self.pieces[-1] = self.pieces[-1][:-left]
    while len(self.tokens) > self._min_tokens and not self.pieces[-1]:
      self.pieces.pop()
      self.tokens.pop()
    return cut

  def _hand_out(self, certain: str) -> str:
    """Holds back the longest end that may yet begin a stop string."""
    held = 0
    if self._stop and not self.stopped:
      for size in range(min(self._reach, len(certain)), 0, -1):
        if any(each.startswith(certain[-size:]) for each in self._stop):
          held = size
          break
    self._held = certain[len(certain) - held :]
    return certain[: len(certain) - held]
