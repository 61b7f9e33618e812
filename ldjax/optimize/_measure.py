"""Measuring what a round costs at each size of tree."""

import functools
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ldjax import assemble, decoding
from ldjax import sampling as sampling_lib
from ldjax.optimize import _cost, _costs_file

SIZES = (1, 2, 4, 8, 16)
"""What is measured unless other sizes are asked for."""

_PROMPT = 256
_PROMPTS = 1024
"""Tokens that the rows have read together, at most, but 16 each at least."""


@functools.lru_cache(maxsize=64)
def _filler(draft: decoding.DraftFn, size: int) -> decoding.DraftFn:
  """A chain of the same tokens for ever, on the state of another draft."""

  def propose(draft_params, draft_state, context):
    del draft_params
    batch = context.length.shape[0]
    tokens = jnp.zeros((batch, size), jnp.int32)
    parents = jnp.arange(-1, size - 1, dtype=jnp.int32)
    parents = jnp.broadcast_to(parents[None], (batch, size))
    return decoding.Candidates(tokens, parents), draft_state

  return draft._replace(propose=propose, size=size, depth=size - 1)


def _draft_of(model: assemble.LanguageModel, size: int) -> decoding.DraftFn:
  for rung in model.ladder:
    if rung.draft.size == size:
      return rung.draft
  if size == 1:
    return decoding.root_only(model.draft)
  return _filler(model.draft, size)


