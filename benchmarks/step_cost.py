"""What a round costs: against memory bandwidth, and by the rows verified.

    python benchmarks/step_cost.py [--model demo] [--rounds 20] [--json OUT]

Everything is timed in one process and interleaved; figures are medians. A
plain step must read every weight once, so its floor is the weights' bytes over
the fastest of several rates at which this machine reads an array of that size.
"""

import argparse
import json
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ldjax
from ldjax import decoding, sampling

_ROWS = (1, 2, 4, 8, 16, 24, 32, 64)
_CONTEXT = 256


def _readers(num_bytes: int) -> dict[str, Callable[[], Any]]:
  """Several ways to read an array as large as the weights."""
  flat = jnp.ones((num_bytes // 4 // 1152 * 1152,), jnp.float32)
  matrix, vector = flat.reshape(-1, 576), jnp.ones((576,), jnp.float32)
  total = jax.jit(jnp.sum)
  columns = jax.jit(lambda x: x.reshape(-1, 1152).sum(0))
  halves = jax.jit(lambda x: x.reshape(2, -1).max(1))
  product = jax.jit(lambda m, v: m @ v)
  return {
    "read: sum": lambda: total(flat),
    "read: column sums": lambda: columns(flat),
    "read: maxima": lambda: halves(flat),
    "read: matrix-vector": lambda: product(matrix, vector),
  }


def _prefilled(model: ldjax.LanguageModel, decoder: decoding.Decoder) -> Any:
  """A state of one row with `_CONTEXT` tokens and room for many rounds."""
  text = np.random.default_rng(0).integers(
    0, model.config.vocab_size, (1, _CONTEXT)
  )
  return jax.jit(decoder.init)(
    model.params,
    jnp.asarray(text, jnp.int32),
    jnp.asarray([_CONTEXT]),
    sampling=sampling.make_sampling(1),
    max_new_tokens=model.max_len,
  )


class _Stepper:
  """Steps one decoder, its state donated from call to call."""

  def __init__(self, model: ldjax.LanguageModel, rows: int):
    draft = decoding.ngram(rows - 1) if rows > 1 else decoding.root_only()
    decoder = decoding.speculative(
      model.target, draft, model.init_cache, max_len=model.max_len
    )
    self.params = model.params
    self.state = _prefilled(model, decoder)
    lowered = jax.jit(decoder.step, donate_argnums=1).lower(
      model.params, self.state
    )
    start = time.perf_counter()
    self.step = lowered.compile()
    self.compile_s = time.perf_counter() - start

  def __call__(self) -> Any:
    self.state, emitted = self.step(self.params, self.state)
    return emitted, self.state.length


def _forward(model: ldjax.LanguageModel, state: Any, rows: int) -> Any:
  """The target alone on a chain of `rows` nodes: no draft, no commit."""
  column = jnp.arange(rows, dtype=jnp.int32)[None]

  @jax.jit
  def forward(params, tokens, view):
    output = model.target.forward(
      params, tokens, view.length[:, None] + column, column - 1, view
    )
    return model.target.score(params, output.hidden)

  view, tokens = state.cache.view(), jnp.zeros((1, rows), jnp.int32)
  return lambda: forward(model.params.target, tokens, view)


def _medians(
  timed: dict[str, Callable[[], Any]], rounds: int
) -> dict[str, float]:
  for call in timed.values():
    for _ in range(2):
      jax.block_until_ready(call())
  seconds: dict[str, list[float]] = {name: [] for name in timed}
  for _ in range(rounds):
    for name, call in timed.items():
      start = time.perf_counter()
      jax.block_until_ready(call())
      seconds[name].append(time.perf_counter() - start)
  return {name: statistics.median(times) for name, times in seconds.items()}


def main() -> None:
  """Measures and prints."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--model", default="demo")
  parser.add_argument("--rounds", type=int, default=20)
  parser.add_argument("--json", type=pathlib.Path)
  arguments = parser.parse_args()

  model = ldjax.load(arguments.model, draft="none")
  # What a step reads: not the whole embedding, unless it is the output matrix.
  weights = dict(model.params.target)
  if not model.config.tie_word_embeddings:
    del weights["embed_tokens"]
  num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
  readers = _readers(num_bytes)
  steppers = {rows: _Stepper(model, rows) for rows in _ROWS}
  resting = _prefilled(model, model.decoder)
  timed: dict[str, Callable[[], Any]] = dict(readers)
  for rows in _ROWS:
    timed[f"step {rows}"] = steppers[rows]
    timed[f"forward {rows}"] = _forward(model, resting, rows)
  medians = _medians(timed, arguments.rounds)

  floor = min(medians[name] for name in readers)
  one_step, one_forward = medians["step 1"], medians["forward 1"]
  report = {
    "model": model.name,
    "device": jax.devices()[0].device_kind,
    "jax": jax.__version__,
    "context": _CONTEXT,
    "weight_bytes": num_bytes,
    "read_ms": {name: 1e3 * medians[name] for name in readers},
    "fastest_read_gb_per_s": num_bytes / floor / 1e9,
    "share_of_bandwidth": floor / one_step,
    "step_ms": {str(r): 1e3 * medians[f"step {r}"] for r in _ROWS},
    "forward_ms": {str(r): 1e3 * medians[f"forward {r}"] for r in _ROWS},
    "step_over_one": {str(r): medians[f"step {r}"] / one_step for r in _ROWS},
    "forward_over_one": {
      str(r): medians[f"forward {r}"] / one_forward for r in _ROWS
    },
    "compile_s": {str(r): steppers[r].compile_s for r in _ROWS},
  }
  print(
    f"{model.name} on {report['device']}, jax {jax.__version__},"
    f" {num_bytes / 1e6:.0f} MB of weights, {_CONTEXT} tokens of context"
  )
  for name in readers:
    print(f"  {name:<22}{1e3 * medians[name]:8.1f} ms")
  print(
    f"  single-token step {1e3 * one_step:.1f} ms:"
    f" {100 * floor / one_step:.0f}% of the fastest read rate"
    f" ({num_bytes / floor / 1e9:.1f} GB/s)"
  )
  print("  rows   step ms  over 1   forward ms  over 1   compile s")
  for rows in _ROWS:
    step, forward = medians[f"step {rows}"], medians[f"forward {rows}"]
    print(
      f"  {rows:>4}{1e3 * step:10.1f}{step / one_step:8.2f}"
      f"{1e3 * forward:13.1f}{forward / one_forward:8.2f}"
      f"{steppers[rows].compile_s:12.1f}"
    )
  if arguments.json:
    arguments.json.write_text(json.dumps(report, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
  main()
