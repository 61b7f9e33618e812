"""What was generated for one prompt, and how it went."""

import dataclasses

from ldjax import _render


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
  """A finished text; in a notebook it shows itself, coloured by rounds."""

  text: str
  """Without special tokens, and without the stop string that ended it."""
  tokens: tuple[int, ...]
  """Emitted ids. A stop id, if one ended the text, is the last; a stop string
  cuts them after the last one that brought any of `text`."""
  pieces: tuple[str, ...]
  """The text that each of `tokens` brought; joined they are `text`. Of a
  character of several tokens the last one has it all."""
  round_tokens: tuple[int, ...]
  """How many of `tokens` each round brought: passes of the target that emitted
  tokens, the end of prefill included."""
  round_sizes: tuple[int, ...] = ()
  """How many nodes the tree of each of these rounds had, its root included: 1
  for a plain one, and for the end of prefill."""
  logprobs: tuple[float, ...] | None
  """The log-probability of each of `tokens` by the target's own logits, before
  temperature, cuts and penalties; None unless asked for."""
  prompt_tokens: int
  """Tokens of the prompt, template included."""
  finish_reason: str
  """`"stop"` (a stop id or a stop string), `"length"` (`max_new_tokens` or the
  end of the cache), `"cancelled"`, or `"non_finite"` (the model's logits were
  not finite)."""
  tokens_per_second: float
  """Tokens after the first over the time after the first; 0 for one token."""
  time_to_first_token_s: float
  """Seconds from the start of its prefill to its first token."""
  waited_s: float
  """Seconds that it waited for a row."""
  peak_cache_bytes: int
  """Bytes of cache pages in use when it ended, all rows together; a page that
  rows share counts for each of them."""
  compressed: bool = False
  """Whether memory ran short and the cache was made int8 by the time it ended
  (`load(on_pressure="compress")`): then its text may be another one than
  without."""

  @property
  def rounds(self) -> int:
    """Passes of the target that emitted `tokens`."""
    return len(self.round_tokens)

  @property
  def mean_accepted(self) -> float:
    """Tokens emitted over rounds: 1 for plain decoding."""
    return len(self.tokens) / self.rounds if self.rounds else 0.0

  def show(self) -> str:
    """The text with a bar where a round ended, for terminals."""
    return _render.generation_text(self.pieces, self.round_tokens)

  def _repr_html_(self) -> str:
    return _render.generation_html(
      self.pieces,
      self.round_tokens,
      tokens=self.tokens,
      logprobs=self.logprobs,
      caption=(
        f"{len(self.tokens)} tokens in {self.rounds} rounds, mean accepted"
        f" {self.mean_accepted:.2f}, {self.tokens_per_second:.1f} tokens/s,"
        f" ended by {self.finish_reason}"
      ),
    )
