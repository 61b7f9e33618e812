"""What a compiled program computes and moves, and that over a text's tokens."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ldjax import _engine, _generation, _ladder, _pages, assemble


class Work(NamedTuple):
  """What one run of a program takes."""

  flops: float
  """Additions and multiplications of floating-point numbers."""
  bytes: float
  """Read and written between memory and the fused parts of the program."""

  def over(self, share: float) -> "Work":
    """A part of it.

    Args:
      share: what it is divided by.
    """
    return Work(self.flops / share, self.bytes / share)


class MethodWork(NamedTuple):
  """What the programs of a method take."""

  steps: dict[int, Work]
  """A round of all rows, by the nodes of its tree."""
  prefill: Work
  """Reading one token of a prompt, in the chunk of the longest one."""


def work_of(compiled: jax.stages.Compiled) -> Work:
  """What XLA counts in a compiled program.

  A loop whose length is data counts as one pass: attention to the prefix on a
  CPU reads 256 positions a pass at batch 1. The pool of pages counts as if it
  were read whole, though only live pages are.

  Args:
    compiled: `jax.jit(f).lower(...).compile()`.

  Example:
    >>> import jax.numpy as jnp
    >>> product = jax.jit(jnp.dot).lower(jnp.ones((3, 5)), jnp.ones((5, 7)))
    >>> work_of(product.compile()).flops
    210.0
  """
  found = compiled.cost_analysis() or {}
  return Work(
    float(found.get("flops", 0.0)), float(found.get("bytes accessed", 0.0))
  )


def compile_method(
  method: assemble.LanguageModel, batch: int, prompt_tokens: int
) -> MethodWork:
  """Compiles all that a method runs, so that none is in what is measured.

  Args:
    method: a model with its draft.
    batch: B, rows that run together.
    prompt_tokens: of the longest prompt, which says in what chunk it is read.

  Returns:
    What each program takes.
  """
  engine = _engine.Engine(method, batch, share=False)
  engine.compile_ladder()
  engine.close()
  # What follows finds the compiled programs of the engine's shapes.
  other_cache = _pages.Pages(method, batch, False, None).other_cache
  plain = _ladder.programs(method.fallback)
  state = jax.eval_shape(
    lambda params: plain.empty(params, batch, other_cache), method.params
  )
  steps = {}
  for rung in method.ladder:
    step = _ladder.programs(rung.decoder).step
    compiled = step.lower(method.params, state).compile()
    steps[rung.draft.size] = work_of(compiled)
  chunks = method.prefill_chunks
  chunk = next((c for c in chunks if c >= prompt_tokens), chunks[-1])
  prefill = plain.prefill.lower(
    method.params, state, jnp.zeros((1,), jnp.int32), chunk
  )
  return MethodWork(steps, work_of(prefill.compile()).over(chunk))


def work_per_token(
  steps: Mapping[int, Work],
  runs: Sequence[_generation.Generation],
  batch: int,
) -> Work | None:
  """What a token after the first took: rounds of each size times their work.

  A row takes its share of a round, as if all rows ran in it.

  Args:
    steps: see `MethodWork`.
    runs: what was generated.
    batch: B, rows that ran together.

  Returns:
    The mean over all tokens after the first; None if there are none.

  Example:
    >>> import ldjax
    >>> run = ldjax.Generation(
    ...   text="", tokens=(7,) * 6, pieces=("",) * 6, round_tokens=(1, 3, 2),
    ...   round_sizes=(1, 4, 4), logprobs=None, prompt_tokens=1,
    ...   finish_reason="length", tokens_per_second=0.0,
    ...   time_to_first_token_s=0.0, waited_s=0.0, peak_cache_bytes=0)
    >>> work_per_token({1: Work(2.0, 9.0), 4: Work(5.0, 10.0)}, [run], 1)
    Work(flops=2.0, bytes=4.0)
  """
  tokens = sum(sum(run.round_tokens[1:]) for run in runs)
  if not tokens:
    return None
  # A round that had to be repeated plainly is of a size of its own.
  smallest = steps[min(steps)]
  rounds = [
    steps.get(size, smallest) for run in runs for size in run.round_sizes[1:]
  ]
  flops = sum(work.flops for work in rounds)
  moved = sum(work.bytes for work in rounds)
  return Work(flops, moved).over(batch * tokens)
