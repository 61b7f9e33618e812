"""Assertions must fail when they should, and say where."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldjax import decoding, memory, testing

V = 5


def _forward(broken, tokens, positions, parents, view):
  """Token + 1 follows; if `broken`, a wide pass thinks otherwise."""
  step = 1 + broken if tokens.shape[1] == 4 else 1
  follows = (jnp.maximum(tokens, 0) + step) % V
  hidden = (follows[..., None] == jnp.arange(V)[None, None]).astype(jnp.float32)
  nothing = jnp.zeros((*tokens.shape, 1, 2), view.pages[0].dtype)
  return decoding.TargetOutput(hidden, hidden, (nothing,))


_TARGET = decoding.TargetFn(
  _forward, lambda broken, hidden: decoding.Scores(hidden)
)


def _init_cache(batch):
  return memory.DenseKVCache.create(
    batch=batch, max_len=12, num_layers=1, num_kv_heads=1, head_dim=1
  )


def _lossless(broken):
  testing.assert_lossless(
    _TARGET,
    jnp.int32(broken),
    testing.scripted_draft(3),
    jnp.zeros((2, 12), jnp.int32),
    _init_cache,
    [[1], [2, 3]],
    max_len=12,
    max_new_tokens=6,
  )


@pytest.mark.slow
def test_lossless_target_passes():
  _lossless(broken=False)


def test_lossy_target_is_found():
  with pytest.raises(AssertionError) as error:
    _lossless(broken=True)
  # The first token came from prefill, the second from a wide pass.
  assert "row 0 differs from token 1 on" in str(error.value)
  assert "[2, 3, 4, 0, 1, 2]" in str(error.value)


def test_a_missing_tail_is_found(monkeypatch):
  answers = iter([([[1, 2, 3]], None), ([[1, 2]], None)])
  monkeypatch.setattr(
    "ldjax.testing._assertions.decode_tokens", lambda *a, **k: next(answers)
  )
  with pytest.raises(AssertionError, match="row 0 differs from token 2 on"):
    _lossless(broken=False)


def test_decode_tokens():
  texts, state = testing.decode_tokens(
    decoding.autoregressive(_TARGET, _init_cache, max_len=12),
    decoding.DecoderParams(jnp.int32(0)),
    [[1], [2, 3]],
    max_new_tokens=[4, 9],
    stop_ids=(2, 1),
  )
  assert texts == [[2], [4, 0, 1]]
  assert state.status.tolist() == [decoding.Status.STOPPED] * 2


def test_recompile_is_found():
  double = jax.jit(lambda x: x * 2)
  arrays = [jnp.zeros(n) for n in (2, 3, 5)]
  jax.block_until_ready(double(arrays[0]))
  with testing.assert_no_recompile():
    double(arrays[0])
  with (
    pytest.raises(AssertionError, match=r"^2 programs were compiled"),
    testing.assert_no_recompile(),
  ):
    double(arrays[1])
    double(arrays[2])
  with testing.assert_no_recompile():
    double(arrays[2])


def test_an_error_inside_the_block_is_handed_on():
  with pytest.raises(KeyError), testing.assert_no_recompile():
    jax.jit(lambda x: x * 3)(np.ones(7, np.float32))
    raise KeyError
