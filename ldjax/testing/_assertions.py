"""Assertions that users of ldjax need as well: losslessness, no recompile."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ldjax import _compilations, decoding
from ldjax import sampling as sampling_lib
from ldjax.testing import _tiny


@functools.lru_cache(maxsize=64)
def _compiled(decoder: decoding.Decoder) -> tuple[Any, Any]:
  init = jax.jit(decoder.init)
  # The whole loop consumes its state.
  run = jax.jit(functools.partial(decoding.decode, decoder), donate_argnums=1)
  return init, run


def decode_tokens(
  decoder: decoding.Decoder,
  params: decoding.DecoderParams,
  prompts: Sequence[Sequence[int]],
  *,
  sampling: sampling_lib.Sampling | None = None,
  max_new_tokens: int | Any = 16,
  stop_ids: Any = (),
) -> tuple[list[list[int]], Any]:
  """Decodes prompts and returns what was emitted for each.

  Args:
    decoder: what to run.
    params: its weights.
    prompts: token ids.
    sampling: of as many rows, default greedy.
    max_new_tokens: an int or [B].
    stop_ids: ids that end a sequence.

  Returns:
    Emitted tokens of each prompt, and the final state.
  """
  init, run = _compiled(decoder)
  tokens, lengths = _tiny.pad_prompts(prompts)
  if sampling is None:
    sampling = sampling_lib.make_sampling(len(prompts))
  if not isinstance(stop_ids, jax.Array):
    stop_ids = jax.numpy.asarray(decoding.stop_ids_row(stop_ids))
  limits = np.broadcast_to(
    np.asarray(max_new_tokens, np.int32), (len(prompts),)
  )
  state = init(
    params,
    tokens,
    lengths,
    sampling=sampling,
    max_new_tokens=jax.numpy.asarray(limits),
    stop_ids=stop_ids,
  )
  state = run(params, state)
  text = np.asarray(state.tokens)
  begin, end = np.asarray(state.prompt_length), np.asarray(state.length)
  return [
    text[row, begin[row] : end[row]].tolist() for row in range(len(prompts))
  ], state


def assert_lossless(
  target: decoding.TargetFn,
  target_params: Any,
  draft: decoding.DraftFn,
  draft_params: Any,
  init_cache: Callable[[int], Any],
  prompts: Sequence[Sequence[int]],
  *,
  max_len: int,
  **request: Any,
) -> float:
  """Asserts that a draft changes no token.

  Args:
    target: the model.
    target_params: its weights.
    draft: the draft under test.
    draft_params: its weights.
    init_cache: batch -> empty cache.
    prompts: token ids.
    max_len: as for `decoding.speculative`.
    **request: `sampling`, `max_new_tokens`, `stop_ids` as for
      `decode_tokens`.

  Returns:
    Mean accepted, tokens emitted over rounds: 1 for a draft that was never
    right, so that the assertion says little.

  Raises:
    AssertionError: with the row, the place and both texts.

  Example:
    >>> from ldjax import decoding, testing
    >>> tiny = testing.tiny_model()
    >>> mean_accepted = testing.assert_lossless(
    ...   tiny.target, tiny.params, decoding.ngram(2), (), tiny.init_cache,
    ...   [[1, 2, 1]], max_len=tiny.max_len, max_new_tokens=8)
  """
  plain, _ = decode_tokens(
    decoding.autoregressive(target, init_cache, max_len=max_len),
    decoding.DecoderParams(target_params),
    prompts,
    **request,
  )
  fast, state = decode_tokens(
    decoding.speculative(target, draft, init_cache, max_len=max_len),
    decoding.DecoderParams(target_params, draft_params),
    prompts,
    **request,
  )
  for row, (want, got) in enumerate(zip(plain, fast, strict=True)):
    if want != got:
      same = 0
      while same < min(len(want), len(got)) and want[same] == got[same]:
        same += 1
      raise AssertionError(
        f"row {row} differs from token {same} on: plain {want}, with the draft"
        f" {got}"
      )
  return float(state.emitted.sum() / max(int(state.rounds.sum()), 1))


@contextlib.contextmanager
def assert_no_recompile() -> Iterator[None]:
  """Asserts that nothing is compiled inside the block.

  Raises:
    AssertionError: with the number of compilations.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> square = jax.jit(lambda x: x * x)
    >>> x, y = jnp.ones(3), jnp.zeros(3)
    >>> _ = square(x)
    >>> with assert_no_recompile():
    ...   _ = square(y)
  """
  with _compilations.counted_compilations() as counted:
    yield
  if counted.programs:
    raise AssertionError(
      f"{counted.programs} programs were compiled; after warm-up there should"
      " be none"
    )
