"""Maxima in rounds against `lax.top_k`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ldjax.decoding import _largest


@pytest.mark.parametrize("k", [1, 5, 13])
def test_rounds_are_top_k(k):
  rng = np.random.default_rng(k)
  logits = rng.normal(size=(2, 3, 97)).astype(np.float32)
  logits[0, 0] = np.round(logits[0, 0])  # ties
  logits[0, 1, 3:90] = -np.inf  # fewer than asked for are left
  logits[0, 2] = -np.inf
  logits[1, 0, 40] = np.inf
  want = lax.top_k(jnp.asarray(logits), k)
  got = _largest.rounds(jnp.asarray(logits), k)
  np.testing.assert_array_equal(got[0], want[0])
  np.testing.assert_array_equal(got[1], want[1])


def test_a_tpu_does_not_sort_for_a_few():
  def sorts(platform, k):
    traced = jax.jit(lambda x: _largest.largest(x, k)).trace(jnp.ones((2, 97)))
    return "top_k" in traced.lower(lowering_platforms=(platform,)).as_text()

  assert sorts("cpu", 4) and sorts("cuda", 4) and sorts("tpu", 40)
  assert not sorts("tpu", 4)
