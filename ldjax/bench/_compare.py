"""Methods of decoding side by side, on the same prompts, in one process."""

import collections
import dataclasses
import itertools
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

from ldjax import _generation, _settings, assemble
from ldjax.bench import _margin, _methods, _work

_REFERENCES = ("medusa2", "medusa2-tuned")
"""Methods that others are compared with besides the baseline."""

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
  methods: Mapping[str, _methods.Method],
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

    - `draft`: what proposes;
    - `tokens_per_second`: tokens after the first over the time after the
      first, all prompts together;
    - `speedup`: the median over prompts, or groups of `batch_size`, of the
      paired ratio; `over`: the same against `medusa2` and `medusa2-tuned`
      where they are;
    - `mean_accepted`: tokens emitted over rounds; `rounds_by_size`: rounds
      after prefill by the nodes of their trees;
    - `time_to_first_token_s` (median) and `peak_cache_bytes`;
    - `flops_per_token` and `bytes_per_token`: what XLA counts in the compiled
      rounds, the draft's part included, over the tokens that they brought
      (see `work_of`); the prompt is left out, of which a token took
      `prefill_flops_per_token`. None for a method that is not ldjax's;
    - `equal` (texts equal to plain decoding's, texts compared) and `near_ties`
      (of the unequal ones).

  Raises:
    ValueError: without the baseline, for several samples, or for a
      `batch_size` under 1.
  """
  plainly = methods.get(_methods.BASELINE)
  if not isinstance(plainly, assemble.LanguageModel):
    raise ValueError(f"the methods lack {_methods.BASELINE}, the baseline")
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
  work: dict[str, _work.MethodWork] = {}
  for name, method in methods.items():
    longest = 0
    for rows, prompt in itertools.product(
      {len(group) for group in together},
      {max(prompts, key=len), min(prompts, key=len)},
    ):
      ended = _methods.generate(method, [prompt] * rows, warm_up, batch_size)
      longest = max(longest, ended[0].prompt_tokens)
    if isinstance(method, assemble.LanguageModel):
      work[name] = _work.compile_method(method, batch_size, longest)
  groups: dict[str, list[_Group]] = {name: [] for name in methods}
  done = 0
  for number, group in enumerate(together):
    names = list(methods)
    first = number % len(names)
    for name in names[first:] + names[:first]:
      groups[name].append(
        _methods.generate(methods[name], group, settled, batch_size)
      )
    done += len(group)
    if on_prompt is not None:
      on_prompt(done)

  runs = {
    name: list(itertools.chain.from_iterable(each))
    for name, each in groups.items()
  }
  baseline = runs[_methods.BASELINE]

  def near_ties(name: str) -> Iterator[bool]:
    for prompt, run, plain in zip(prompts, runs[name], baseline, strict=True):
      if run.tokens != plain.tokens:
        yield _margin.is_near_tie(
          plainly, prompt, plain.tokens, run.tokens, settled
        )

  def work_fields(name: str) -> dict[str, float | None]:
    steps = work[name].steps if name in work else None
    each = steps and _work.work_per_token(steps, runs[name], batch_size)
    return {
      "flops_per_token": each.flops if each else None,
      "bytes_per_token": each.bytes if each else None,
      "prefill_flops_per_token": (
        work[name].prefill.flops if name in work else None
      ),
    }

  return {
    "model": plainly.name,
    "device": jax.devices()[0].device_kind,
    "prompts": len(prompts),
    "max_new_tokens": settled.max_new_tokens,
    "batch_size": batch_size,
    "methods": {
      name: {
        "draft": methods[name].draft_name,
        "tokens_per_second": _rate(groups[name]),
        "speedup": _speedup(groups[name], groups[_methods.BASELINE]),
        "over": {
          other: _speedup(groups[name], groups[other])
          for other in _REFERENCES
          if other in groups
        },
        "mean_accepted": (
          sum(len(run.tokens) for run in runs[name])
          / max(sum(run.rounds for run in runs[name]), 1)
        ),
        "rounds_by_size": _rounds_by_size(runs[name]),
        "time_to_first_token_s": statistics.median(
          run.time_to_first_token_s for run in runs[name]
        ),
        "peak_cache_bytes": max(run.peak_cache_bytes for run in runs[name]),
        **work_fields(name),
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
