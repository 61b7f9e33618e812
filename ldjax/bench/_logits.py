"""The logits after each token of a text that is there already."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ldjax import assemble

_CHUNK = 64


@functools.lru_cache(maxsize=16)
def _read(target: Any) -> Any:
  """A compiled step: reads one chunk of a text, returns all its logits."""

  def read(params, cache, tokens, count):
    column = jnp.arange(_CHUNK, dtype=jnp.int32)[None]
    output = target.forward(
      params, tokens, cache.length[:, None] + column, column - 1, cache.view()
    )
    cache, _ = cache.commit(output.block_kv, column, count)
    return cache, target.score(params, output.hidden).logits[0]

  return jax.jit(read, donate_argnums=1)


def read_logits(
  model: assemble.LanguageModel, tokens: Sequence[int], first: int = 0
) -> np.ndarray:
  """The target's logits after each token of a text, by wide forwards.

  Args:
    model: whose target is asked.
    tokens: ids of the whole text.
    first: the first token after which logits are wanted.

  Returns:
    [S - first, V] float32.
  """
  cache, parts = model.init_cache(1), []
  read = _read(model.target)
  for start in range(0, len(tokens), _CHUNK):
    part = list(tokens[start : start + _CHUNK])
    block = np.zeros((1, _CHUNK), np.int32)
    block[0, : len(part)] = part
    cache, logits = read(
      model.params.target,
      cache,
      jnp.asarray(block),
      jnp.asarray([len(part)], jnp.int32),
    )
    if start + len(part) > first:
      parts.append(np.asarray(logits)[max(first - start, 0) : len(part)])
  return np.concatenate(parts)


def next_logits(
  model: assemble.LanguageModel, tokens: Sequence[int]
) -> np.ndarray:
  """The target's logits after a text, by one wide forward.

  Args:
    model: whose target is asked.
    tokens: ids of the whole text.

  Returns:
    [V] float32.
  """
  return read_logits(model, tokens, len(tokens) - 1)[0]
