"""Methods of decoding side by side, on the same prompts, in one process."""

import collections
import dataclasses
import itertools
import pathlib
import statistics
from collections.abc import (
  Callable,
  Iterable,
  Iterator,
  Mapping,
  Sequence,
)
from typing import Any, TypeAlias

import jax

from ldjax import (
  _drafts,
  _engine,
  _generate,
  _generation,
  _settings,
  assemble,
  contrib,
)
from ldjax.bench import _margin

BASELINE = "autoregressive"
"""The method that all others are compared with: plain decoding."""


def make_methods(
  model: assemble.LanguageModel, names: Sequence[str]
) -> dict[str, assemble.LanguageModel]:
  """Puts a decoder for each method around one set of weights.

  Args:
    model: as `generate` would use it; that is the method `ldjax`.
    names: `autoregressive`, `ngram`, `ldjax`, `medusa2` (see
      `contrib.as_medusa2`) with the heads that come with ldjax for the model
      or `medusa2:FOLDER` with others, or a folder with draft heads (called by
      the folder's name).

  Raises:
    ValueError: for an unknown name, with the known ones, or one given twice.
  """
  methods: dict[str, assemble.LanguageModel] = {}
  for name in names:
    if name == BASELINE:
      label, method = name, assemble.with_draft(model, "none")
    elif name == "ngram":
      label, method = name, assemble.with_draft(model, "ngram")
    elif name == "ldjax":
      label, method = name, model
    elif name == "medusa2" or name.startswith("medusa2:"):
      folder = name.partition(":")[2] or _drafts.medusa_heads_of(model.name)
      label, method = "medusa2", contrib.as_medusa2(model, folder)
    elif pathlib.Path(name).is_dir():
      label = pathlib.Path(name).name
      method = assemble.with_draft(model, name)
    else:
      raise ValueError(
        f"no method is called {name!r}; there are {BASELINE}, ngram, ldjax,"
        " medusa2, medusa2:FOLDER, or the folder of a draft"
      )
    if label in methods:
      raise ValueError(f"method {label} is there twice")
    methods[label] = method
  return methods


_Group: TypeAlias = Sequence[_generation.Generation]
"""What one call decoded together."""


def _tokens_and_seconds(group: _Group) -> tuple[int, float]:
  """Tokens after each text's first, and how long the slowest text took."""
  timed = [run for run in group if run.tokens_per_second]
  counts = [len(run.tokens) - 1 for run in timed]
  seconds = (
    count / run.tokens_per_second
    for count, run in zip(counts, timed, strict=True)
  )
  return sum(counts), max(seconds, default=0.0)


def _rate(groups: Iterable[_Group]) -> float:
  """Tokens after the first a second, one group after another."""
  pairs = [_tokens_and_seconds(group) for group in groups]
  seconds = sum(time for _, time in pairs)
  return sum(count for count, _ in pairs) / seconds if seconds else 0.0


def _speedup(
  groups: Sequence[_Group], baseline: Sequence[_Group]
) -> float | None:
  """The median over groups of the ratio of rates, where there are rates."""
  ratios = [
    _rate([group]) / _rate([plain])
    for group, plain in zip(groups, baseline, strict=True)
    if _rate([plain])
  ]
  return statistics.median(ratios) if ratios else None


def _compile(method: assemble.LanguageModel, batch_size: int) -> None:
  """Compiles every step of a method, so that none is in what is measured."""
  engine = _engine.Engine(method, batch_size, share=False)
  engine.compile_ladder()
  engine.close()


def _rounds_by_size(
  runs: Sequence[_generation.Generation],
) -> dict[str, int]:
  """How many rounds each size of tree had; keys as JSON has them."""
  counts = collections.Counter(
    size for run in runs for size in run.round_sizes[1:]
  )
  return {str(size): counts[size] for size in sorted(counts)}


