"""The report of a profile: everything measured in one go."""

import dataclasses
import functools
import math
import os
import statistics
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ldjax import (
  _compilations,
  _request,
  _settings,
  assemble,
  bench,
  decoding,
  optimize,
)
from ldjax.profile import (
  _advice,
  _machine,
  _project,
  _replay,
  _rounds,
  _runs,
  _work,
)

_SIZES = (1, 2, 4, 8, 16)


@_settings.takes_settings
def profile(
  model: assemble.LanguageModel,
  prompts: Sequence[_request.Prompt],
  settings: _settings.Settings | None = None,
  *,
  batch_size: int = 1,
  rounds: int = 15,
  sizes: Sequence[int] = _SIZES,
  project: bool = False,
  trace: str | os.PathLike[str] | None = None,
  progress: assemble.Progress | None = None,
  machine: _machine.Machine | None = None,
  **changes: Any,
) -> dict[str, Any]:
  """Measures where the time of decoding goes, and what would help.

  The prompts are decoded as `generate` does it, and once more with each size of
  the model's ladder alone, in turns; the text is the same each time. Then the
  parts of a round, the cost curve (unless one is kept, see
  `optimize.measure_costs`), the machine's ceilings, the host and the cache.

  Args:
    model: from `load`.
    prompts: texts, token ids or conversations.
    settings: of all of them, see `Settings`.
    batch_size: B, prompts that are decoded together.
    rounds: how often each part and each step is measured by itself.
    sizes: T of the trees of the cost curve, where it is measured.
    project: whether to add a projection to other devices.
    trace: folder for a trace of JAX's profiler, of one group of prompts.
    progress: called with a line of text as it goes on.
    machine: ceilings, if they are known.
    **changes: settings by name.

  Returns:
    What `ldjax profile --json` writes; docs/guides/profiling.md says what
    stands in it. All times are seconds.

  Raises:
    TypeError: for a setting that does not exist.
    ValueError: for no prompts, a model on a mesh, several samples, a batch or
      rounds below 1, texts of fewer than 2 tokens, or what `generate` refuses;
      before any work is done.

  Example:
    report = ldjax.profile.profile(model, ["Why is the sky blue?"])
    print(report["advice"][0]["do"])
  """
  settled = _settings.settle(settings, changes)
  if not prompts:
    raise ValueError("there are no prompts; give at least one")
  if batch_size < 1:
    raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
  if model.mesh is not None:
    raise ValueError(
      f"the model lies on {model.mesh.size} devices, and the ceilings are those"
      " of one; load it without a mesh"
    )
  if rounds < 1:
    raise ValueError(f"rounds is {rounds}; it must be at least 1")
  if settled.num_samples > 1:
    raise ValueError(
      f"num_samples is {settled.num_samples}; one text a prompt is profiled"
    )
  if settled.max_new_tokens < 2:
    raise ValueError(
      f"max_new_tokens is {settled.max_new_tokens}; the first token comes from"
      " the prefill, so give at least 2"
    )
  requests = [
    request
    for number, prompt in enumerate(prompts)
    for request in _request.make_requests(
      model, prompt, settled, f"prompt {number}"
    )
  ]
  say = progress or (lambda line: None)
  with _compilations.counted_compilations() as compiled:
    say("Compiling every step and warming up")
    _runs.warm_up(model, prompts, settled, batch_size)
  with _compilations.counted_compilations() as late:
    runs = _runs.all_runs(model, requests, batch_size, say)
  observed = runs[0]
  counted = [each for run in observed for each in run.rounds]
  if not counted:
    raise ValueError(
      "every text ended with its prefill, so there is no round to measure; give"
      " other prompts"
    )
  texts = [one for run in observed for one in run.generations]
  speed = _speed(observed, counted, texts)
  size = max(
    speed["rounds_by_size"], key=lambda s: (speed["rounds_by_size"][s], -int(s))
  )
  say("Measuring the parts of a round")
  parts = _parts(model, requests, int(size), rounds)
  curve, source = optimize.load_costs(model, batch=batch_size), "kept"
  if curve is None:
    source = "measured"
    curve = optimize.measure_costs(
      model,
      sorted({*sizes, *(rung.draft.size for rung in model.ladder)}),
      batch=batch_size,
      rounds=rounds,
      keep=False,
      progress=say,
    )
  weights = max(jax.tree.leaves(model.params.target), key=jnp.size).dtype
  if machine is None:
    say("Measuring how fast this machine reads and multiplies")
    machine = _machine.measure_machine(weights)
  say("Watching the host and the cache")
  watch = _watch(model, requests[:batch_size], batch_size, trace)
  context = round(
    statistics.mean(x.prompt_tokens + len(x.tokens) / 2 for x in texts)
  )
  by_size = _runs.by_size(model, runs, curve)
  report: dict[str, Any] = {
    "model": model.name,
    "draft": _draft_name(model),
    "device": jax.devices()[0].device_kind,
    "jax": jax.__version__,
    "dtype": weights.name,
    "prompts": len(prompts),
    "max_new_tokens": settled.max_new_tokens,
    "batch_size": batch_size,
    "context": context,
    "speed": speed,
    "round": _round(parts, counted, int(size), curve.at(int(size)), watch),
    "sizes": by_size,
    "acceptance": _rounds.acceptance_by_depth(
      counted, {rung.draft.size: rung.draft.depth for rung in model.ladder}
    ),
    "machine": machine._asdict(),
    "step": _steps(model, curve, batch_size, context, machine),
    "work": "formula",
    "costs": {
      "source": source,
      "sizes": list(curve.sizes),
      "seconds": list(curve.seconds),
      "draft_seconds": list(curve.draft_seconds),
    },
    "ceiling": [each._asdict() for each in optimize.chain_ceiling(curve)],
    "compilations": {
      **dataclasses.asdict(compiled),
      "while_measuring": late.programs,
    },
    "cache": _cache(model, watch),
    "ngram": _ngram(model, requests, texts, by_size),
  }
  report["advice"] = _advice.advise(report)
  if project:
    report["projection"] = _project.project(
      model.config,
      {1: 1.0} | {x["size"]: max(x["tokens_a_round"], 1.0) for x in by_size},
      batch=batch_size,
      context=context,
      draft_bytes=_draft_bytes(model),
    )
  return report


