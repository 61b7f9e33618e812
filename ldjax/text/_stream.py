"""Text from a stream of token ids, never a piece that could still change."""

import codecs
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ldjax.text import _tokenizer

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def _byte_alphabet() -> dict[str, int]:
  # Byte-level BPE shows each byte as one printable character: printable bytes
  # as themselves, the others in order from U+0100 on.
  printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [byte for byte in range(256) if byte not in printable]
  alphabet = {chr(byte): byte for byte in printable}
  alphabet.update({chr(256 + i): byte for i, byte in enumerate(others)})
  return alphabet


def _appends(decoder: Mapping[str, Any]) -> bool:
  """Whether a decoder only ever appends text, once byte runs have ended."""
  kind = decoder.get("type")
  if kind != "Sequence":
    return kind in ("Metaspace", "Fuse", "ByteFallback")
  fused = False
  for part in decoder["decoders"]:
    kind = part.get("type")
    if kind == "Strip" and part.get("stop", 0) == 0:
      continue
    if kind == "Replace" and (fused or "String" not in part["pattern"]):
      return False
    if kind not in ("Replace", "ByteFallback", "Fuse", "Metaspace"):
      return False
    fused = fused or kind == "Fuse"
  return True


class StreamingDetokenizer:
  """Turns token ids into text as they come.

  What `push` returns can no longer change: half a character waits for the rest
  of its bytes. All pieces and the last of `flush` joined are exactly
  `tokenizer.decode` of all ids. A push costs by the tokens pushed and a few
  before them, not by the text so far.

  Args:
    tokenizer: the model's tokenizer.

  Example:
    >>> import tokenizers, ldjax
    >>> tokens = {"Ã": 0, "¤": 1, "b": 2}  # 0xC3, 0xA4, "b"
    >>> backend = tokenizers.Tokenizer(tokenizers.models.BPE(tokens, []))
    >>> backend.decoder = tokenizers.decoders.ByteLevel()
    >>> stream = ldjax.text.StreamingDetokenizer(ldjax.text.Tokenizer(backend))
    >>> stream.push([2, 0]), stream.push([1]), stream.flush()
    ('b', 'ä', '')

  Source: the Unicode standard, 3.9 (substitution of maximal subparts).
  """

  def __init__(self, tokenizer: _tokenizer.Tokenizer):
    self._tokenizer = tokenizer
    decoder = tokenizer.backend.decoder
    state = json.loads(decoder.__getstate__()) if decoder is not None else {}
    while state.get("type") == "Sequence" and len(state["decoders"]) == 1:
      state = state["decoders"][0]
    self._byte_level = state.get("type") == "ByteLevel"
    self._streams = self._byte_level or _appends(state)
    self._alphabet = _byte_alphabet() if self._byte_level else {}
    self._restart()

  def _restart(self) -> None:
    self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    self._context: list[int] = []
    self._pending: list[int] = []

  def _bytes(self, token: str) -> bytes:
    try:
      return bytes(self._alphabet[char] for char in token)
    except KeyError:
      # An added token stands for its own text.
      return token.encode("utf-8")

  def _take(self) -> str:
    # The decoder treats the first token of a text apart (a leading space goes),
    # so the last token already given stands in front and is cut off again.
    before = self._tokenizer.decode(self._context)
    text = self._tokenizer.decode([*self._context, *self._pending])
    self._context = self._pending[-1:]
    self._pending = []
    return text[len(before) :]

  def push(self, ids: Iterable[int]) -> str:
    """Takes further token ids.

    Args:
      ids: token ids, any number; special ones give no text.

    Returns:
      The text that is now certain; may be empty.
    """
    backend = self._tokenizer.backend
    special = self._tokenizer.special_ids
    known = [
      (int(token), text)
      for token in ids
      if int(token) not in special
      and (text := backend.id_to_token(int(token))) is not None
    ]
    if self._byte_level:
      return self._utf8.decode(b"".join(self._bytes(text) for _, text in known))
    self._pending.extend(token for token, _ in known)
    if not known or not self._streams or _BYTE_TOKEN.fullmatch(known[-1][1]):
      return ""
    return self._take()

  def flush(self) -> str:
    """Ends the text; the next `push` begins another.

    Returns:
      What was held back, bytes that are no UTF-8 as U+FFFD.
    """
    text = self._utf8.decode(b"", final=True)
    if self._pending:
      text += self._take()
    self._restart()
    return text
