"""Many rounds in one compiled program."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ldjax import _base


def decode(
  decoder: _base.Decoder, params: _base.DecoderParams, state: Any
) -> Any:
  """Steps until no row can go on, inside the graph.

  A row ends at a stop id, at its limit, or at the end of its cache; one that
  lacks pages or meets logits that are not finite waits as it is.

  Args:
    decoder: static under `jit` (it is hashable).
    params: its weights.
    state: of B rows.

  Returns:
    The state; tokens are in `state.tokens`, from `state.prompt_length` to
    `state.length`.
  """

  def body(state):
    return decoder.step(params, state)[0]

  return lax.while_loop(lambda state: jnp.any(state.live), body, state)


def trace(
  decoder: _base.Decoder,
  params: _base.DecoderParams,
  state: Any,
  rounds: int,
) -> tuple[Any, _base.Round]:
  """Takes a fixed number of rounds and keeps what each of them did.

  Args:
    decoder: static under `jit`.
    params: its weights.
    state: of B rows; rows that have ended stay as they are.
    rounds: how many, static.

  Returns:
    The state, and a `Round` whose leaves have a leading axis of `rounds`.
  """

  def body(state, _):
    return decoder.step(params, state)

  return jax.lax.scan(body, state, length=rounds)
