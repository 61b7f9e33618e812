"""`ldjax.load`: a model that decodes as ldjax does, or as others do."""

import os
import pathlib
from typing import Any, Literal

import jax

from ldjax import _drafts, assemble, checkpoints, contrib, optimize

_COMPAT = ("medusa2",)

# What a plan says unless it is said to `load`, and the defaults.
_PLANNED: dict[str, Any] = {
  "max_len": None,
  "cache_dtype": None,
  "page_size": 16,
  "num_pages": None,
  "initial_pages": None,
}


def _heads(
  path: str | os.PathLike[str],
  draft: assemble.Draft,
  progress: assemble.Progress | None,
) -> pathlib.Path:
  """The folder of Medusa heads to decode with, before weights are read."""
  if draft == "auto":
    file = checkpoints.resolve(path, progress)
    if checkpoints.has_medusa_heads(file):
      return file
    return _drafts.medusa_heads_of(os.fspath(path))
  if not isinstance(draft, str | os.PathLike) or draft in ("ngram", "none"):
    raise ValueError(
      f"compat 'medusa2' decodes with Medusa heads, but draft is {draft!r};"
      " give their folder, or 'auto' for the model's own"
    )
  kind = checkpoints.inspect(draft).draft
  if kind != "medusa":
    raise ValueError(
      f"compat 'medusa2' decodes with Medusa heads, but {draft} holds"
      f" {kind or 'no'} heads; give the folder of some"
    )
  return pathlib.Path(draft)


def load(
  path: str | os.PathLike[str] = "demo",
  *,
  draft: assemble.Draft = "auto",
  tree: assemble.Tree | None = "auto",
  max_len: int | None = None,
  dtype: Any = None,
  cache_dtype: Any = None,
  page_size: int = 16,
  num_pages: int | None = None,
  initial_pages: int | None = None,
  memory_budget: str | float = 0.75,
  on_pressure: str = "preempt",
  mesh: jax.sharding.Mesh | None = None,
  compat: Literal["medusa2"] | None = None,
  plan: optimize.DecodePlan | str | os.PathLike[str] | None = None,
  progress: assemble.Progress | None = None,
) -> assemble.LanguageModel:
  """Loads a target and puts a decoder around it.

  Args:
    path: a `.gguf` file, a Hugging Face folder, `"org/name"` on the hub, or
      `"demo"` for SmolLM2-135M-Instruct (fetched once, 94 MB).
    draft: `"ngram"` (no weights), `"none"` or None for plain decoding, a
      folder with draft heads (ldjax's or Medusa's), a `DraftFn` of your own
      (see `with_draft` for its weights), or `"auto"`: the model's own heads
      if it is a Medusa-2 folder, the heads that come with ldjax for it if there
      are any, else `"ngram"`. The text is the
      same with any of them.
    tree: what the draft proposes, see `parse_tree`; `"auto"` or None for a
      ladder of sizes, among which each round's is chosen by how drafts fare
      and what a size costs (see `optimize.measure_costs`). The text is the
      same with any of them.
    max_len: the most tokens of a sequence, prompt included; default 2,048 or
      what the model was made for, if that is less.
    dtype: of the weights; default float32 on CPU, bfloat16 elsewhere.
    cache_dtype: of keys and values: "float32", "bfloat16", "float16", or in
      eight bits with scales "int8" or "float8_e4m3fn"; default that of the
      weights. A draft's own cache stays in the dtype of the weights.
    page_size: positions a page of the cache.
    num_pages: pages of the pool, shared by all rows, from the start on. By
      default it starts with three times the longest sequence, or what the
      batch can need if that is less, and doubles as rows need more.
    initial_pages: pages to start with; the pool then grows to `num_pages` or
      the budget.
    memory_budget: what weights and pool together may take of a device's
      memory: an amount like `"24GB"`, or a share like 0.75.
    on_pressure: what to do when rows need more than that: `"preempt"` (the
      newest gives its pages back and is computed again later), `"offload"`
      (its pages wait in the host's memory), `"compress"` (the whole cache
      becomes int8 once, then as with `"preempt"`; from there on the text is
      that of an int8 cache, and `Generation.compressed` says so) or `"error"`.
      With the first two the text is the same.
    mesh: devices to spread the model over, with an axis "tensor" that splits
      its matrices and the heads of its cache, and an axis "data" that splits
      the rows of a batch; either may be left out. What an axis does not
      divide (a number of heads, a vocabulary, a batch) is repeated along it.
      Pages of the cache are repeated along "data". The text is that of one
      device. Each parameter goes to its devices as it is read, so a model may
      be larger than the memory of one.
    compat: None, or `"medusa2"` to decode as the Medusa-2 reference does, to
      compare with: a fixed tree of 64 nodes in every round, logits of all
      heads at every node, `max_len` positions taken for each sequence. With
      `draft="auto"` the heads are the model's own, or those that come with
      ldjax for it. See `contrib.as_medusa2`, which also knows its typical
      acceptance.
    plan: from `ldjax.plan` or its file: how this model decodes best on this
      machine. It says the form of the weights, and the arguments above that are
      left at their defaults.
    progress: called with a line of text as loading goes on.

  Returns:
    `LanguageModel`, for `generate` and `stream`, or for its parts.

  Raises:
    FileNotFoundError: for a path or draft that is not there.
    TypeError: for a mesh that is none.
    ValueError: for files, settings or axes of a mesh that do not fit, naming
      them; for a plan of another machine or model.

  Example:
    model = ldjax.load("demo")
    print(ldjax.generate(model, "Why is the sky blue?").text)
  """
  options: dict[str, Any] = {
    "max_len": max_len,
    "dtype": dtype,
    "cache_dtype": cache_dtype,
    "page_size": page_size,
    "num_pages": num_pages,
    "initial_pages": initial_pages,
    "memory_budget": memory_budget,
    "on_pressure": on_pressure,
    "progress": progress,
  }
  if plan is not None:
    if compat is not None or dtype is not None:
      raise ValueError(
        "a plan says how to decode and in which dtypes; leave out compat and"
        " dtype, or the plan"
      )
    if not isinstance(plan, optimize.DecodePlan):
      plan = optimize.DecodePlan.read(plan)
    plan.check_machine()
    given = {
      name: getattr(plan, name)
      for name, default in _PLANNED.items()
      if options[name] == default and getattr(plan, name) is not None
    }
    model = assemble.load(
      path,
      draft=plan.draft if draft == "auto" else draft,
      tree=plan.tree if tree == "auto" else tree,
      mesh=plan.make_mesh() if mesh is None else mesh,
      **{**options, **given},
    )
    return optimize.apply(model, plan)
  if compat is None:
    return assemble.load(path, draft=draft, tree=tree, mesh=mesh, **options)
  if compat not in _COMPAT:
    raise ValueError(
      f"compat is {compat!r}; known are {', '.join(map(repr, _COMPAT))}, and"
      " None for ldjax's own way"
    )
  if mesh is not None:
    raise ValueError("compat 'medusa2' is for one device; leave out mesh")
  heads = _heads(path, draft, progress)
  model = assemble.load(path, draft="none", **options)
  wanted = None if tree == "auto" else tree
  return contrib.as_medusa2(model, heads, tree=wanted)
