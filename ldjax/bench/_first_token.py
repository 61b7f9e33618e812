"""Time to the first token: of short, long and repeated prompts."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ldjax import _engine, _request, _settings, assemble
from ldjax.bench import _methods

SHORT, LONG, SYSTEM = 32, 1024, 512
"""Tokens of a short prompt, of a long one, and of a system prompt; of the last
two less where the model holds less."""
_QUESTION = 16
_SETTINGS = _settings.Settings(max_new_tokens=2)


@dataclasses.dataclass
class _Runner:
  """One method; a system prompt that it has read once stays read."""

  method: _methods.Method

  def __post_init__(self):
    self._engine = None
    if isinstance(self.method, assemble.LanguageModel):
      self._engine = _engine.Engine(self.method, 1)

  def seconds(self, tokens: list[int]) -> float:
    """To the first token of a request that runs alone."""
    if self._engine is None:
      [run] = _methods.generate(self.method, [tokens], _SETTINGS, 1)
      return run.time_to_first_token_s
    [request] = _request.make_requests(self._engine.model, tokens, _SETTINGS)
    self._engine.submit(request)
    found = 0.0
    while not self._engine.idle:
      for event in self._engine.advance():
        if event.generation is not None:
          found = event.generation.time_to_first_token_s
    return found

  def close(self) -> None:
    """Gives up what is held."""
    if self._engine is not None:
      self._engine.close()


def first_token(
  methods: Mapping[str, _methods.Method],
  *,
  rounds: int = 5,
  seed: int = 0,
  on_round: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
  """Measures the time to the first token, one request at a time.

  Prompts are random tokens, new in every round, the same for all methods; the
  methods take turns. A round asks for a short prompt, a long one, one that
  begins with a new system prompt, and another one that begins with the same.

  Args:
    methods: from `make_methods`.
    rounds: that are measured, after one that compiles.
    seed: of the tokens.
    on_round: called with the number of rounds done, that one included.

  Returns:
    `model`, `rounds`, `tokens` (of the kinds of prompt), and by method the
    medians in seconds: `short`, `long`, `new` and `repeated`; `ratio` is the
    median of repeated over new.

  Raises:
    ValueError: for fewer than 1 round, or a model that does not hold a system
      prompt longer than a short prompt.

  Example:
    report = ldjax.bench.first_token(make_methods(model, ["autoregressive"]))
  """
  models = [
    each if isinstance(each, assemble.LanguageModel) else each.model
    for each in methods.values()
  ]
  room = min(model.max_len for model in models) - 2
  lengths = {
    "short": SHORT,
    "long": min(LONG, room),
    "system": min(SYSTEM, room - _QUESTION),
  }
  if rounds < 1:
    raise ValueError(f"rounds is {rounds}; give at least 1")
  if lengths["system"] <= SHORT:
    raise ValueError(
      f"max_len is {room + 2}; give at least {SHORT + _QUESTION + 3}"
    )
  rng = np.random.default_rng(seed)
  vocab = min(model.config.vocab_size for model in models)

  def draw(length: int) -> list[int]:
    return rng.integers(0, vocab, length).tolist()

  found: dict[str, dict[str, list[float]]] = {
    name: {kind: [] for kind in ("short", "long", "new", "repeated")}
    for name in methods
  }
  runners = {name: _Runner(method) for name, method in methods.items()}
  for turn in range(rounds + 1):
    system = draw(lengths["system"])
    prompts = {
      "short": draw(SHORT),
      "long": draw(lengths["long"]),
      "new": system + draw(_QUESTION),
      "repeated": system + draw(_QUESTION),
    }
    names = list(methods)
    first = turn % len(names)
    for kind, tokens in prompts.items():
      for name in names[first:] + names[:first]:
        seconds = runners[name].seconds(tokens)
        if turn:  # the first turn compiles
          found[name][kind].append(seconds)
    on_round(turn + 1)
  for runner in runners.values():
    runner.close()
  return {
    "model": models[0].name,
    "rounds": rounds,
    "tokens": lengths,
    "methods": {
      name: {
        **{kind: statistics.median(each) for kind, each in kinds.items()},
        "ratio": statistics.median(
          again / new
          for again, new in zip(kinds["repeated"], kinds["new"], strict=True)
        ),
      }
      for name, kinds in found.items()
    },
  }
