"""Methods of decoding side by side, on the same prompts, in one process."""

import pathlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from ldjax import _generate, assemble
from ldjax import sampling as sampling_lib
from ldjax.bench import _margin

BASELINE = "autoregressive"


def make_methods(
  model: assemble.LanguageModel, names: Sequence[str]
) -> dict[str, assemble.LanguageModel]:
  """Puts a decoder for each method around one set of weights.

  Args:
    model: as `generate` would use it; that is the method `ldjax`.
    names: `autoregressive`, `ngram`, `ldjax`, or a folder with draft heads
      (called by the folder's name).

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
    elif pathlib.Path(name).is_dir():
      label = pathlib.Path(name).name
      method = assemble.with_draft(model, name)
    else:
      raise ValueError(
        f"no method is called {name!r}; there are {BASELINE}, ngram, ldjax, or"
        " the folder of a draft"
      )
    if label in methods:
      raise ValueError(f"method {label} is there twice")
    methods[label] = method
  return methods


def _run(
  method: assemble.LanguageModel, prompt: str, settings: Mapping[str, Any]
) -> _generate.Generation:
  result: _generate.Generation = _generate.generate(method, prompt, **settings)
  # The round that was enqueued in vain must not run into the next method.
  jax.effects_barrier()
  return result


def _ratio(
  runs: Sequence[_generate.Generation],
  baseline: Sequence[_generate.Generation],
) -> float | None:
  ratios = [
    run.tokens_per_second / plain.tokens_per_second
    for run, plain in zip(runs, baseline, strict=True)
    if plain.tokens_per_second
  ]
  return statistics.median(ratios) if ratios else None


def _total_rate(runs: Sequence[_generate.Generation]) -> float:
  tokens = sum(len(run.tokens) - 1 for run in runs if run.tokens_per_second)
  seconds = sum(
    (len(run.tokens) - 1) / run.tokens_per_second
    for run in runs
    if run.tokens_per_second
  )
  return tokens / seconds if seconds else 0.0


def compare(
  methods: Mapping[str, assemble.LanguageModel],
  prompts: Sequence[str],
  *,
  max_new_tokens: int = 128,
  temperature: float | None = None,
  top_k: int | None = None,
  top_p: float | None = None,
  seed: int = 0,
  chat: bool | None = None,
  on_prompt: Callable[[int], None] | None = None,
) -> dict[str, Any]:
  """Measures methods against plain decoding, interleaved prompt by prompt.

  Every method decodes every prompt alone (batch 1), after a warm-up; who goes
  first changes with each prompt. A median of paired ratios is what a noisy
  machine leaves standing.

  Args:
    methods: from `make_methods`; `autoregressive` must be among them.
    prompts: texts.
    max_new_tokens: tokens to emit for each at most.
    temperature: 0 or None is greedy; as are the rest, for all methods alike.
    top_k: see `generate`.
    top_p: see `generate`.
    seed: see `generate`.
    chat: see `generate`.
    on_prompt: called with the number of prompts done.

  Returns:
    What `ldjax bench --json` writes: `model`, `device`, `prompts`,
    `max_new_tokens`, and for each of `methods` `tokens_per_second` (tokens
    after the first over the time after the first, all prompts together),
    `speedup` (median over prompts of the paired ratio), `mean_accepted`
    (tokens emitted over rounds), `time_to_first_token_s` (median),
    `peak_cache_bytes`, `equal` (texts equal to plain decoding's, texts
    compared) and `near_ties` (of the unequal ones).

  Raises:
    ValueError: without the baseline.
  """
  if BASELINE not in methods:
    raise ValueError(f"the methods lack {BASELINE}, the baseline")
  some = next(iter(methods.values()))
  settings = {
    "max_new_tokens": max_new_tokens,
    "temperature": temperature,
    "top_k": top_k,
    "top_p": top_p,
    "seed": seed,
    "chat": chat,
  }
  for method in methods.values():
    for prompt in {max(prompts, key=len), min(prompts, key=len)}:
      _run(method, prompt, {**settings, "max_new_tokens": 8})
  runs: dict[str, list[_generate.Generation]] = {n: [] for n in methods}
  for number, prompt in enumerate(prompts):
    names = list(methods)
    first = number % len(names)
    for name in names[first:] + names[:first]:
      runs[name].append(_run(methods[name], prompt, settings))
    if on_prompt is not None:
      on_prompt(number + 1)

  sampling = sampling_lib.make_sampling(
    1, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
  )
  baseline = runs[BASELINE]

  def near_ties(name: str) -> Iterator[bool]:
    for prompt, run, plain in zip(prompts, runs[name], baseline, strict=True):
      if run.tokens != plain.tokens:
        ids = _generate.encode_prompt(some.tokenizer, prompt, chat)
        yield _margin.is_near_tie(some, ids, plain.tokens, run.tokens, sampling)

  return {
    "model": some.name,
    "device": jax.devices()[0].device_kind,
    "prompts": len(prompts),
    "max_new_tokens": max_new_tokens,
    "methods": {
      name: {
        "tokens_per_second": _total_rate(runs[name]),
        "speedup": _ratio(runs[name], baseline),
        "mean_accepted": (
          sum(len(run.tokens) for run in runs[name])
          / max(sum(run.rounds for run in runs[name]), 1)
        ),
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
