"""`ldjax.plan`: tries what can be tried and writes down what to decode with."""

import dataclasses
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ldjax import (
  _generate,
  _request,
  _sharding,
  assemble,
  checkpoints,
  memory,
  models,
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
_TEXT = 64
"""Tokens of a text that errors are measured on."""
_WORTH = 1.01
"""How much faster another form of the model must be to be taken."""
_PAIRS = (6, 12, 24)
"""How many times plan and defaults run in turns, more if that can't tell."""
_NOT_SLOWER = 0.97
"""Where the 2.5 percentile of plan over default must be at least."""


class _Search:
  """One search for a plan: the model so far, and what was found."""

  def __init__(
    self,
    model: assemble.LanguageModel,
    batch: int,
    prompts: Sequence[Any],
    progress: assemble.Progress,
  ):
    self.model = model
    self.batch = batch
    self.say = progress
    self.evidence: dict[str, Any] = {}
    self.fused: tuple[str, ...] = ()
    self.precision: dict[str, str] = {}
    self.cache_dtype: str | None = None
    self.curves: list[dict[str, Any]] = []
    # Many rows have short prompts: what is measured is what comes after.
    longest = min(max(16, 512 // batch), model.max_len // 2)
    self.prompts = [
      _request.encode_prompt(model.tokenizer, prompt)[-longest:]
      for prompt in prompts
    ]
    self._texts: np.ndarray | None = None

  @property
  def sizes(self) -> list[int]:
    """T of the trees that this batch can pay for."""
    sizes = [rung.draft.size for rung in self.model.ladder]
    return [s for s in sizes if s == 1 or self.batch * s <= 64] or sizes[:1]

  @property
  def few_sizes(self) -> list[int]:
    """The least and the one in the middle."""
    return sorted({self.sizes[0], self.sizes[len(self.sizes) // 2]})

  def ratios(
    self, variants: Mapping[str, assemble.LanguageModel]
  ) -> dict[str, float]:
    """How many times faster than the model so far each variant steps."""
    now = "as it is"
    times = optimize.compare_steps(
      {now: self.model, **variants},
      self.few_sizes,
      batch=self.batch,
      rounds=9 if self.batch <= 8 else 5,
      progress=self.say,
    )
    found = {}
    for name in variants:
      medians = [
        statistics.median(
          old / new
          for old, new in zip(times[now][size], times[name][size], strict=True)
        )
        for size in self.few_sizes
      ]
      found[name] = math.prod(medians) ** (1 / len(medians))
    return found

  def texts(self) -> np.ndarray:
    """Texts of the model's own, [n, S], drawn at temperature 1."""
    if self._texts is None:
      prompts = [prompt[-16:] for prompt in self.prompts[:8]]
      wanted = _TEXT
      self.say(f"Writing {len(prompts)} texts to measure errors on (seconds)")
      runs = _generate.generate(
        dataclasses.replace(self.model, eos_token_ids=()),
        prompts,
        max_new_tokens=wanted,
        min_new_tokens=wanted,
        temperature=1.0,
        batch_size=len(prompts),
      )
      texts = [
        [*prompt, *run.tokens]
        for prompt, run in zip(prompts, runs, strict=True)
      ]
      size = min(map(len, texts))
      self._texts = np.array([text[-size:] for text in texts], np.int32)
    return self._texts

  def transformed(
    self, fused: Sequence[str] = (), precision: Mapping[str, str] | None = None
  ) -> assemble.LanguageModel:
    """The model so far with its parameters in another form."""
    config, params = self.model.config, self.model.params.target
    if fused:
      config, params = models.fuse(config, params, fused)
    if precision:
      config, params = optimize.narrowed(config, params, precision)
    return assemble.with_target(self.model, config, params)


def _fusion(search: _Search, budget: int) -> None:
  """Fewer products and fewer norms' weights, where steps become faster."""
  del budget
  model = search.model
  can = models.possible_fusions(model.config)
  if model.mesh is not None and model.mesh.shape.get("tensor", 1) > 1:
    search.evidence["fusion"] = {
      "change": "none",
      "why": "matrices are split over devices; joined ones would be exchanged",
    }
    return
  products = tuple(part for part in can if part != "norms")
  forms = {"+".join(parts): parts for parts in (products, can) if parts}
  ratios = search.ratios(
    {name: search.transformed(fused=parts) for name, parts in forms.items()}
  )
  found: dict[str, Any] = {"step_ratio": ratios}
  best = max(ratios, key=ratios.__getitem__, default=None)
  chosen = best if best is not None and ratios[best] >= _WORTH else None
  search.say("Compiling steps to count kernels and memory (seconds)")
  before = optimize.step_program(model, batch=search.batch)
  after = before
  if chosen is not None:
    search.fused = forms[chosen]
    search.model = search.transformed(fused=search.fused)
    after = optimize.step_program(search.model, batch=search.batch)
  for name, each, counts in (
    ("before", model, before),
    ("after", search.model, after),
  ):
    found[name] = {**counts._asdict(), "reused": counts.reused}
    if model.config.num_layers >= 3:
      found[name]["block_kernels"] = optimize.block_kernels(
        each.config, each.params.target
      )
  found["change"] = chosen or "none"
  search.evidence["fusion"] = found


def _precision(
  search: _Search, max_kl: float, max_changed: float, budget: int
) -> None:
  """Fewer bits where the device gains by it, within the bound."""
  model = search.model
  if max_kl == 0 or max_changed == 0:
    search.evidence["precision"] = {
      "change": "none",
      "why": "the bound is 0, so every matrix stays as it is",
    }
    return
  rows = [search.batch * size for size in search.few_sizes]
  search.say("Timing products in each precision (seconds)")
  gains = optimize.what_gains(model.params.target, model.config, rows)
  texts = search.texts()
  if not _fits(search, budget):
    search.cache_dtype = "int8"

  def on_group(done: int, count: int) -> None:
    if done % 10 == 0 or done == count:
      search.say(f"Measured the error of {done} of {count} parts of the model")

  search.say("Measuring errors, part by part (minutes for a large model)")
  choice, difference = optimize.choose_precision(
    model,
    texts,
    gains,
    max_kl=max_kl,
    max_changed=max_changed,
    cache_dtype=search.cache_dtype,
    on_group=on_group,
  )
  if difference.kl_bound > max_kl or difference.changed > max_changed:
    # The cache alone is over the bound.
    search.cache_dtype, choice = None, {}
  found: dict[str, Any] = {
    "candidates": len(gains),
    "chosen": len(choice),
    "kl": difference.kl,
    "kl_bound": difference.kl_bound,
    "changed": difference.changed,
    "tokens": int(texts.size),
    "max_kl": max_kl,
    "max_changed": max_changed,
  }
  before = _sharding.bytes_a_device(model.params.target)
  if choice:
    narrow = search.transformed(precision=choice)
    ratio = search.ratios({"fewer bits": narrow})["fewer bits"]
    found["step_ratio"] = ratio
    if ratio >= _WORTH:
      search.precision, search.model = choice, narrow
  found["parameter_bytes"] = [
    before,
    _sharding.bytes_a_device(search.model.params.target),
  ]
  counts: dict[str, int] = {}
  for bits in search.precision.values():
    counts[bits] = counts.get(bits, 0) + 1
  if search.cache_dtype is not None:
    counts[f"{search.cache_dtype} cache"] = 1
  found["change"] = ", ".join(f"{n} x {k}" for k, n in counts.items()) or "none"
  search.evidence["precision"] = found


def _page_bytes(model: assemble.LanguageModel) -> int:
  return jax.eval_shape(lambda: model.init_cache(1)).page_bytes


def _fits(search: _Search, budget: int) -> bool:
  """Whether the budget holds the longest sequence in every row."""
  model = search.model
  pages = search.batch * -(-model.max_len // model.page_size)
  weights = _sharding.bytes_a_device(model.params)
  return weights + pages * _page_bytes(model) <= budget


def _with_pages(
  model: assemble.LanguageModel, page_size: int
) -> assemble.LanguageModel:
  """The same model on pages of another size, as many positions in all."""
  dtype = jax.tree.leaves(model.params.target)[0].dtype
  scale = model.page_size / page_size

  def scaled(pages: int | None) -> int | None:
    return None if pages is None else max(1, math.ceil(pages * scale))

  changed = dataclasses.replace(
    model,
    page_size=page_size,
    initial_pages=scaled(model.initial_pages),
    num_pages=scaled(model.num_pages),
    init_cache=assemble.cache_factory(
      model.config,
      max_len=model.max_len,
      page_size=page_size,
      dtype=memory.cache_dtype(dtype),
    ),
  )
  return assemble.with_target(changed, model.config, model.params.target)


def _pages(search: _Search, budget: int) -> None:
  """The size of pages, and how many there are."""
  ratios = search.ratios({"64": _with_pages(search.model, 64)})
  # A larger page wastes half of itself more at the end of every row.
  if ratios["64"] >= 1.03:
    search.model = _with_pages(search.model, 64)
  model = search.model
  rows = None
  if bytes_each := _page_bytes(model):
    left = budget - _sharding.bytes_a_device(model.params)
    rows = left // (bytes_each * -(-model.max_len // model.page_size))
  search.evidence["pages"] = {
    "change": f"{model.page_size} positions a page",
    "step_ratio": ratios,
    "initial_pages": model.initial_pages,
    "num_pages": model.num_pages,
    "budget_bytes": budget,
    "longest_rows_that_fit": rows,
    "rule": "starts with 3 x the longest sequence, grows within the budget",
  }


def _tree(search: _Search) -> None:
  """What steps cost by size of tree and batch."""
  batches = sorted({1, *(b for b in (4, 16) if b < search.batch), search.batch})
  rates = {}
  model = search.model
  for batch in batches:
    sizes = [
      rung.draft.size
      for rung in model.ladder
      if rung.draft.size == 1 or batch * rung.draft.size <= 64
    ]
    curve = optimize.measure_costs(
      model,
      sizes,
      batch=batch,
      rounds=9 if batch <= 8 else 5,
      progress=search.say,
    )
    search.curves.append(dataclasses.asdict(curve))
    by_size = {
      str(rung.draft.size): batch
      * (rung.expected or 1.0)
      / curve.at(rung.draft.size)
      for rung in model.ladder
      if rung.draft.size in sizes
    }
    best = max(by_size, key=by_size.__getitem__)
    rates[str(batch)] = {"nodes": int(best), "tokens_per_second": by_size[best]}
  search.evidence["tree"] = {
    "change": "costs of every size",
    "projected_by_batch": rates,
  }


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
  times = {}
  for tensor in range(1, parallelism + 1):
    data = parallelism // tensor
    if parallelism % tensor or data > batch:
      continue
    shape = {"data": data, "tensor": tensor}
    name = f"{data}x{tensor}"
    say(f"Trying data x tensor = {name}")
    mesh = optimize.make_mesh(shape)
    model = assemble.load(path, mesh=mesh, **options)
    sizes = [model.ladder[len(model.ladder) // 2].draft.size]
    steps = optimize.compare_steps(
      {name: model}, sizes, batch=batch, rounds=5, progress=say
    )
    times[name] = statistics.median(steps[name][sizes[0]])
  best = min(times, key=times.__getitem__)
  data, tensor = map(int, best.split("x"))
  found.update(step_seconds=times, change=f"data x tensor = {best}")
  return {"data": data, "tensor": tensor}, found


def _race(
  default: assemble.LanguageModel, search: _Search, tokens: int
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
  for number in range(_PAIRS[-1]):
    names = list(contenders)[:: 1 if number % 2 else -1]
    for name in names:
      rates[name].append(run(name, group(number), tokens))
    if number + 1 in _PAIRS:
      logs = np.log(np.array(rates["plan"]) / np.array(rates["default"]))
      means = rng.choice(logs, (2000, len(logs))).mean(axis=1)
      low, middle, high = np.exp(np.percentile(means, (2.5, 50, 97.5)))
      # More pairs where these can't tell.
      if low >= _NOT_SLOWER or high < 1:
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
  if max_len is not None and max_len < 2 * _TEXT:
    raise ValueError(
      f"max_len is {max_len}; a plan is measured on texts of {_TEXT} tokens"
      f" behind a prompt, so give at least {2 * _TEXT}"
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
  search = _Search(default, batch_size, prompts, say)
  search.evidence["devices"] = laid
  steps = {
    "fusion": lambda: _fusion(search, budget),
    "precision": lambda: _precision(search, max_kl, max_changed, budget),
    "pages": lambda: _pages(search, budget),
    "tree": lambda: _tree(search),
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
