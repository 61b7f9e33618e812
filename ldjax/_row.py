"""A request while it is in a row of the state, as the host sees it."""

import dataclasses
from typing import Any, NamedTuple, TypeGuard

from ldjax import _generation, _request, decoding, text, typing

Array = typing.Array


@dataclasses.dataclass(kw_only=True)
class Row:
  """What was read of one request so far."""

  index: int
  """Its number."""
  request: _request.Request
  transcript: text.Transcript
  waited: float
  """Seconds in the queue."""
  started: float
  """When it was given its row, in seconds of `time.perf_counter`."""
  logprobs: list[float] = dataclasses.field(default_factory=list)
  round_tokens: list[int] = dataclasses.field(default_factory=list)
  """Tokens that each round brought."""
  round_sizes: list[int] = dataclasses.field(default_factory=list)
  """Nodes that each of those rounds verified."""
  tokens: list[int] = dataclasses.field(default_factory=list)
  """What was read; after a stop string more than the transcript keeps."""
  first: float = 0.0
  """When its first token was read."""
  last: float = 0.0
  enqueued: int = 0
  """Rounds that will bring it tokens and were not read yet."""
  waiting: bool = False
  """Preempted: its pages are given back, its tokens are kept."""
  parked: Any = None
  """What its pages held, if they went to the host's memory."""

  @property
  def emitted(self) -> int:
    """Tokens read."""
    return len(self.tokens)

  @property
  def known_tokens(self) -> list[int]:
    """Tokens of prompt and answer."""
    return self.request.tokens + self.tokens

  @property
  def known(self) -> int:
    """How many tokens prompt and answer have."""
    return self.request.prompt_length + self.emitted

  @property
  def remaining(self) -> int:
    """Tokens to emit if every enqueued round brings only one."""
    return self.request.max_new_tokens - self.emitted - self.enqueued

  def push(
    self, tokens: list[int], logprobs: list[float], now: float, size: int
  ) -> str:
    """Takes what a round brought.

    Args:
      tokens: ids, at least one.
      logprobs: of them.
      now: when they were read.
      size: nodes of its tree.

    Returns:
      The text that is now certain.
    """
    self.tokens += tokens
    self.round_tokens.append(len(tokens))
    self.round_sizes.append(size)
    self.logprobs += logprobs
    self.first = self.first or now
    self.last = now
    return self.transcript.push(tokens)

  def result(
    self, reason: str, peak_cache_bytes: int, compressed: bool = False
  ) -> _generation.Generation:
    """What it came to, after `transcript.finish`.

    Args:
      reason: why it ended.
      peak_cache_bytes: in use by all rows.
      compressed: whether the cache was made int8 by then.
    """
    transcript, seconds = self.transcript, self.last - self.first
    count = len(transcript.tokens)
    round_tokens = _cut(self.round_tokens, count)
    return _generation.Generation(
      text=transcript.text,
      tokens=tuple(transcript.tokens),
      pieces=tuple(transcript.pieces),
      round_tokens=round_tokens,
      round_sizes=tuple(self.round_sizes[: len(round_tokens)]),
      logprobs=(
        tuple(self.logprobs[:count]) if self.request.settings.logprobs else None
      ),
      prompt_tokens=self.request.prompt_length,
      finish_reason=reason,
      tokens_per_second=(
        (count - 1) / seconds if count > 1 and seconds > 0 else 0.0
      ),
      time_to_first_token_s=max(self.first - self.started, 0.0),
      waited_s=self.waited,
      peak_cache_bytes=peak_cache_bytes,
      compressed=compressed,
    )


def _cut(round_tokens: list[int], count: int) -> tuple[int, ...]:
  """Tokens that each round brought, of the first `count` tokens."""
  kept = []
  for tokens in round_tokens:
    if count <= 0:
      break
    kept.append(min(tokens, count))
    count -= tokens
  return tuple(kept)


def make_row(
  index: int, request: _request.Request, waited: float, now: float
) -> Row:
  """A row that nothing was read of yet.

  Args:
    index: number of the request.
    request: what is asked.
    waited: seconds in the queue.
    now: when it was given the row.
  """
  settings = request.settings
  return Row(
    index=index,
    request=request,
    transcript=text.Transcript(
      request.tokenizer, settings.stop, settings.min_new_tokens
    ),
    waited=waited,
    started=now,
  )


class Event(NamedTuple):
  """What a round that was read brought to one request."""

  request: int
  """Which one, as `Engine.submit` numbered it."""
  text: str
  """Text that is now certain; may be empty."""
  generation: _generation.Generation | None
  """Set with the last text."""


class Unread(NamedTuple):
  emitted: decoding.Round
  holders: list[Row | None]
  """Whom each row of the round belonged to; None for one that did not run."""
  size: int
  """Nodes of its tree; 1 for a prefill or a plain round."""
  rung: int | None
  """Which one of the ladder made it; None for a prefill or a plain round."""
  table: Array | None = None
  """[M] the block table behind a prefill, if its pages may be shared."""

  @property
  def is_prefill(self) -> bool:
    """Whether it is one whose pages may be shared."""
    return self.table is not None


def runs(row: Row | None) -> TypeGuard[Row]:
  """Whether a row is in use and has its pages."""
  return row is not None and not row.waiting


def unstarted(
  number: int, request: _request.Request, reason: str, waited: float
) -> Event:
  """The end of a request that never had a row."""
  row = make_row(number, request, waited, 0.0)
  return Event(number, "", row.result(reason, 0))
