"""Tokenizers out of the metadata of GGUF files.

Two kinds: `gpt2` (byte-level BPE with merges and a named way to split a text
beforehand) and `llama` (SentencePiece BPE, whose merges follow from scores).
The splits are those that llama.cpp gives the names; where Hugging Face's
tokenizer of the same model is the original (a normaliser), that is followed.
"""

import pathlib
from collections.abc import Callable
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from ldjax.text import _tokenizer

_GPT2 = (
  r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+"
  r"|\s+(?!\S)|\s+"
)
_CL100K = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{%s}"
  r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# How each named kind splits a text, one pattern after another; each match and
# each stretch between matches becomes a piece.
_SPLITS: dict[str, tuple[str, ...]] = {
  "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
  "gpt-2": (_GPT2,),
  "llama-bpe": (_CL100K % "1,3",),
  "qwen2": (_CL100K % "1",),
  "smollm": (r"\p{N}", _GPT2),
}
_ADDS_BOS = frozenset({"llama-bpe"})
_WHOLE_WORDS_FIRST = frozenset({"llama-bpe"})
_COMPOSES = frozenset({"qwen2"})

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_SPECIAL = {
  "bos_token": "bos_token_id",
  "eos_token": "eos_token_id",
  "pad_token": "padding_token_id",
  "unk_token": "unknown_token_id",
}
_SPACE = "\u2581"


class _Metadata:
  """The tokenizer's part of a file's metadata, with errors that name keys."""

  def __init__(self, values: dict[str, Any], path: pathlib.Path):
    self.values = values
    self.path = path

  def get(self, key: str, default: Any = None) -> Any:
    return self.values.get(f"tokenizer.ggml.{key}", default)

  def array(self, key: str, size: int | None = None) -> list[Any]:
    value = self.get(key)
    if not isinstance(value, list) or not value:
      raise ValueError(f"{self.path}: metadata tokenizer.ggml.{key} is missing")
    if size is not None and len(value) != size:
      raise ValueError(
        f"{self.path}: tokenizer.ggml.{key} has {len(value)} entries and the"
        f" vocabulary {size}"
      )
    return value

  def token_id(self, key: str, size: int) -> int | None:
    value = self.get(key)
    if value is None:
      return None
    if not 0 <= value < size:
      raise ValueError(
        f"{self.path}: tokenizer.ggml.{key} is {value}, outside the vocabulary"
        f" of {size}"
      )
    return int(value)


def _vocabulary(tokens: list[str], path: pathlib.Path) -> dict[str, int]:
  vocabulary = {token: index for index, token in enumerate(tokens)}
  if len(vocabulary) != len(tokens):
    repeated = next(t for i, t in enumerate(tokens) if vocabulary[t] != i)
    raise ValueError(f"{path}: token {repeated!r} is in the vocabulary twice")
  return vocabulary


def _byte_level(data: _Metadata) -> tuple[tokenizers.Tokenizer, bool]:
  tokens = data.array("tokens")
  kind = data.get("pre", "default")
  if kind not in _SPLITS:
    raise ValueError(
      f"{data.path}: tokenizer.ggml.pre is {kind!r}; supported:"
      f" {', '.join(sorted(_SPLITS))}"
    )
  vocabulary = _vocabulary(tokens, data.path)
  merges = []
  for merge in data.array("merges"):
    left, _, right = merge.partition(" ")
    if left not in vocabulary or right not in vocabulary:
      raise ValueError(
        f"{data.path}: tokenizer.ggml.merges has {merge!r}, whose parts are not"
        " both in the vocabulary"
      )
    merges.append((left, right))
  backend = tokenizers.Tokenizer(
    models.BPE(vocabulary, merges, ignore_merges=kind in _WHOLE_WORDS_FIRST)
  )
  if kind in _COMPOSES:
    backend.normalizer = normalizers.NFC()
  backend.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
      for pattern in _SPLITS[kind]
    ]
    + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
  )
  backend.decoder = decoders.ByteLevel()
  return backend, kind in _ADDS_BOS