@_settings.takes_settings
def compare(
  methods: Mapping[str, assemble.LanguageModel],
  prompts: Sequence[str],
  settings: _settings.Settings | None = None,
  *,
  batch_size: int = 1,
  on_prompt: Callable[[int], None] | None = None,
  **changes: Any,
) -> dict[str, Any]:
  """Measures methods against plain decoding, interleaved prompt by prompt.

  Every method decodes every prompt, or every `batch_size` of them together,
  after a warm-up; who goes first changes each time. A median of paired ratios
  is what a noisy machine leaves standing.

  Args:
    methods: from `make_methods`; `autoregressive` must be among them.
    prompts: texts.
    settings: for all methods alike, see `Settings`.
    batch_size: how many prompts are decoded together, B; at least 1.
    on_prompt: called with the number of prompts done.
    **changes: settings by name.

  Returns:
    What `ldjax bench --json` writes: `model`, `device`, `prompts`,
    `max_new_tokens`, `batch_size`, and for each of `methods`
    `tokens_per_second` (tokens after the first over the time after the first,
    all prompts together), `speedup` (median over prompts, or groups of
    `batch_size`, of the paired ratio), `mean_accepted`
    (tokens emitted over rounds), `rounds_by_size` (rounds after prefill by
    the nodes of their trees), `time_to_first_token_s` (median),
    `peak_cache_bytes`, `equal` (texts equal to plain decoding's, texts
    compared) and `near_ties` (of the unequal ones).

  Raises:
    ValueError: without the baseline, for several samples, or for a
      `batch_size` under 1.
  """
  if BASELINE not in methods:
    raise ValueError(f"the methods lack {BASELINE}, the baseline")
  some = next(iter(methods.values()))
  settled = _settings.settle(settings, changes)
  if settled.num_samples > 1:
    raise ValueError(
      f"num_samples is {settled.num_samples}; one text a prompt is compared"
    )
  if batch_size < 1:
    raise ValueError(f"batch_size is {batch_size}; give at least 1")
  short = min(8, settled.max_new_tokens)
  warm_up = dataclasses.replace(
    settled,
    max_new_tokens=short,
    min_new_tokens=min(short, settled.min_new_tokens),
  )
  together = [
    list(prompts[start : start + batch_size])
    for start in range(0, len(prompts), batch_size)
  ]
  for method in methods.values():
    _compile(method, batch_size)
    for prompt in {max(prompts, key=len), min(prompts, key=len)}:
      _generate.generate(method, [prompt], warm_up, batch_size=batch_size)
  groups: dict[str, list[_Group]] = {name: [] for name in methods}
  done = 0
  for number, group in enumerate(together):
    names = list(methods)
    first = number % len(names)
    for name in names[first:] + names[:first]:
      groups[name].append(
        _generate.generate(methods[name], group, settled, batch_size=batch_size)
      )
    done += len(group)
    if on_prompt is not None:
      on_prompt(done)

  runs = {
    name: list(itertools.chain.from_iterable(each))
    for name, each in groups.items()
  }
  baseline = runs[BASELINE]

  def near_ties(name: str) -> Iterator[bool]:
    for prompt, run, plain in zip(prompts, runs[name], baseline, strict=True):
      if run.tokens != plain.tokens:
        yield _margin.is_near_tie(
          some, prompt, plain.tokens, run.tokens, settled
        )

  return {
    "model": some.name,
    "device": jax.devices()[0].device_kind,
    "prompts": len(prompts),
    "max_new_tokens": settled.max_new_tokens,
    "batch_size": batch_size,
    "methods": {
      name: {
        "tokens_per_second": _rate(groups[name]),
        "speedup": _speedup(groups[name], groups[BASELINE]),
        "mean_accepted": (
          sum(len(run.tokens) for run in runs[name])
          / max(sum(run.rounds for run in runs[name]), 1)
        ),
        "rounds_by_size": _rounds_by_size(runs[name]),
        "time_to_first_token_s": statistics.median(
          run.time_to_first_token_s for run in runs[name]
        ),
        "peak_cache_bytes": max(run.peak_cache_bytes for run in runs[name]),
        "equal": [
          sum(
            run.tokens == plain.tokens
            for run, plain in zip(runs[name], baseline, strict=True)
          ),
          len(prompts),
        ],
        "near_ties": sum(near_ties(name)),
      }
      for name in methods
    },
  }
