"""Where the time of a round goes, and what speed a cost curve foretells."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ldjax import (
  _engine,
  _generation,
  _ladder,
  _request,
  _settings,
  assemble,
  decoding,
  optimize,
)
from ldjax import sampling as sampling_lib


def predicted_tokens_per_second(
  curve: optimize.CostCurve, generation: _generation.Generation
) -> float:
  """The speed that a cost curve foretells for the rounds of a generation.

  Tokens after the first over the seconds that its rounds should have taken by
  the sizes of their trees, so that it stands beside `tokens_per_second` of the
  same generation, made alone (batch 1).

  Args:
    curve: of the model that made it, see `optimize.measure_costs`.
    generation: as `generate` returned it.

  Returns:
    Tokens a second; 0 for a text of one round or none.

  Example:
    >>> import ldjax
    >>> from ldjax import optimize
    >>> curve = optimize.CostCurve(
    ...   sizes=(1, 4), seconds=(0.05, 0.1), draft_seconds=(0.0, 0.0), batch=1,
    ...   device="cpu", model="tiny")
    >>> generation = ldjax.Generation(
    ...   text="", tokens=(7,) * 6, pieces=("",) * 6, round_tokens=(1, 3, 2),
    ...   round_sizes=(1, 4, 4), logprobs=None, prompt_tokens=1,
    ...   finish_reason="length", tokens_per_second=0.0,
    ...   time_to_first_token_s=0.0, waited_s=0.0, peak_cache_bytes=0)
    >>> round(predicted_tokens_per_second(curve, generation), 6)
    25.0
  """
  seconds = sum(curve.at(size) for size in generation.round_sizes[1:])
  brought = sum(generation.round_tokens[1:])
  return brought / seconds if seconds else 0.0


def _start(model: assemble.LanguageModel, request: _request.Request) -> Any:
  """A state of one row that has read its prompt."""
  fns = _ladder.programs(model.fallback)
  state = fns.admit(
    fns.empty(model.params, 1),
    np.int32(0),
    request.prompt,
    np.int32(request.prompt_length),
    request.sampling,
    np.int32(request.max_new_tokens),
    request.stop_ids,
  )
  chunk = model.prefill_chunks[-1]
  for _ in range(0, request.prompt_length, chunk):
    state, _ = fns.prefill(
      model.params, state, jnp.zeros((1,), jnp.int32), chunk
    )
  return state


def _depths(parents: np.ndarray) -> np.ndarray:
  """Distance of each node [T] from its root."""
  depths = np.zeros_like(parents)
  for node, parent in enumerate(parents):
    depths[node] = depths[parent] + 1 if parent >= 0 else 0
  return depths


@functools.lru_cache(maxsize=16)
def _parts(target: decoding.TargetFn, draft: decoding.DraftFn) -> Any:
  def verify(params, block, positions, parents, view):
    output = target.forward(params, block, positions, parents, view)
    return output, target.score(params, output.hidden)

  def accept(scores, tree, sampling, history, stop_ids, remaining):
    return decoding.accept(
      scores,
      tree,
      sampling,
      history,
      depth=draft.depth,
      stop_ids=stop_ids,
      remaining=remaining,
    )

  def commit(draft_params, cache, draft_state, output, walk, block, positions):
    cache, _ = cache.commit(output.block_kv, walk.path, walk.count)
    picked = jax.vmap(lambda x, p: x[p])
    observation = decoding.Observation(
      rows=jnp.zeros((1,), jnp.int32),
      tokens=picked(block, walk.path),
      features=picked(output.features, walk.path),
      positions=picked(positions, walk.path),
      count=walk.count,
    )
    return cache, draft.observe(draft_params, draft_state, observation)

  return (
    jax.jit(draft.propose),
    jax.jit(verify),
    jax.jit(accept),
    jax.jit(commit, donate_argnums=(1, 2)),
  )


def _timed(call: Callable[..., Any], *args: Any) -> tuple[float, Any]:
  began = time.perf_counter()
  result = jax.block_until_ready(call(*args))
  return time.perf_counter() - began, result


def breakdown(
  model: assemble.LanguageModel,
  prompt: _request.Prompt,
  *,
  size: int | None = None,
  rounds: int = 15,
) -> dict[str, float]:
  """Measures the parts of a round after a prompt, batch 1, greedily.

  Each part is a program of its own, so the parts leave out what the compiler
  fuses across them, and each pays for being started: their sum is near the
  whole step and not equal to it. `host` is what is left when the step is taken
  from the time between two rounds of `generate`, which overlaps the two.

  Args:
    model: from `load`.
    prompt: text, token ids, or a conversation.
    size: T of one of the trees of `model.ladder`; None for that of
      `model.draft`.
    rounds: how often each part is measured; the median counts.

  Returns:
    Seconds by name: `draft` (proposing the tree), `verify` (the target's pass
    over it, with the logits), `accept` (the walk), `commit` (the cache, and
    what the draft makes of the accepted tokens), `step` (the whole of it as
    one program), `round` (between two rounds of `generate`) and `host`.

  Raises:
    ValueError: for a size that the ladder has not, rounds below 1, or more of
      them than fit behind the prompt.

  Example:
    parts = ldjax.bench.breakdown(model, "Why is the sky blue?")
    print(max(("draft", "verify", "accept", "commit"), key=parts.get))
  """
  sizes = [rung.draft.size for rung in model.ladder]
  if size is not None and size not in sizes:
    raise ValueError(f"size is {size}; the model's ladder has sizes {sizes}")
  if rounds < 1:
    raise ValueError(f"rounds is {rounds}; it must be at least 1")
  at = model.start if size is None else sizes.index(size)
  rung = model.ladder[at]
  # Some come before those that are measured, and one is enqueued too many.
  tokens = (rounds + 4) * (rung.draft.depth + 1)
  [request] = _request.make_requests(
    dataclasses.replace(model, eos_token_ids=()),
    prompt,
    _settings.Settings(max_new_tokens=tokens),
  )
  needed = request.prompt_length + tokens
  if needed > model.max_len:
    raise ValueError(
      f"{rounds} rounds of up to {rung.draft.depth + 1} tokens after"
      f" {request.prompt_length} of the prompt do not fit into"
      f" {model.max_len} positions; give fewer rounds or a shorter prompt"
    )
  fixed = dataclasses.replace(model, ladder=(rung,), start=0)
  times = _time_parts(fixed, request, rounds)
  times["step"] = _time_steps(fixed, request, rounds)
  times["round"] = _time_rounds(fixed, request, rounds)
  times["host"] = max(times["round"] - times["step"], 0.0)
  return times


def _time_parts(
  model: assemble.LanguageModel, request: _request.Request, rounds: int
) -> dict[str, float]:
  state = _start(model, request)
  params = model.params
  propose, verify, accept, commit = _parts(model.target, model.draft)
  context = decoding.DraftContext(state.tokens, state.length, state.sampling)
  history = sampling_lib.History(
    state.tokens, state.prompt_length, state.length
  )
  remaining = state.limit - state.length
  cache, draft_state = state.cache, state.draft
  times: dict[str, list[float]] = {
    part: [] for part in ("draft", "verify", "accept", "commit")
  }
  for _ in range(rounds + 1):
    seconds, (tree, _) = _timed(propose, params.draft, draft_state, context)
    times["draft"].append(seconds)
    block = np.maximum(np.asarray(tree.tokens), 0)
    block[0, 0] = int(state.tokens[0, int(state.length[0]) - 1])
    depths = _depths(np.asarray(tree.parents)[0])
    read = (
      jnp.asarray(block),
      jnp.asarray(int(cache.length[0]) + depths[None]),
    )
    seconds, (output, scores) = _timed(
      verify, params.target, *read, tree.parents, cache.view()
    )
    times["verify"].append(seconds)
    seconds, walk = _timed(
      accept, scores, tree, state.sampling, history, state.stop_ids, remaining
    )
    times["accept"].append(seconds)
    seconds, (cache, draft_state) = _timed(
      commit, params.draft, cache, draft_state, output, walk, *read
    )
    times["commit"].append(seconds)
  # The first of each compiled.
  return {part: statistics.median(all_[1:]) for part, all_ in times.items()}


def _time_steps(
  model: assemble.LanguageModel, request: _request.Request, rounds: int
) -> float:
  state = _start(model, request)
  step = _ladder.programs(model.decoder).step
  times = []
  for _ in range(rounds + 1):
    seconds, (state, _) = _timed(step, model.params, state)
    times.append(seconds)
  return statistics.median(times[1:])


def _time_rounds(
  model: assemble.LanguageModel, request: _request.Request, rounds: int
) -> float:
  engine = _engine.Engine(model, 1, share=False)
  engine.submit(request)
  try:
    engine.advance()  # the prefill
    engine.advance()
    times = [_timed(engine.advance)[0] for _ in range(rounds)]
  finally:
    engine.close()
  return statistics.median(times)
