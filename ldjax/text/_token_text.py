"""The text of one token, half characters included."""

import re

from ldjax.text import _stream, _tokenizer

_BYTES = re.compile("[\udc80-\udcff]+")


def _readable(data: bytes) -> str:
  """Bytes as text; what is no UTF-8 is spelt out, as ⟨e2 96⟩."""
  return _BYTES.sub(
    lambda run: f"⟨{' '.join(f'{ord(x) - 0xDC00:02x}' for x in run[0])}⟩",
    data.decode("utf-8", "surrogateescape"),
  )


def token_text(tokenizer: _tokenizer.Tokenizer, token: int) -> str:
  """Says what one token stands for by itself, to be shown and not joined.

  Args:
    tokenizer: the model's.
    token: its id.

  Returns:
    The text that it brings in the middle of a sequence. Bytes that are no whole
    character are spelt out, as ⟨e2 96⟩; so is an id that the tokenizer does not
    know, as ⟨id 49999⟩. A special token gives its name.

  Raises:
    ValueError: for a negative id.

  Example:
    >>> import tokenizers, ldjax
    >>> tokens = {"Ã": 0, "¤": 1, "Ġb": 2}  # 0xC3, 0xA4, " b"
    >>> backend = tokenizers.Tokenizer(tokenizers.models.BPE(tokens, []))
    >>> backend.decoder = tokenizers.decoders.ByteLevel()
    >>> tokenizer = ldjax.text.Tokenizer(backend)
    >>> [token_text(tokenizer, token) for token in (0, 2, 3)]
    ['⟨c3⟩', ' b', '⟨id 3⟩']
  """
  token = int(token)
  if token < 0:
    raise ValueError(f"token id {token} is negative (padding?)")
  raw = tokenizer.backend.id_to_token(token)
  if raw is None:
    return f"⟨id {token}⟩"
  if token in tokenizer.special_ids:
    return raw
  stream = _stream.StreamingDetokenizer(tokenizer)
  if stream._byte_level:
    return _readable(stream._bytes(raw))
  if _stream._BYTE_TOKEN.fullmatch(raw):
    return _readable(bytes([int(raw[3:-1], 16)]))
  # The first token of a text is treated apart (a leading space goes).
  alone = tokenizer.decode([token])
  return tokenizer.decode([token, token])[len(alone) :]
