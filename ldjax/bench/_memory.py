"""Pages against preallocation, on the real pool and a trace of requests.

The target is replaced by one that computes nothing, so that thousands of rounds
take seconds; what the host and the pool do is what they do in `generate`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ldjax import (
  _engine,
  _request,
  _settings,
  assemble,
  decoding,
  memory,
  models,
  typing,
)

Array = typing.Array

_VOCAB = 8


class TraceEntry(NamedTuple):
  """One request of a trace."""

  prompt_tokens: int
  """Tokens of the prompt."""
  new_tokens: int
  """Tokens to emit."""


def memory_trace(
  prompt_lengths: Sequence[int] | None = None,
  *,
  count: int = 256,
  seed: int = 0,
) -> list[TraceEntry]:
  """Requests of mixed length: 16 to 512 new tokens each.

  Args:
    prompt_lengths: tokens of the prompts, taken in turn; by default lengths
      around 80, as passages of a few sentences have.
    count: requests.
    seed: of the lengths.

  Example:
    >>> memory_trace([70, 90], count=3)[2].prompt_tokens
    70
  """
  rng = np.random.default_rng(seed)
  if prompt_lengths is None:
    drawn = np.exp(rng.normal(np.log(80), 0.3, count))
    prompt_lengths = np.clip(drawn, 16, 256).astype(int).tolist()
  new = rng.integers(16, 513, count).tolist()
  return [
    TraceEntry(int(prompt_lengths[i % len(prompt_lengths)]), new[i])
    for i in range(count)
  ]


@functools.lru_cache(maxsize=8)
def _idle_target(num_layers: int, shape: tuple[int, int]) -> decoding.TargetFn:
  """A target that gives keys and values of the right shape, and token 0."""

  def forward(params, tokens, positions, parents, view):
    del params, positions, parents
    kv = jnp.zeros((*tokens.shape, *shape), jnp.float32)
    block = tuple(
      memory.cast_kv(kv, view.pages[0].dtype) for _ in range(num_layers)
    )
    hidden = jnp.zeros((*tokens.shape, 1), jnp.float32)
    return decoding.TargetOutput(hidden, hidden, block)

  def score(params, hidden):
    del params
    logits = jnp.zeros((*hidden.shape[:-1], _VOCAB), jnp.float32)
    return decoding.Scores(logits.at[..., 0].set(1.0))

  return decoding.TargetFn(forward, score)


def _idle_model(
  base: assemble.LanguageModel,
  max_len: int,
  page_size: int,
  num_pages: int | None,
  dtype: Any,
) -> assemble.LanguageModel:
  """A model that takes memory as `base` does, and no time."""
  config = dataclasses.replace(
    base.config, vocab_size=_VOCAB, max_position_embeddings=max_len
  )
  target = _idle_target(
    config.num_layers, (config.num_kv_heads, 2 * config.head_dim)
  )
  init_cache = assemble.cache_factory(
    config,
    max_len=max_len,
    page_size=page_size,
    num_pages=num_pages,
    dtype=dtype,
  )
  root = decoding.root_only()
  decoder = decoding.speculative(target, root, init_cache, max_len=max_len)
  return dataclasses.replace(
    base,
    config=config,
    target=target,
    params=decoding.DecoderParams(()),
    ladder=(assemble.Rung(root, decoder, None),),
    start=0,
    fallback=decoder,
    init_cache=init_cache,
    eos_token_ids=(),
    max_len=max_len,
    page_size=page_size,
    num_pages=num_pages,
    initial_pages=None,
    on_pressure="preempt",
    prefill_chunks=(64,),
    mesh=None,
  )


class _Watched(NamedTuple):
  steps: int
  """Rounds on all rows."""
  peak_pages: int
  rows: float
  """Rows that a round brought a token, on average while others waited; over all
  rounds if nobody ever did."""
  waste: float
  """Mean of `CacheStats.waste`."""
  fragmentation: float
  """Free pages as a share of the pool, on average while others waited."""
  preempted: int
  pool_bytes: int


def _drive(
  model: assemble.LanguageModel,
  trace: Sequence[TraceEntry],
  rows: int,
  on_request: Callable[[int], None],
) -> _Watched:
  """Runs the trace and looks at the pool after each round."""
  rng = np.random.default_rng(0)
  engine = _engine.Engine(model, rows, share=False)
  for entry in trace:
    prompt = rng.integers(0, _VOCAB, entry.prompt_tokens).tolist()
    settings = _settings.Settings(max_new_tokens=entry.new_tokens)
    [request] = _request.make_requests(model, prompt, settings)
    engine.submit(request)
  done, peak, pool_bytes = 0, 0, 0
  tokens, busy = 0, (0, 0)
  waste, idle = [], []
  while not engine.idle:
    for event in engine.advance():
      if event.generation is not None:
        tokens += len(event.generation.tokens)
        done += 1
        on_request(done)
    if engine.cache is None:
      continue
    stats = memory.cache_stats(engine.cache)
    pool_bytes = stats.total_bytes
    peak = max(peak, stats.pages - stats.free)
    if stats.free < stats.pages:
      waste.append(stats.waste)
    if engine.queue:
      running = sum(row.emitted for row in engine.rows if row is not None)
      busy = tokens + running, engine.steps
      idle.append(stats.free / stats.pages)
  engine.close()
  return _Watched(
    steps=engine.steps,
    peak_pages=peak,
    rows=busy[0] / busy[1] if busy[1] else tokens / engine.steps,
    waste=float(np.mean(waste)),
    fragmentation=float(np.mean(idle)) if idle else 0.0,
    preempted=engine.memory_counts.preempted,
    pool_bytes=pool_bytes,
  )


def _dense_bytes(
  config: models.TransformerConfig, rows: int, max_len: int, dtype: Any
) -> int:
  """Bytes of a cache that gives each row its full length, allocated."""
  cache = memory.DenseKVCache.create(
    batch=rows,
    max_len=max_len,
    num_layers=config.num_layers,
    num_kv_heads=config.num_kv_heads,
    head_dim=config.head_dim,
    dtype=dtype,
  )
  return sum(x.nbytes for x in jax.tree.leaves(cache.pages))


def compare_memory(
  model: assemble.LanguageModel,
  trace: Sequence[TraceEntry],
  *,
  rows: int = 32,
  page_size: int = 16,
  cache_dtype: Any = None,
  on_request: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
  """Pages against preallocation at the trace's longest length.

  Three runs of the trace on the real pool: with as many rows as the
  preallocated cache has, to see what the same work needs; again in a pool of
  just that size; and with many rows in a pool of the preallocated cache's
  size, to see how many run at once.

  Args:
    model: whose cache's shape is taken.
    trace: requests.
    rows: B of the preallocated cache.
    page_size: Z, positions a page.
    cache_dtype: of the pool; default that of the model. The preallocated cache
      has the model's.
    on_request: called with the number of requests that have ended, in each run.

  Returns:
    `waste` (unfilled slots of owned pages) and `fragmentation` (free pages
    while a request waits) as means over rounds, `concurrency_ratio` (rows that
    run at once in the same bytes) and `peak_reduction` (bytes saved for the
    same work in as many rounds), and what they were made of.

  Raises:
    ValueError: for an empty trace or fewer than 1 row.

  Example:
    report = compare_memory(model, memory_trace(count=64))
  """
  if not trace or rows < 1:
    raise ValueError(
      f"there are {len(trace)} requests and {rows} rows; give at least 1 each"
    )
  longest = max(sum(entry) for entry in trace)
  max_len = -(-longest // page_size) * page_size
  plain = jax.eval_shape(functools.partial(model.init_cache, 1)).pages[0].dtype
  dtype = memory.cache_dtype(plain if cache_dtype is None else cache_dtype)
  dense_bytes = _dense_bytes(model.config, rows, max_len, plain)
  shape = functools.partial(_idle_model, model, max_len, page_size)

  ample = _drive(shape(None, dtype), trace, rows, on_request)
  same = _drive(shape(ample.peak_pages, dtype), trace, rows, on_request)
  page_bytes = same.pool_bytes // ample.peak_pages
  pages = dense_bytes // page_bytes
  # More rows than can run at once, so that pages are what is short.
  many = min(len(trace), 4 * rows * plain.itemsize // dtype.itemsize)
  full = _drive(shape(pages, dtype), trace, many, on_request)
  return {
    "model": model.name,
    "requests": len(trace),
    "prompt_tokens": sum(entry.prompt_tokens for entry in trace),
    "new_tokens": sum(entry.new_tokens for entry in trace),
    "longest": longest,
    "page_size": page_size,
    "cache_dtype": dtype.name,
    "preallocated": {
      "rows": ample.rows,
      "bytes": dense_bytes,
      "steps": ample.steps,
    },
    "same_work": {
      "rows": same.rows,
      "bytes": same.pool_bytes,
      "steps": same.steps,
      "preempted": same.preempted,
    },
    "same_bytes": {
      "rows": full.rows,
      "bytes": full.pool_bytes,
      "steps": full.steps,
      "preempted": full.preempted,
    },
    "waste": full.waste,
    "fragmentation": full.fragmentation,
    "concurrency_ratio": full.rows / ample.rows,
    "peak_reduction": 1 - same.pool_bytes / dense_bytes,
  }
