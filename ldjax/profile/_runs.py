"""The real generations of a profile: as it is, and each size alone."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from ldjax import (
  _engine,
  _generate,
  _request,
  _settings,
  assemble,
  decoding,
  optimize,
)
from ldjax.profile import _rounds


def alone(model: assemble.LanguageModel) -> list[assemble.LanguageModel]:
  """The model with each of its sizes alone, plain decoding first.

  Args:
    model: from `load`.
  """
  ladder = model.ladder
  if ladder[0].draft.size > 1:
    root = decoding.root_only(model.draft)
    ladder = (assemble.Rung(root, model.fallback, 1.0), *ladder)
  return [
    dataclasses.replace(model, ladder=(rung,), start=0) for rung in ladder
  ]


def warm_up(
  model: assemble.LanguageModel,
  prompts: Sequence[_request.Prompt],
  settings: _settings.Settings,
  batch: int,
) -> None:
  """Compiles all that `all_runs` needs.

  Args:
    model: from `load`.
    prompts: to come.
    settings: of them.
    batch: B.
  """
  for method in (model, *alone(model)):
    engine = _engine.Engine(method, batch, share=False)
    engine.compile_ladder()
    engine.close()
  short = min(8, settings.max_new_tokens)
  brief = dataclasses.replace(
    settings,
    max_new_tokens=short,
    min_new_tokens=min(short, settings.min_new_tokens),
  )
  ends = [max(prompts, key=len), min(prompts, key=len)]
  for prompt in ends[: 1 + (len(ends[0]) != len(ends[1]))]:
    _generate.generate(model, [prompt] * batch, brief, batch_size=batch)


def all_runs(
  model: assemble.LanguageModel,
  requests: Sequence[_request.Request],
  batch: int,
  say: assemble.Progress,
) -> list[list[_rounds.Run]]:
  """Decodes with each method in turns, group of prompts by group.

  Args:
    model: from `load`.
    requests: all prompts.
    batch: B, also of a group.
    say: told of each group.

  Returns:
    For the model as it is, then for each of `alone`: a run a group.
  """
  methods = [model, *alone(model)]
  runs: list[list[_rounds.Run]] = [[] for _ in methods]
  groups = [
    requests[start : start + batch] for start in range(0, len(requests), batch)
  ]
  for number, group in enumerate(groups):
    say(f"Decoding group {number + 1} of {len(groups)} with every size")
    # Who goes first changes, so that a slow while is nobody's own.
    first = number % len(methods)
    order = list(range(len(methods)))
    for at in order[first:] + order[:first]:
      runs[at].append(_rounds.observe(methods[at], group, batch))
  return runs


def by_size(
  model: assemble.LanguageModel,
  runs: list[list[_rounds.Run]],
  curve: optimize.CostCurve,
) -> list[dict[str, Any]]:
  """What rounds of each size alone came to; their median time counts.

  Args:
    model: from `load`.
    runs: from `all_runs`.
    curve: of the model.
  """
  found = []
  for method, of_method in zip(alone(model), runs[1:], strict=True):
    size = method.draft.size
    rounds = [each for run in of_method for each in run.rounds]
    whole = _rounds.tally(rounds)
    seconds = statistics.median(x.seconds for x in rounds) if rounds else 0.0
    found.append(
      {
        "size": size,
        "depth": method.draft.depth,
        "rounds": whole.rounds,
        "tokens_a_round": whole.tokens_a_round,
        "seconds_a_round": seconds,
        "tokens_per_second": (
          whole.tokens / whole.rounds / seconds if seconds else 0.0
        ),
        "step_seconds": curve.at(size),
        "draft_seconds": curve.draft_at(size),
      }
    )
  return found