def _draft_name(model: assemble.LanguageModel) -> str:
  """Without the folders above, which say where somebody's files lie."""
  return os.path.basename(os.path.normpath(model.draft_name))


def _speed(
  runs: Sequence[_rounds.Run],
  counted: Sequence[_rounds.Round],
  texts: Sequence[Any],
) -> dict[str, Any]:
  whole = _rounds.tally(counted)
  sizes = sorted({each.size for each in counted})
  all_seconds = sum(run.seconds for run in runs)
  return {
    "tokens": sum(len(each.tokens) for each in texts),
    "rounds": whole.rounds,
    "tokens_per_second": whole.rate,
    "tokens_a_round": whole.tokens_a_round,
    "seconds_a_round": whole.seconds_a_round,
    "mean_accepted": (
      sum(len(each.tokens) for each in texts)
      / max(sum(each.rounds for each in texts), 1)
    ),
    "rounds_by_size": {
      str(size): sum(each.size == size for each in counted) for size in sizes
    },
    "decode_seconds": whole.seconds,
    "prefill_seconds": all_seconds - whole.seconds,
  }


def _parts(
  model: assemble.LanguageModel,
  requests: Sequence[_request.Request],
  size: int,
  rounds: int,
) -> dict[str, float]:
  """`bench.breakdown` after the prompt of middle length, if it fits."""
  in_order = sorted(requests, key=lambda each: each.prompt_length)
  sizes = [rung.draft.size for rung in model.ladder]
  chosen = size if size in sizes else sizes[0]
  depth = model.ladder[sizes.index(chosen)].draft.depth
  request = in_order[len(in_order) // 2]
  room = model.max_len - request.prompt_length
  fitting = min(rounds, room // (depth + 1) - 4)
  if fitting < 1:
    request = in_order[0]
    room = model.max_len - request.prompt_length
    fitting = max(1, min(rounds, room // (depth + 1) - 4))
  return bench.breakdown(model, request.tokens, size=chosen, rounds=fitting)


def _round(
  parts: dict[str, float],
  counted: Sequence[_rounds.Round],
  size: int,
  step: float,
  watch: _rounds.Watch,
) -> dict[str, float]:
  seconds = statistics.median(
    each.seconds for each in counted if each.size == size
  )
  host = statistics.median(watch.host) if watch.host else 0.0
  return {
    "size": size,
    **{name: parts[name] for name in ("draft", "verify", "accept", "commit")},
    "step": step,
    "round": seconds,
    "host": host,
    # The device waits for the host at most while that works; what a round
    # takes besides is the machine's (other processes, clocks).
    "idle": min(max(seconds - step, 0.0), host),
  }


def _cache_dtype(model: assemble.LanguageModel) -> Any:
  """Of keys and values; where there are scales these are wider."""
  cache = jax.eval_shape(functools.partial(model.init_cache, 1))
  leaves = jax.tree.leaves(cache.pages)
  return min((x.dtype for x in leaves), key=lambda dtype: dtype.itemsize)


def _steps(
  model: assemble.LanguageModel,
  curve: optimize.CostCurve,
  batch: int,
  context: int,
  machine: _machine.Machine,
) -> list[dict[str, Any]]:
  found = []
  for size in curve.sizes:
    work = _work.step_work(
      model.config,
      model.params.target,
      size=size,
      batch=batch,
      context=context,
      cache_dtype=_cache_dtype(model),
    )
    seconds = max(curve.at(size) - curve.draft_at(size), 1e-9)
    found.append(
      {
        "size": size,
        "seconds": seconds,
        "flops": work.flops,
        "bytes": work.bytes,
        "weight_bytes": work.weight_bytes,
        "cache_bytes": work.cache_bytes,
        "bytes_per_second": work.bytes / seconds,
        "flops_per_second": work.flops / seconds,
        "share_of_read": work.bytes / seconds / machine.bytes_per_second,
        "share_of_flops": work.flops / seconds / machine.flops_per_second,
      }
    )
  return found


def _watch(
  model: assemble.LanguageModel,
  requests: Sequence[_request.Request],
  batch: int,
  trace: str | os.PathLike[str] | None,
) -> _rounds.Watch:
  watch = _rounds.Watch()
  _rounds.observe(model, requests, batch, watch)
  if trace is not None:
    with jax.profiler.trace(os.fspath(trace)):
      _rounds.observe(model, requests, batch)
  return watch


def _cache(
  model: assemble.LanguageModel, watch: _rounds.Watch
) -> dict[str, Any]:
  dtype = _cache_dtype(model)
  now = _work.position_bytes(model.config, dtype)
  fullest = max(watch.stats, key=lambda x: x.used_bytes, default=None)
  return {
    "dtype": dtype.name,
    "int8_ratio": _work.position_bytes(model.config, "int8") / now,
    "page_size": model.page_size,
    "page_bytes": 0 if fullest is None else fullest.page_bytes,
    "total_bytes": 0 if fullest is None else fullest.total_bytes,
    "peak_used_bytes": 0 if fullest is None else fullest.used_bytes,
    "waste_at_peak": 0.0 if fullest is None else fullest.waste,
    "mean_waste": (
      statistics.mean(x.waste for x in watch.stats) if watch.stats else 0.0
    ),
    "fragmentation": max((x.fragmentation for x in watch.stats), default=0.0),
  }


def _ngram(
  model: assemble.LanguageModel,
  requests: Sequence[_request.Request],
  texts: Sequence[Any],
  by_size: Sequence[dict[str, Any]],
) -> list[dict[str, Any]]:
  """What the n-gram draft brings, replayed, unless it is the model's own."""
  if model.draft_name == "ngram":
    return []
  known = [
    (request.tokens, text.tokens)
    for request, text in zip(requests, texts, strict=True)
  ]
  sizes = [each["size"] for each in by_size if each["size"] > 1] or _SIZES[1:]
  found = []
  for size in sizes:
    if size > max(_SIZES):
      continue  # a published tree may have more nodes than a chain ever pays
    replayed = _replay.replay(decoding.ngram(size - 1), known, model.max_len)
    found.append(
      {
        "size": size,
        "rounds": replayed.rounds,
        "tokens_a_round": replayed.tokens_a_round,
        "propose_seconds": replayed.propose_seconds,
      }
    )
  return found


def _draft_bytes(model: assemble.LanguageModel) -> dict[int, float]:
  """Of the draft's own weights in bf16, read once a level of the tree."""
  borrowed = {id(x) for x in jax.tree.leaves(model.params.target)}
  own = sum(
    2 * math.prod(x.shape)
    for x in jax.tree.leaves(model.params.draft)
    if id(x) not in borrowed
  )
  return {
    rung.draft.size: float(own * rung.draft.depth) for rung in model.ladder
  }
