"""`ldjax.plan`: tries what can be tried and writes down what to decode with."""

import dataclasses
import math
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ldjax import (
  _generate,
  _plan_passes,
  _request,
  assemble,
  checkpoints,
  memory,
  optimize,
)

PASSES = ("fusion", "precision", "pages", "tree")
"""What `plan` may change, in this order."""

_PROMPTS = (
  "Explain to a child why the moon changes its shape.",
  "Write a short story about a lighthouse keeper who finds a letter.",
  "Write a Python function that returns the longest word of a sentence.",
  "What are three good habits for learning a language?",
  "Describe how bread is baked, step by step.",
  "A train leaves at 9:40 and arrives at 12:05. How long does it take?",
  "Write an email that moves a meeting from Tuesday to Thursday.",
  "Compare life in a village with life in a large city.",
)
_PAIRS = (6, 12, 24)
"""How many times plan and defaults run in turns, more if that can't tell."""
_ENOUGH = 120.0
"""Seconds after which no more of them are asked for."""
_NOT_SLOWER = 0.97
"""Where the 2.5 percentile of plan over default must be at least."""


def _choose_mesh(
  path: Any, parallelism: int, batch: int, options: dict[str, Any], say: Any
) -> tuple[dict[str, int] | None, dict[str, Any]]:
  """How to lay a model over devices: data x tensor."""
  devices = jax.local_devices()
  here = len(devices)
  if parallelism > here:
    if devices[0].platform != "cpu":
      raise ValueError(
        f"parallelism is {parallelism}; this machine has {here}"
        f" {devices[0].device_kind}; give at most that"
      )
    say(
      f"parallelism is {parallelism}, and this CPU is {here} device(s) to JAX:"
      f" going on with {here} (XLA_FLAGS=--xla_force_host_platform_device_count"
      f"={parallelism} divides it)"
    )
    parallelism = here
  found: dict[str, Any] = {"asked": parallelism, "devices": here}
  if parallelism == 1:
    return None, {**found, "change": "one device"}
  times, shapes = {}, {}
  for tensor in range(1, parallelism + 1):
    data = parallelism // tensor
    if parallelism % tensor or data > batch:
      continue
    shape = {"data": data, "tensor": tensor}
    name = f"{data}x{tensor}"
    shapes[name] = shape
    say(f"Trying data x tensor = {name}")
    mesh = optimize.make_mesh(shape)
    model = assemble.load(path, mesh=mesh, **options)
    sizes = [model.ladder[len(model.ladder) // 2].draft.size]
    steps = optimize.compare_steps(
      {name: model}, sizes, batch=batch, rounds=5, progress=say
    )
    times[name] = statistics.median(steps[name][sizes[0]])
  best = min(times, key=times.__getitem__)
  found.update(step_seconds=times, change=f"data x tensor = {best}")
  return shapes[best], found


def _race(
  default: assemble.LanguageModel, search: _plan_passes.Search, tokens: int
) -> dict[str, Any]:
  """Tokens a second of the defaults and of the plan, in turns."""

  def group(start: int) -> list[list[int]]:
    return [
      search.prompts[(start + row) % len(search.prompts)]
      for row in range(search.batch)
    ]

  contenders = {"default": default, "plan": search.model}
  rates: dict[str, list[float]] = {name: [] for name in contenders}

  def run(name: str, prompts: Sequence[Any], length: int) -> float:
    runs = _generate.generate(
      dataclasses.replace(contenders[name], eos_token_ids=()),
      prompts,
      max_new_tokens=length,
      min_new_tokens=length,
      batch_size=search.batch,
    )
    slowest = min(each.tokens_per_second for each in runs)
    return slowest * len(runs)

  search.say("Decoding with the defaults and with the plan, in turns")
  for name in contenders:
    # Twice: what a ladder has not compiled yet, it compiles meanwhile.
    for _ in range(2):
      run(name, group(0), tokens)
  rng = np.random.default_rng(0)
  began = time.monotonic()
  for number in range(_PAIRS[-1]):
    names = list(contenders)[:: 1 if number % 2 else -1]
    for name in names:
      rates[name].append(run(name, group(number), tokens))
    if number + 1 in _PAIRS:
      logs = np.log(np.array(rates["plan"]) / np.array(rates["default"]))
      means = rng.choice(logs, (2000, len(logs))).mean(axis=1)
      low, middle, high = np.exp(np.percentile(means, (2.5, 50, 97.5)))
      # More pairs where these can't tell.
      spent = time.monotonic() - began
      if low >= _NOT_SLOWER or high < 1 or spent > _ENOUGH:
        break
  return {
    "default": statistics.median(rates["default"]),
    "plan": statistics.median(rates["plan"]),
    "ratio": [float(low), float(middle), float(high)],
    "pairs": len(logs),
  }


def plan(
  path: str | os.PathLike[str] = "demo",
  *,
  draft: str = "auto",
  batch_size: int = 1,
  memory_budget: str | float = 0.75,
  parallelism: int = 1,
  max_kl: float = 0.0,
  max_changed: float = 1.0,
  max_len: int | None = None,
  passes: Sequence[str] = PASSES,
  prompts: Sequence[_request.Prompt] = _PROMPTS,
  progress: assemble.Progress | None = None,
) -> optimize.DecodePlan:
  """Looks at a model and this machine and chooses how to decode.

  Each pass changes one thing, measures what it brings and keeps it only if it
  brings something; at the end the whole is measured against the defaults, in
  turns, and if it may be slower than they are the plan is the defaults.

  Args:
    path: as for `load`.
    draft: as for `load`: "auto", "ngram", "none" or a folder.
    batch_size: B, rows to decode together.
    memory_budget: as for `load`; a share is of the device's memory.
    parallelism: devices to lay the model over, as data x tensor. More than the
      machine has are refused, but for a CPU, which goes on with what it is.
    max_kl: how far the model may go from itself for speed: the mean KL
      divergence in nats a token, with two standard errors on top, on texts of
      its own. With 0 all numbers stay as they are.
    max_changed: the largest share of greedy tokens that may change.
    max_len: as for `load`.
    passes: of "fusion", "precision", "pages" and "tree", those to make.
    prompts: to measure with; by default some of ldjax's own.
    progress: called with a line of text as it goes on.

  Returns:
    `optimize.DecodePlan`; `save` writes it, `load(path, plan=...)` follows it.

  Raises:
    FileNotFoundError, ValueError: as `load`; for unknown passes, sizes below 1
      and bounds that no error can keep.

  Example:
    plan = ldjax.plan("demo", max_kl=0.01)
    model = ldjax.load("demo", plan=plan)
  """
  for name, value in (("batch_size", batch_size), ("parallelism", parallelism)):
    if value < 1:
      raise ValueError(f"{name} is {value}; it must be at least 1")
  if not (0 <= max_kl < math.inf and 0 <= max_changed <= 1):
    raise ValueError(
      f"max_kl is {max_kl} and max_changed {max_changed}; give a divergence of"
      " at least 0 and a share between 0 and 1"
    )
  for each in passes:
    if each not in PASSES:
      raise ValueError(
        f"pass {each!r} is not known; there are {', '.join(PASSES)}"
      )
  if max_len is not None and max_len < 2 * _plan_passes.TEXT:
    raise ValueError(
      f"max_len is {max_len}; a plan is measured on texts of"
      f" {_plan_passes.TEXT} tokens behind a prompt, so give at least"
      f" {2 * _plan_passes.TEXT}"
    )
  if not prompts:
    raise ValueError("there are no prompts; give at least one to measure with")
  say = progress or (lambda line: None)
  budget = memory.parse_budget(memory_budget, memory.device_memory())
  say(
    f"Memory budget: {budget / 1e9:.1f} of {memory.device_memory() / 1e9:.1f}"
    " GB a device, for weights and pages"
  )
  options: dict[str, Any] = {
    "draft": draft,
    "max_len": max_len,
    "memory_budget": memory_budget,
  }
  # A download is announced; reading is seconds.
  checkpoints.resolve(path, say)
  say(f"Loading {os.fspath(path)}")
  mesh_shape, laid = _choose_mesh(path, parallelism, batch_size, options, say)
  default = assemble.load(
    path,
    mesh=None if mesh_shape is None else optimize.make_mesh(mesh_shape),
    **options,
  )
  search = _plan_passes.Search(default, batch_size, prompts, say)
  search.evidence["devices"] = laid
  steps = {
    "fusion": lambda: _plan_passes.fusion(search),
    "precision": lambda: _plan_passes.precision(
      search, max_kl, max_changed, budget
    ),
    "pages": lambda: _plan_passes.pages(search, budget),
    "tree": lambda: _plan_passes.tree(search),
  }
  for number, name in enumerate(PASSES, 1):
    if name in passes:
      say(f"Pass {number} of {len(PASSES)}: {name}")
      steps[name]()
  speed = _race(default, search, 32)
  kept = speed["ratio"][0] >= _NOT_SLOWER
  if not kept:
    say("The plan may be slower than the defaults; they stay")
    search.model, search.fused, search.precision = default, (), {}
    search.cache_dtype, search.curves = None, []
  if "tree" in search.evidence:
    rates = search.evidence["tree"]["projected_by_batch"]
    speed["projected"] = rates[str(batch_size)]["tokens_per_second"]
  search.evidence["kept"] = kept
  model = search.model
  return optimize.DecodePlan(
    machine=optimize.machine(),
    model=optimize.model_key(default.config, default.params.target),
    name=os.fspath(path),
    draft=draft,
    batch_size=batch_size,
    max_len=model.max_len,
    fused=search.fused,
    precision=search.precision,
    cache_dtype=search.cache_dtype,
    page_size=model.page_size,
    initial_pages=model.initial_pages,
    num_pages=model.num_pages,
    mesh=mesh_shape,
    curves=tuple(search.curves),
    evidence=search.evidence,
    tokens_per_second=speed,
  )
