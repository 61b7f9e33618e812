"""Block sizes of the kernels, measured on the device at hand."""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ldjax import models, pallas_kernels

Timer = Callable[[Callable[..., Any], tuple[Any, ...]], float]
"""(a jitted function, its arguments) -> seconds a call."""

_REPEATS = 10
_STEP_PAGES = (4, 8, 16, 32)
_KV_HEADS = (2, 8)
_VOCAB_TILES = (256, 512, 1024, 2048)


def seconds_a_call(function: Callable[..., Any], arguments: Any) -> float:
  """The median over some calls of a function, after one to compile."""
  jax.block_until_ready(function(*arguments))
  times = []
  for _ in range(_REPEATS):
    begin = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    times.append(time.perf_counter() - begin)
  return statistics.median(times)


def _fastest(
  candidates: list[Any],
  build: Callable[[Any], Callable[..., Any]],
  arguments: tuple[Any, ...],
  timer: Timer,
  say: Callable[[str], None],
) -> Any:
  best = None
  for blocks in candidates:
    try:
      seconds = timer(jax.jit(build(blocks)), arguments)
    except jax.errors.JaxRuntimeError as error:  # too large for the device
      say(f"{blocks}: {str(error).splitlines()[0]}")
      continue
    say(f"{blocks}: {1e6 * seconds:.0f} µs")
    if best is None or seconds < best[0]:
      best = seconds, blocks
  if best is None:
    raise ValueError(
      "none of the sizes runs on this device; it tells why above"
    )
  return best[1]


def tune_kernels(
  config: models.TransformerConfig,
  *,
  batch: int = 1,
  nodes: int = 32,
  length: int = 1024,
  page_size: int = 16,
  dtype: jax.typing.DTypeLike = jnp.bfloat16,
  timer: Timer = seconds_a_call,
  say: Callable[[str], None] = print,
) -> Mapping[str, Mapping[str, Any]]:
  """Measures the TPU kernels' block sizes for one model's shapes.

  Args:
    config: of the model.
    batch: R.
    nodes: T, of a round's tree.
    length: committed positions a row.
    page_size: Z.
    dtype: of weights and pages.
    timer: how a call is timed.
    say: told each result.

  Returns:
    {kernel: {problem: blocks}}, for `pallas_kernels.write_tuned`.

  Raises:
    ValueError: if no sizes run.
  """
  dtype = jnp.dtype(dtype)
  columns = -(-length // page_size)
  keys = jax.random.split(jax.random.key(0), 4)
  heads, kv_heads = config.num_heads, config.num_kv_heads

  def normal(key, *shape):
    return jax.random.normal(key, shape, dtype)

  page = (kv_heads, page_size, 2 * config.head_dim)
  attention = (
    normal(keys[0], batch, nodes, heads, config.head_dim),
    normal(keys[1], batch * columns, *page),
    jnp.arange(batch * columns, dtype=jnp.int32).reshape(batch, columns),
    jnp.full((batch,), length, jnp.int32),
  )
  prefix = pallas_kernels.PrefixProblem(
    head_dim=config.head_dim,
    kv_heads=kv_heads,
    page_size=page_size,
    rows=nodes * heads // kv_heads,
    query_dtype=dtype.name,
    page_dtype=dtype.name,
  )

  def attend(blocks):
    return lambda *arrays: pallas_kernels.prefix_attention(
      *arrays, scale=1.0, implementation="mosaic_tpu", blocks=blocks
    )

  # Zeros up to a multiple of 128, see `score`.
  width = -(-config.hidden_size // 128) * 128
  scoring = (
    normal(keys[2], batch * nodes, width),
    normal(keys[3], config.vocab_size, width),
  )
  scored = pallas_kernels.ScoreProblem(
    width=width, rows=batch * nodes, dtype=dtype.name
  )

  def score(blocks):
    return lambda *arrays: pallas_kernels.score(
      *arrays, k=8, implementation="mosaic_tpu", blocks=blocks
    )

  prefix_blocks = [
    pallas_kernels.PrefixBlocks(step_pages=pages, kv_heads=heads)
    for pages, heads in itertools.product(_STEP_PAGES, _KV_HEADS)
    if pages <= columns
  ] or [pallas_kernels.PrefixBlocks(step_pages=columns)]
  score_blocks = [
    pallas_kernels.ScoreBlocks(vocab_tile=tile) for tile in _VOCAB_TILES
  ]
  say(f"prefix_attention, {prefix.key}")
  best = _fastest(prefix_blocks, attend, attention, timer, say)
  say(f"score, {scored.key}")
  best_score = _fastest(score_blocks, score, scoring, timer, say)
  return {
    "prefix_attention": {prefix.key: best},
    "score": {scored.key: best_score},
  }
