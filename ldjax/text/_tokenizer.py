"""From text to token ids and back, with exactly one BOS."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2
import tokenizers

from ldjax.text import _chat


class Tokenizer:
  """A model's tokenizer and chat template.

  The model's own rule decides whether a BOS belongs in front; if so there is
  exactly one, also when the text, say of a chat template, begins with its own.
  Special tokens that stand in a text are read as such.

  Args:
    backend: the tokenizer proper.
    add_bos: whether the model wants a BOS in front of a text.
    bos_token_id: its id, or None if the model has none.
    eos_token_ids: ids that end a text, as far as the tokenizer knows.
    chat_template: Jinja2 source, or None.
    special: texts of special tokens for the template (`bos_token`, …).
    name: what to call the tokenizer in messages.

  Raises:
    ValueError: if BOS is wanted and there is none.

  Example:
    >>> import tokenizers, ldjax
    >>> words = tokenizers.models.WordLevel({"<s>": 0, "a": 1, "b": 2}, "a")
    >>> backend = tokenizers.Tokenizer(words)
    >>> backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    >>> _ = backend.add_special_tokens(["<s>"])
    >>> tokenizer = ldjax.text.Tokenizer(
    ...   backend, add_bos=True, bos_token_id=0)
    >>> tokenizer.encode("b a"), tokenizer.encode("<s>b a")
    ([0, 2, 1], [0, 2, 1])

  Source: Hugging Face `tokenizers` and the conventions of transformers.
  """

  def __init__(
    self,
    backend: tokenizers.Tokenizer,
    *,
    add_bos: bool = False,
    bos_token_id: int | None = None,
    eos_token_ids: Iterable[int] = (),
    chat_template: str | None = None,
    special: Mapping[str, str] | None = None,
    name: str = "this tokenizer",
  ):
    if add_bos and bos_token_id is None:
      raise ValueError(f"{name} says to add a BOS token and has none")
    # Settings of a file for training, which would cut or fill a prompt.
    backend.no_truncation()
    backend.no_padding()
    self.backend = backend
    self._add_bos = add_bos
    self._bos_token_id = bos_token_id
    self._eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
    self._chat_template = chat_template
    self._special = dict(special or {})
    self._name = name

  @property
  def bos_token_id(self) -> int | None:
    """The id that begins a text, or None."""
    return self._bos_token_id

  @property
  def eos_token_ids(self) -> tuple[int, ...]:
    """The ids that end a text, as far as the tokenizer knows."""
    return self._eos_token_ids

  @property
  def vocab_size(self) -> int:
    """Token ids it can give, added ones included; the model may have more."""
    return self.backend.get_vocab_size(with_added_tokens=True)

  @property
  def add_bos(self) -> bool:
    """Whether the model wants a BOS in front of a text."""
    return self._add_bos

  @property
  def special(self) -> dict[str, str]:
    """Texts of special tokens for the template (`bos_token`, …)."""
    return dict(self._special)

  @property
  def chat_template(self) -> str | None:
    """The template's Jinja2 source, if the model has one."""
    return self._chat_template

  @property
  def has_chat_template(self) -> bool:
    """Whether `chat` works."""
    return self._chat_template is not None

  @functools.cached_property
  def special_ids(self) -> frozenset[int]:
    """The ids that `decode` leaves out."""
    added = self.backend.get_added_tokens_decoder()
    return frozenset(id for id, token in added.items() if token.special)

  @functools.cached_property
  def _template(self) -> jinja2.Template:
    if self._chat_template is None:
      raise ValueError(
        f"{self._name} has no chat template: it belongs to a base model. Pass"
        " plain text, or use an instruction-tuned model"
      )
    return _chat.compile_template(self._chat_template)

  def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
    """Turns text into token ids.

    Args:
      text: any text; special tokens in it are read as such.
      add_bos: whether to put a BOS in front, if the model wants one and the
        text does not begin with it.

    Returns:
      Token ids.
    """
    ids = self.backend.encode(text, add_special_tokens=False).ids
    bos = self._bos_token_id
    if add_bos and self._add_bos and bos is not None and ids[:1] != [bos]:
      return [bos, *ids]
    return ids

  def decode(self, ids: Iterable[int]) -> str:
    """Turns token ids into text, special tokens left out.

    Args:
      ids: token ids; those beyond the vocabulary (a padded model has them)
        give no text.

    Returns:
      The text; bytes that are no UTF-8 become U+FFFD.

    Raises:
      ValueError: for a negative id.
    """
    ids = [int(token) for token in ids]
    if any(token < 0 for token in ids):
      raise ValueError(f"token id {min(ids)} is negative (padding?)")
    return self.backend.decode(ids, skip_special_tokens=True)

  def chat(
    self,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
  ) -> str:
    """Renders messages by the model's chat template.

    Args:
      messages: dicts with `role` ("system", "user", "assistant") and
        `content`.
      add_generation_prompt: whether to end with the opening of the
        assistant's turn.

    Returns:
      The prompt as text, to be given to `encode`.

    Raises:
      ValueError: without a template, or if the template refuses.
    """
    return _chat.render(
      self._template, messages, add_generation_prompt, self._special
    )