def _merges_of(
  vocabulary: dict[str, int], scores: list[float], ordinary: list[bool]
) -> list[tuple[str, str]]:
  # SentencePiece joins the neighbours whose union scores highest, so any two
  # parts of a token merge, ranked by the score of the whole.
  ranked = []
  for token, index in vocabulary.items():
    if not ordinary[index]:
      continue
    for cut in range(1, len(token)):
      left = vocabulary.get(token[:cut])
      right = vocabulary.get(token[cut:])
      if (
        left is not None
        and right is not None
        and ordinary[left]
        and ordinary[right]
      ):
        ranked.append((-scores[index], left, right, token, cut))
  ranked.sort(key=lambda item: item[:3])
  return [(token[:cut], token[cut:]) for _, _, _, token, cut in ranked]


def _sentence_piece(data: _Metadata) -> tuple[tokenizers.Tokenizer, bool]:
  tokens = data.array("tokens")
  scores = data.array("scores", len(tokens))
  kinds = data.array("token_type", len(tokens))
  vocabulary = _vocabulary(tokens, data.path)
  ordinary = [
    kind not in (_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE) for kind in kinds
  ]
  unknown = data.token_id("unknown_token_id", len(tokens))
  if unknown is None:
    unknown = next((i for i, k in enumerate(kinds) if k == _UNKNOWN), None)
  backend = tokenizers.Tokenizer(
    models.BPE(
      vocabulary,
      _merges_of(vocabulary, scores, ordinary),
      unk_token=None if unknown is None else tokens[unknown],
      fuse_unk=True,
      byte_fallback=True,
    )
  )
  spaces = normalizers.Replace(" ", _SPACE)
  steps: list[Any] = [
    decoders.Replace(_SPACE, " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
  ]
  if data.get("add_space_prefix", True):
    backend.normalizer = normalizers.Sequence(
      [normalizers.Prepend(_SPACE), spaces]
    )
    steps.append(decoders.Strip(" ", 1, 0))
  else:
    backend.normalizer = spaces
  backend.decoder = decoders.Sequence(steps)
  return backend, True


_KINDS: dict[str, Callable[[_Metadata], tuple[tokenizers.Tokenizer, bool]]] = {
  "gpt2": _byte_level,
  "llama": _sentence_piece,
}


def from_metadata(
  values: dict[str, Any], path: pathlib.Path
) -> _tokenizer.Tokenizer:
  """Builds a tokenizer from a GGUF file's metadata.

  Args:
    values: all metadata by key.
    path: the file, for messages.

  Returns:
    The tokenizer, with the file's chat template if it has one.

  Raises:
    ValueError: for what is missing, damaged or not supported.
  """
  data = _Metadata(values, path)
  kind = data.get("model")
  if kind not in _KINDS:
    raise ValueError(
      f"{path}: tokenizer.ggml.model is {kind!r}; supported:"
      f" {', '.join(sorted(_KINDS))}"
    )
  backend, adds_bos = _KINDS[kind](data)
  tokens = data.array("tokens")
  kinds = data.get("token_type")
  if kinds is not None:
    data.array("token_type", len(tokens))
    added = [
      tokenizers.AddedToken(
        token, special=kind != _USER_DEFINED, normalized=False
      )
      for token, kind in zip(tokens, kinds, strict=True)
      if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token
    ]
    backend.add_tokens(added)
  ids = {
    key: data.token_id(key, len(tokens))
    for key in (*_SPECIAL.values(), *_EOS_KEYS)
  }
  bos = ids["bos_token_id"]
  return _tokenizer.Tokenizer(
    backend,
    add_bos=data.get("add_bos_token", adds_bos and bos is not None),
    bos_token_id=bos,
    eos_token_ids=[i for k in _EOS_KEYS if (i := ids[k]) is not None],
    chat_template=values.get("tokenizer.chat_template"),
    special={
      name: tokens[i]
      for name, key in _SPECIAL.items()
      if (i := ids[key]) is not None
    },
    name=str(path),
  )
