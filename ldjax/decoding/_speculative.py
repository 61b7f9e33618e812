"""The decoder: a target, a draft and a cache put together."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ldjax import _base, typing
from ldjax import sampling as sampling_lib
from ldjax.decoding import _acceptance, _draft, _round, _rows, _state

Array = typing.Array


def _check_prompt(
  prompt: Array,
  prompt_length: Any,
  sampling: sampling_lib.Sampling,
  max_len: int,
) -> None:
  """Checks shapes, and the values that are known before tracing."""
  if prompt.ndim != 2:
    raise ValueError(f"prompt has shape {prompt.shape}; give [B, S]")
  batch, width = prompt.shape
  # A row's number out of range would clamp to another row's entry.
  if jnp.shape(prompt_length) != (batch,):
    raise ValueError(
      f"prompt_length has shape {jnp.shape(prompt_length)}; prompt has"
      f" {batch} rows, so give [{batch}]"
    )
  if sampling.temperature.shape != (batch,):
    raise ValueError(
      f"sampling has shape {sampling.temperature.shape}; prompt has {batch}"
      f" rows, so give make_sampling({batch}, ...)"
    )
  if isinstance(prompt_length, jax.core.Tracer):
    return
  lengths = np.asarray(prompt_length)
  shortest, longest = int(lengths.min()), int(lengths.max())
  if shortest < 1:
    raise ValueError(
      "a prompt is empty; give at least one token, for example the BOS"
    )
  if longest > min(width, max_len):
    raise ValueError(
      f"a prompt is {longest} tokens long; the prompt array holds"
      f" {width} and max_len is {max_len}"
    )


def speculative(
  target: _base.TargetFn,
  draft: _base.DraftFn,
  init_cache: Callable[[int], Any],
  *,
  max_len: int,
  chunk: int = 64,
  accept: _acceptance.Rule = _acceptance.accept,
) -> _base.Decoder:
  """Builds exact speculative decoding from a target, a draft and a cache.

  The text is a function of (prompt, seed, sampling settings) alone: any
  draft, tree, batch and page size give the same. Same arguments give the
  same functions, so what was compiled stays compiled.

  Args:
    target: the model.
    draft: proposes token trees; `root_only()` for plain decoding.
    init_cache: batch -> empty `Cache`, hashable (a function or a
      `functools.partial` kept in a variable).
    max_len: S, the most tokens of a row, prompt included; the cache must hold
      `max_len - 1`.
    chunk: tokens of a prompt that `init` reads at a time.
    accept: the rule by which a round accepts; with any other than this one the
      text is another one.

  Returns:
    `Decoder`; nothing in it is jitted.

    - `init(params, prompt[B, S0], prompt_length[B], *, sampling,
      max_new_tokens, stop_ids=())` -> state after prefill, with the first
      token emitted. `max_new_tokens` is an int or [B]; rows stop there, at a
      stop id, or at `max_len` tokens.
    - `step(params, state)` -> `(state, Round)`.
    - `empty(params, batch, other_cache=None)` -> state without sequences, of
      `other_cache(batch)` where that is given.
    - `admit(state, row, prompt[S0], prompt_length, sampling, max_new_tokens,
      stop_ids)` -> state; `sampling` has scalar leaves, `stop_ids` is
      `stop_ids_row(...)`.
    - `prefill(params, state, rows[R], chunk)` -> `(state, Round)`: reads the
      next `chunk` tokens of rows that are prefilling.
    - `preempt(state, mask[B])`, `release(state, mask[B])` -> state.

  Raises:
    ValueError: for `max_len` or `chunk` below 1.

  Example:
    >>> import functools
    >>> import jax, jax.numpy as jnp
    >>> from flax import nnx
    >>> from ldjax import decoding, memory, models, sampling
    >>> config = models.TransformerConfig(
    ...   vocab_size=31, hidden_size=24, intermediate_size=40, num_layers=2,
    ...   num_heads=3, num_kv_heads=1, head_dim=8, max_position_embeddings=64)
    >>> target, weights = models.functionalize(
    ...   models.Transformer(config, rngs=nnx.Rngs(0)))
    >>> def init_cache(batch):
    ...   return memory.PagedKVCache.create(
    ...     batch=batch, max_len=32, num_layers=2, num_kv_heads=1, head_dim=8,
    ...     page_size=4)
    >>> decoder = speculative(
    ...   target, decoding.ngram(3), init_cache, max_len=32)
    >>> params = decoding.DecoderParams(weights)
    >>> state = jax.jit(decoder.init)(
    ...   params, jnp.array([[1, 2, 3]]), jnp.array([3]),
    ...   sampling=sampling.make_sampling(1), max_new_tokens=8)
    >>> state = jax.jit(decoding.decode, static_argnums=0)(
    ...   decoder, params, state)
    >>> int(state.emitted[0])
    8

  Source: Leviathan et al. 2023; Miao et al. 2023; design in docs.
  """
  for name, value in (("max_len", max_len), ("chunk", chunk)):
    if value < 1:
      raise ValueError(f"{name} is {value}; it must be at least 1")

  return _speculative(target, draft, init_cache, max_len, chunk, accept)


@functools.lru_cache(maxsize=64)
def _speculative(
  target: _base.TargetFn,
  draft: _base.DraftFn,
  init_cache: Callable[[int], Any],
  max_len: int,
  chunk: int,
  accept: _acceptance.Rule,
) -> _base.Decoder:
  empty = functools.partial(_rows.empty, draft, init_cache, max_len)
  prefill = functools.partial(_round.prefill, target, draft, accept=accept)

  def init(
    params: _base.DecoderParams,
    prompt: Array,
    prompt_length: Array,
    *,
    sampling: sampling_lib.Sampling,
    max_new_tokens: int | Array,
    stop_ids: Any = (),
  ) -> _state.DecodeState:
    prompt = jnp.asarray(prompt, jnp.int32)
    _check_prompt(prompt, prompt_length, sampling, max_len)
    prompt_length = jnp.asarray(prompt_length, jnp.int32)
    batch, width = prompt.shape
    wanted = (batch, _state.MAX_STOP_IDS)
    if np.shape(stop_ids)[-1:] != wanted[1:] and not isinstance(
      stop_ids, jax.Array
    ):
      stop_ids = _state.stop_ids_row(stop_ids)
    stop_ids = jnp.asarray(stop_ids, jnp.int32)
    if stop_ids.shape not in (wanted, wanted[1:]):
      raise ValueError(
        f"stop_ids has shape {stop_ids.shape}; give a set of ids, or an array"
        f" {list(wanted)} with stop_ids_row(...) in each row"
      )
    stop_ids = jnp.broadcast_to(stop_ids.reshape(-1, wanted[1]), wanted)
    limits = jnp.asarray(max_new_tokens, jnp.int32)
    if limits.shape not in ((), (1,), (batch,)):
      raise ValueError(
        f"max_new_tokens has shape {limits.shape}; give one number, or"
        f" [{batch}]"
      )
    limits = jnp.broadcast_to(limits.reshape(-1), (batch,))
    state = empty(params, batch)

    def admit_row(row, state):
      return _rows.admit(
        state,
        row,
        prompt[row],
        prompt_length[row],
        jax.tree.map(lambda x: x[row], sampling),
        limits[row],
        stop_ids[row],
      )

    state = lax.fori_loop(0, batch, admit_row, state)
    rows = jnp.arange(batch, dtype=jnp.int32)
    size = min(chunk, width)

    def read(_, state):
      return prefill(params, state, rows, size)[0]

    return lax.fori_loop(0, -(-width // size), read, state)

  return _base.Decoder(
    init=init,
    step=functools.partial(_round.step, target, draft, accept=accept),
    empty=empty,
    admit=_rows.admit,
    prefill=prefill,
    preempt=functools.partial(_rows.preempt, draft),
    release=functools.partial(_rows.release, draft),
  )


def autoregressive(
  target: _base.TargetFn,
  init_cache: Callable[[int], Any],
  *,
  max_len: int,
  chunk: int = 64,
) -> _base.Decoder:
  """Plain decoding: the same decoder with a root-only tree.

  It is the baseline of every measurement and the oracle of every test.

  Args:
    target: see `speculative`, as are `init_cache`, `max_len` and `chunk`.
  """
  return speculative(
    target, _draft.root_only(), init_cache, max_len=max_len, chunk=chunk
  )
