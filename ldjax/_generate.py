"""Text in, text out."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Self

from ldjax import _engine, _generation, _request, _settings, assemble

_END = object()


def batch_for(count: int, batch_size: int) -> int:
  """Rows for a list of `count` requests: the next power of two.

  So that lists of various lengths share programs.

  Args:
    count: requests.
    batch_size: rows at most.

  Raises:
    ValueError: for a batch size below 1.
  """
  if batch_size < 1:
    raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
  rows = max(min(batch_size, count), 1)
  return min(batch_size, 1 << (rows - 1).bit_length())


class Stream(Iterator[str], AsyncIterator[str]):
  """Pieces of text as they come; joined they are the whole text.

  Iterate over it with `for` or `async for` (the work then runs in a thread,
  so that an event loop goes on). It can be closed in the middle, and is on
  leaving a `with` block; the model can be used again at once. After the last
  piece, or once it is closed, `result` holds the `Generation`.
  """

  def __init__(self, engine: _engine.Engine, number: int):
    self._engine = engine
    self._number = number
    # A task that was cancelled leaves its thread at work: close waits for it.
    self._lock = threading.Lock()
    self._closed = False
    self._result: _generation.Generation | None = None

  def __next__(self) -> str:
    with self._lock:
      try:
        while not self._closed and self._result is None:
          piece = ""
          for event in self._engine.advance():
            piece += event.text
            self._result = event.generation
          if self._result is not None:
            self._engine.close()
          if piece:
            return piece
      except BaseException:
        self._closed = True
        raise
    raise StopIteration

  async def __anext__(self) -> str:
    piece: Any = await asyncio.to_thread(next, self, _END)
    if piece is _END:
      raise StopAsyncIteration
    return piece

  def close(self) -> None:
    """Stops generating; `result` is then what there was, `"cancelled"`."""
    with self._lock:
      if not self._closed and self._result is None:
        self._engine.cancel(self._number)
        [event] = self._engine.advance()
        self._result = event.generation
      self._closed = True
      self._engine.close()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  @property
  def result(self) -> _generation.Generation:
    """The finished generation.

    Raises:
      RuntimeError: before the last piece was read, unless it was closed.
    """
    if self._result is None:
      raise RuntimeError(
        "the stream has not been read to its end, nor closed before"
      )
    return self._result


@_settings.takes_settings
def generate(
  model: assemble.LanguageModel,
  prompts: _request.Prompt | Sequence[_request.Prompt],
  settings: _settings.Settings | Sequence[_settings.Settings] | None = None,
  *,
  batch_size: int = 8,
  progress: assemble.Progress | None = None,
  **changes: Any,
) -> Any:
  """Generates text for one prompt or for a list of them.

  The text is the same with any draft, tree, batch size and order of prompts.

  Args:
    model: from `load`.
    prompts: one prompt (text, token ids, or a conversation) or a list of
      them. More prompts than `batch_size` take turns: a row that ends is
      given to the next prompt while the others go on.
    settings: one for all prompts or a list of one a prompt, see `Settings`.
    batch_size: rows that run together at most.
    progress: called with a line of text before a long compilation.
    **changes: settings by name (`max_new_tokens=32`, `temperature=0.8`, ...),
      one value for all prompts or a list of one a prompt.
      `stop`, `stop_ids` and `banned_ids` are the same for all prompts.

  Returns:
    A `Generation` for one prompt, a list of them for a list. In place of a
    `Generation` stands a list of them where `num_samples` is above 1.

  Raises:
    TypeError: for a setting that does not exist.
    ValueError: for settings out of range, an empty prompt, or one that does
      not fit; before any work is done.

  Example:
    ldjax.generate(model, "Name three rivers.", max_new_tokens=32).text
  """
  several = _request.is_several(prompts)
  each: list[Any] = list(prompts) if several else [prompts]
  settled = _settings.settle_each(settings, changes, len(each))
  requests = [
    _request.make_requests(
      model, prompt, one, f"prompt {row}" if len(each) > 1 else "the prompt"
    )
    for row, (prompt, one) in enumerate(zip(each, settled, strict=True))
  ]
  flat = [request for samples in requests for request in samples]
  batch = batch_for(
    sum(request.max_new_tokens > 0 for request in flat), batch_size
  )
  engine = _engine.Engine(model, batch, progress, share=len(flat) > 1)
  ended: dict[int, _generation.Generation] = {}
  try:
    for request in flat:
      engine.submit(request)
    while not engine.idle:
      for event in engine.advance():
        if event.generation is not None:
          ended[event.request] = event.generation
  finally:
    engine.close()
  in_order = iter([ended[number] for number in range(len(flat))])
  results = [
    next(in_order)
    if one.num_samples == 1
    else [next(in_order) for _ in range(one.num_samples)]
    for one in settled
  ]
  return results if several else results[0]


@_settings.takes_settings
def stream(
  model: assemble.LanguageModel,
  prompt: _request.Prompt,
  settings: _settings.Settings | None = None,
  *,
  progress: assemble.Progress | None = None,
  **changes: Any,
) -> Stream:
  """Generates text for one prompt, piece by piece.

  Args:
    model: from `load`.
    prompt: text, token ids, or a conversation.
    settings: see `Settings`.
    progress: called with a line of text before a long compilation.
    **changes: settings by name, as for `generate`.

  Returns:
    `Stream`, an iterator of str (and an asynchronous one) that never ends
    inside a character.

  Raises:
    TypeError: for a setting that does not exist.
    ValueError: as `generate` does, at the call.

  Example:
    for piece in ldjax.stream(model, "Tell me a story."):
      print(piece, end="", flush=True)
  """
  if _request.is_several(prompt):
    raise ValueError("stream takes one prompt; give a list to generate")
  settled = _settings.settle(settings, changes)
  if settled.num_samples > 1:
    raise ValueError(
      f"num_samples is {settled.num_samples}; stream gives one text, use"
      " generate for several"
    )
  [request] = _request.make_requests(model, prompt, settled)
  engine = _engine.Engine(model, 1, progress, share=False)
  return Stream(engine, engine.submit(request))
