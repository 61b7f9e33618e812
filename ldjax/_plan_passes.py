"""The passes of `ldjax.plan`, each of which changes one thing if it gains."""

import collections
import dataclasses
import math
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
  memory,
  models,
  optimize,
)

TEXT = 64
"""Tokens of a text that errors are measured on."""
_WORTH = 1.01
"""How much faster another form of the model must be to be taken."""


class Search:
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

  @property
  def few_sizes(self) -> list[int]:
    """T of the least tree that pays for this batch and of one in the middle."""
    sizes = _sizes(self.model, self.batch)
    # A model of one large tree has no other.
    sizes = sizes or [self.model.ladder[0].draft.size]
    return sorted({sizes[0], sizes[len(sizes) // 2]})

  def ratios(
    self, variants: Mapping[str, assemble.LanguageModel]
  ) -> dict[str, float]:
    """How many times faster than the model so far each variant steps."""
    now = "as it is"
    times = optimize.compare_steps(
      {now: self.model, **variants},
      self.few_sizes,
      batch=self.batch,
      rounds=_rounds(self.batch),
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
    prompts = [prompt[-16:] for prompt in self.prompts[:8]]
    self.say(f"Writing {len(prompts)} texts to measure errors on (seconds)")
    runs = _generate.generate(
      dataclasses.replace(self.model, eos_token_ids=()),
      prompts,
      max_new_tokens=TEXT,
      min_new_tokens=TEXT,
      temperature=1.0,
      batch_size=len(prompts),
    )
    texts = [
      [*prompt, *run.tokens] for prompt, run in zip(prompts, runs, strict=True)
    ]
    size = min(map(len, texts))
    return np.array([text[-size:] for text in texts], np.int32)


def _sizes(model: assemble.LanguageModel, batch: int) -> list[int]:
  """T of the trees that a batch can pay for."""
  sizes = [rung.draft.size for rung in model.ladder]
  return [size for size in sizes if size == 1 or batch * size <= 64]


def _rounds(batch: int) -> int:
  """How many steps of a batch are timed."""
  return 9 if batch <= 8 else 5


def fusion(search: Search) -> None:
  """Fewer products and fewer norms' weights, where steps become faster."""
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
  variants = {
    name: assemble.with_target(
      model, *models.fuse(model.config, model.params.target, parts)
    )
    for name, parts in forms.items()
  }
  ratios = search.ratios(variants)
  found: dict[str, Any] = {"step_ratio": ratios}
  best = max(ratios, key=ratios.__getitem__, default=None)
  chosen = best if best is not None and ratios[best] >= _WORTH else None
  search.say("Compiling steps to count kernels and memory (seconds)")
  before = optimize.step_program(model, batch=search.batch)
  after = before
  if chosen is not None:
    search.fused = forms[chosen]
    search.model = variants[chosen]
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


def precision(
  search: Search, max_kl: float, max_changed: float, budget: int
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
    narrow = assemble.with_target(
      model, *optimize.narrowed(model.config, model.params.target, choice)
    )
    ratio = search.ratios({"fewer bits": narrow})["fewer bits"]
    found["step_ratio"] = ratio
    if ratio >= _WORTH:
      search.precision, search.model = choice, narrow
  found["parameter_bytes"] = [
    before,
    _sharding.bytes_a_device(search.model.params.target),
  ]
  counts = collections.Counter(search.precision.values())
  if search.cache_dtype is not None:
    counts[f"{search.cache_dtype} cache"] = 1
  found["change"] = ", ".join(f"{n} x {k}" for k, n in counts.items()) or "none"
  search.evidence["precision"] = found


def _page_bytes(model: assemble.LanguageModel) -> int:
  return jax.eval_shape(lambda: model.init_cache(1)).page_bytes


def _fits(search: Search, budget: int) -> bool:
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


def pages(search: Search, budget: int) -> None:
  """The size of pages, and how many there are."""
  larger = _with_pages(search.model, 64)
  ratios = search.ratios({"64": larger})
  # A larger page wastes half of itself more at the end of every row.
  if ratios["64"] >= 1.03:
    search.model = larger
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


def tree(search: Search) -> None:
  """What steps cost by size of tree and batch."""
  batches = sorted({1, *(b for b in (4, 16) if b < search.batch), search.batch})
  rates = {}
  model = search.model
  for batch in batches:
    sizes = _sizes(model, batch)
    curve = optimize.measure_costs(
      model,
      sizes,
      batch=batch,
      rounds=_rounds(batch),
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
