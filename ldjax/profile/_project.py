"""Projection: what a step would take on accelerators that are not here."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from ldjax import models
from ldjax.profile import _accelerators, _work

NOTE = (
  "Projection, not a measurement: a step takes as long as its bytes at the"
  " peak rate of the memory or its operations at the peak rate of bf16"
  " products, whichever is longer; starting programs, the host and all that is"
  " not in the formula cost nothing. Tokens a round are those measured here."
)
"""What a projection is, and what it leaves out."""


def project(
  config: models.TransformerConfig,
  tokens: Mapping[int, float],
  *,
  batch: int = 1,
  context: int = 256,
  draft_bytes: Mapping[int, float] | None = None,
  accelerators: Sequence[
    _accelerators.Accelerator
  ] = _accelerators.ACCELERATORS,
) -> dict[str, Any]:
  """Projection of tokens a second by roofline, weights and cache in bf16.

  Args:
    config: of the target.
    tokens: that a round brings by the size of its tree, measured; with size 1,
      which brings 1.
    batch: B.
    context: S, committed positions of each row.
    draft_bytes: what proposing a tree reads, by size; 0 where none is given.
    accelerators: published figures.

  Returns:
    `note`, `dtype`, `batch`, `context`, and for each of `accelerators` its
    `name`, published figures and `source`, `fits` (whether weights and cache do
    by their bytes), `sizes` (`size`, `flops`, `bytes`, `step_seconds`, `limit`,
    `tokens_a_round`, `tokens_per_second`), `plain_tokens_per_second`,
    `best_size`, `best_tokens_per_second` and `speedup`.

  Raises:
    ValueError: for tokens without size 1, or that no tree of the size brings.

  Example:
    >>> import ldjax
    >>> config = ldjax.testing.tiny_model().config
    >>> found = project(config, {1: 1.0, 4: 2.0})
    >>> found["accelerators"][0]["name"], found["accelerators"][0]["best_size"]
    ('TPU v5e', 4)

  Source: Williams, Waterman and Patterson 2009, "Roofline".
  """
  if tokens.get(1) != 1:
    raise ValueError(
      f"tokens are {dict(tokens)}; give those of size 1 too, where a round"
      " brings 1"
    )
  for size, brought in tokens.items():
    if not 1 <= brought <= size:
      raise ValueError(
        f"a tree of {size} nodes brings {brought} tokens; give 1 to {size}"
      )
  params = models.abstract_params(config, jnp.bfloat16)
  works = {
    size: _work.step_work(
      config,
      params,
      size=size,
      batch=batch,
      context=context,
      cache_dtype="bfloat16",
    )
    for size in sorted(tokens)
  }
  drafting = draft_bytes or {}
  return {
    "note": NOTE,
    "dtype": "bfloat16",
    "batch": batch,
    "context": context,
    "accelerators": [
      _on(each, works, tokens, batch, drafting) for each in accelerators
    ],
  }


def _on(
  accelerator: _accelerators.Accelerator,
  works: Mapping[int, _work.StepWork],
  tokens: Mapping[int, float],
  batch: int,
  drafting: Mapping[int, float],
) -> dict[str, Any]:
  sizes: list[dict[str, Any]] = []
  for size, work in works.items():
    read = work.bytes + drafting.get(size, 0.0)
    moving = read / accelerator.bytes_per_second
    computing = work.flops / accelerator.flops_per_second
    seconds = max(moving, computing)
    sizes.append(
      {
        "size": size,
        "flops": work.flops,
        "bytes": read,
        "step_seconds": seconds,
        "limit": "memory" if moving >= computing else "compute",
        "tokens_a_round": tokens[size],
        "tokens_per_second": batch * tokens[size] / seconds,
      }
    )
  best = max(sizes, key=lambda each: (each["tokens_per_second"], -each["size"]))
  plain = sizes[0]["tokens_per_second"]
  held = works[1].weight_bytes + works[1].cache_bytes
  return {
    **accelerator._asdict(),
    "fits": held <= accelerator.memory_bytes,
    "sizes": sizes,
    "plain_tokens_per_second": plain,
    "best_size": best["size"],
    "best_tokens_per_second": best["tokens_per_second"],
    "speedup": best["tokens_per_second"] / plain,
  }
