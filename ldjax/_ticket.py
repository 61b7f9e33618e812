"""A request on its way through a server."""

import asyncio
import concurrent.futures
from collections.abc import Callable, Generator, Sequence
from typing import Any

from ldjax import _generation, _request, _settings


class Ticket:
  """A request on its way, as `Server.submit` gives it."""

  # What begins with an underscore is for the server.

  def __init__(
    self,
    number: int,
    prompt: _request.Prompt,
    settings: _settings.Settings,
    requests: Sequence[_request.Request],
    on_text: Callable[[str], None] | None,
    cancel: Callable[["Ticket"], None],
  ):
    self.number = number
    """Counts the server's tickets from 0."""
    self.prompt = prompt
    """As it was given."""
    self.settings = settings
    """As they were settled."""
    self._requests = requests
    self._on_text = on_text
    self._cancel = cancel
    self._ended: dict[int, _generation.Generation] = {}  # by sample
    self._given = 0  # characters that on_text has had
    self._skip = 0  # of what comes, what it has had before
    self._future: concurrent.futures.Future[Any] = concurrent.futures.Future()

  @property
  def done(self) -> bool:
    """Whether it has come to its end."""
    return self._future.done()

  def result(self, timeout: float | None = None) -> Any:
    """Waits for the `Generation`; a list where `num_samples` is above 1.

    Some thread has to iterate over the server meanwhile. In a coroutine
    `await` the ticket instead.

    Args:
      timeout: seconds to wait at most; None for as long as it takes.

    Raises:
      TimeoutError: if it takes longer.
      Exception: what `on_text` raised, or what ended the server.
    """
    return self._future.result(timeout)

  def cancel(self) -> None:
    """Ends it with what it has; its `finish_reason` says so."""
    self._cancel(self)

  def __repr__(self) -> str:
    return f"<Ticket {self.number}, {'done' if self.done else 'on its way'}>"

  def __await__(self) -> Generator[Any, None, Any]:
    return asyncio.wrap_future(self._future).__await__()

  def _left(self) -> list[tuple[int, _request.Request]]:
    """Its samples that have not ended: index and request."""
    return [
      (sample, request)
      for sample, request in enumerate(self._requests)
      if sample not in self._ended
    ]

  def _begin_again(self) -> None:
    """Expects the text from its start."""
    self._skip = self._given

  def _say(self, text: str) -> None:
    """Takes text as it comes."""
    text, self._skip = text[self._skip :], max(self._skip - len(text), 0)
    if text and self._on_text is not None and not self.done:
      self._given += len(text)
      self._on_text(text)

  def _fail(self, error: BaseException) -> None:
    """Takes what went wrong."""
    if not self.done:
      self._future.set_exception(error)

  def _end(self, sample: int, generation: _generation.Generation) -> bool:
    """Takes how a sample ended; whether it was the last."""
    self._ended[sample] = generation
    if self._left():
      return False
    samples = [self._ended[i] for i in range(len(self._requests))]
    several = self.settings.num_samples > 1
    if not self.done:
      self._future.set_result(samples if several else samples[0])
    return True