class _Middle:
  """A state in the middle of random texts; steps of any size move it on."""

  def __init__(self, model: assemble.LanguageModel, batch: int):
    self._model, self._batch = model, batch
    plain = model.fallback
    self._empty = jax.jit(plain.empty, static_argnums=1)
    self._admit = jax.jit(plain.admit, donate_argnums=0)
    self._prefill = jax.jit(plain.prefill, static_argnums=3, donate_argnums=1)
    self._begin()

  def _begin(self) -> None:
    model = self._model
    length = min(model.max_len // 2, _PROMPT, max(16, _PROMPTS // self._batch))
    rng = np.random.default_rng(0)
    vocab = model.config.vocab_size
    sampling = jax.tree.map(lambda x: x[0], sampling_lib.make_sampling(1))
    chunk = model.prefill_chunks[-1]
    state = self._empty(model.params, self._batch)
    for row in range(self._batch):
      prompt = np.zeros((model.max_len,), np.int32)
      prompt[:length] = rng.integers(0, vocab, length)
      state = self._admit(
        state,
        np.int32(row),
        prompt,
        np.int32(length),
        sampling,
        np.int32(model.max_len),
        decoding.stop_ids_row(()),
      )
      for _ in range(0, length, chunk):
        state, _ = self._prefill(
          model.params, state, jnp.full((1,), row, jnp.int32), chunk
        )
    self.state = state

  def context(self) -> decoding.DraftContext:
    """What a draft sees of it."""
    state = self.state
    return decoding.DraftContext(state.tokens, state.length, state.sampling)

  def step(self, step: Callable[..., Any], size: int) -> float:
    """Seconds of one step, after which it is that much further on."""
    if int(self.state.length.max()) + size >= self._model.max_len:
      self._begin()
    jax.block_until_ready(self.state)
    began = time.perf_counter()
    self.state, emitted = step(self._model.params, self.state)
    jax.block_until_ready((self.state, emitted))
    return time.perf_counter() - began


def measure_costs(
  model: assemble.LanguageModel,
  sizes: Sequence[int] = SIZES,
  *,
  batch: int = 1,
  rounds: int = 15,
  keep: bool = True,
  progress: assemble.Progress | None = None,
) -> _cost.CostCurve:
  """Measures whole steps of a model's decoder by the size of the tree.

  A size that the model's ladder has is measured with its draft; any other
  with a chain that costs nothing to propose. The sizes take turns, on one
  state in the middle of a text, and the medians count: what slows the machine
  for a while slows all of them. The curve is kept in the user's cache folder
  (`ldjax/costs/` in `$XDG_CACHE_HOME`, else `~/.cache`), where adaptive
  decoding finds it.

  Args:
    model: from `load`.
    sizes: T of the trees, in any order; 1 is measured in any case.
    batch: B, rows that run together.
    rounds: steps at each size.
    keep: whether adaptive decoding is to find the curve from now on.
    progress: called with a line of text before each compilation.

  Returns:
    `CostCurve`.

  Raises:
    ValueError: for sizes, a batch or rounds below 1, or a size that the
      model's `max_len` has no room for.

  Example:
    curve = ldjax.optimize.measure_costs(model)
    print(curve.ratio(8))
  """
  ordered = sorted({1, *sizes})
  largest = (model.max_len - 2) // 2
  for name, value in (
    ("size", ordered[0]),
    ("batch", batch),
    ("rounds", rounds),
  ):
    if value < 1:
      raise ValueError(f"{name} is {value}; it must be at least 1")
  if ordered[-1] > max(largest, 1):
    raise ValueError(
      f"size {ordered[-1]} does not fit into the second half of"
      f" {model.max_len} positions; give sizes up to {largest}, or load the"
      " model with a larger max_len"
    )
  say = progress or (lambda line: None)
  say(f"Compiling the prefill for {batch} rows (seconds)")
  middle = _Middle(model, batch)
  steps: dict[int, Any] = {}
  proposes: dict[int, Any] = {}
  for size in ordered:
    draft = _draft_of(model, size)
    decoder = assemble.decoder_with(model, draft)
    steps[size] = jax.jit(decoder.step, donate_argnums=1)
    proposes[size] = jax.jit(draft.propose)
    say(f"Compiling a step of {size} nodes for {batch} rows (seconds)")
    middle.step(steps[size], size)
    _propose(proposes[size], model, middle)
  whole: dict[int, list[float]] = {size: [] for size in ordered}
  part: dict[int, list[float]] = {size: [] for size in ordered}
  for _ in range(rounds):
    for size in ordered:
      whole[size].append(middle.step(steps[size], size))
      part[size].append(_propose(proposes[size], model, middle))
  seconds = tuple(statistics.median(whole[size]) for size in ordered)
  curve = _cost.CostCurve(
    sizes=tuple(ordered),
    seconds=seconds,
    draft_seconds=tuple(
      0.0 if size == 1 else min(statistics.median(part[size]), all_of_it)
      for size, all_of_it in zip(ordered, seconds, strict=True)
    ),
    batch=batch,
    device=_costs_file.device_of(model).device_kind,
    model=_costs_file.fingerprint(model, batch),
  )
  if not keep:
    return curve
  try:
    _costs_file.save_costs(model, curve)
  except OSError as error:
    warnings.warn(
      f"the cost curve could not be kept: {error}; adaptive decoding will not"
      " find it",
      stacklevel=2,
    )
  return curve


def _propose(
  propose: Any, model: assemble.LanguageModel, middle: _Middle
) -> float:
  context = middle.context()
  began = time.perf_counter()
  jax.block_until_ready(
    propose(model.params.draft, middle.state.draft, context)
  )
  return time.perf_counter() - began


def compare_steps(
  variants: Mapping[str, assemble.LanguageModel],
  sizes: Sequence[int],
  *,
  batch: int = 1,
  rounds: int = 9,
  progress: assemble.Progress | None = None,
) -> dict[str, dict[int, list[float]]]:
  """Whole steps of forms of one model, taking turns.

  Args:
    variants: by name; one model's decoders, see `ldjax.with_target`.
    sizes: T of the trees.
    batch: B, rows that run together.
    rounds: steps of each at each size.
    progress: called with a line of text before each compilation.

  Returns:
    By name and size the seconds of each round; those of one round stand at
    the same place everywhere, so that their ratios are of the same moment.

  Example:
    times = ldjax.optimize.compare_steps({"as loaded": model}, [1, 4])
  """
  say = progress or (lambda line: None)
  middles = {name: _Middle(each, batch) for name, each in variants.items()}
  steps = {}
  for name, model in variants.items():
    for size in sizes:
      decoder = assemble.decoder_with(model, _draft_of(model, size))
      step = jax.jit(decoder.step, donate_argnums=1)
      say(f"Compiling a step of {size} nodes, {name} (seconds)")
      middles[name].step(step, size)
      steps[name, size] = step
  times: dict[str, dict[int, list[float]]] = {
    name: {size: [] for size in sizes} for name in variants
  }
  for _ in range(rounds):
    for (name, size), step in steps.items():
      times[name][size].append(middles[name].step(step, size))
  return times
