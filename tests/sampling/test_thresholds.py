"""Cuts by bisection against cuts by sorting."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ldjax import sampling

_VOCAB = 11

_top_k = jax.jit(sampling.top_k_mask)
_top_p = jax.jit(sampling.top_p_mask)
_warp = jax.jit(sampling.warp)

# Few values, so that ties are common, and some of any size.
_entry = st.one_of(
  st.sampled_from([-np.inf, -1e30, -2.0, -0.0, 0.0, 0.5, 3.0, 1e30]),
  st.sampled_from([1e-45, -1e-45, np.float32(1 + 2**-23).item(), 1.0]),
  st.floats(-20, 20, width=32),
)
_row = hnp.arrays(np.float32, _VOCAB, elements=_entry).filter(
  lambda row: np.isfinite(row).any()
)


def _sorted_top_k(row, k):
  if k < 1 or k > len(row):
    return np.ones(len(row), bool)
  return row >= np.sort(row)[::-1][k - 1]


def _sorted_top_p(row, p):
  """The nucleus, and which tokens no fp32 sum could decide."""
  weight = np.exp(row.astype(np.float64) - row.max())
  larger = np.array([weight[row > x].sum() for x in row])
  budget = float(np.float32(p)) * weight.sum()
  # Each sum adds at most V terms whose exp is good to a few units in the last
  # place (2^-24 each).
  near = np.abs(larger - budget) <= 4 * _VOCAB * 2.0**-24 * weight.sum()
  near &= larger > 0  # the largest is kept whatever p is
  keep = (larger < budget) | (row == row.max()) | (p >= 1)
  return keep, near & (p < 1)


@hypothesis.given(
  _row, st.sampled_from([-1, 0, 1, 2, 5, 10, 11, 16, 2**31 - 1])
)
def test_top_k_is_what_a_sort_gives(row, k):
  got = _top_k(jnp.asarray(row)[None], jnp.array([k]))[0]
  np.testing.assert_array_equal(got, _sorted_top_k(row, k))


@hypothesis.given(
  _row,
  st.one_of(
    st.sampled_from([1e-45, 1e-30, 1e-6, 0.25, 0.5, 0.6, 0.999999, 1.0]),
    st.floats(2.0**-20, 1, width=32),
  ),
)
def test_top_p_is_what_a_sort_gives(row, p):
  got = np.asarray(_top_p(jnp.asarray(row)[None], jnp.array([p], jnp.float32)))
  keep, near = _sorted_top_p(row, p)
  np.testing.assert_array_equal(got[0][~near], keep[~near])


@hypothesis.given(
  # A division flushes subnormal numbers to zero; a comparison does not.
  _row.map(lambda row: np.where(np.abs(row) < 1e-30, np.float32(0), row)),
  st.sampled_from([0.25, 0.5, 2.0, 4.0]),
  st.sampled_from([0, 1, 2, 5, 11]),
  st.sampled_from([1e-6, 0.4, 0.6, 0.9, 1.0]),
)
def test_warp_is_temperature_then_k_then_p(row, temperature, k, p):
  settings = sampling.make_sampling(
    1, temperature=temperature, top_k=k, top_p=p
  )
  got = np.asarray(_warp(jnp.asarray(row)[None], settings))[0]
  want = row / np.float32(temperature)  # exact: powers of two
  want = np.where(_sorted_top_k(want, k), want, np.float32(-np.inf))
  keep, near = _sorted_top_p(want, p)
  want = np.where(keep, want, np.float32(-np.inf))
  np.testing.assert_array_equal(got[~near], want[~near])


def test_zeros_of_either_sign_tie():
  row = jnp.array([[-0.0, 0.0, -1.0, -0.0]])
  want = [[True, True, False, True]]
  for top_k, top_p in (
    (sampling.top_k_mask, sampling.top_p_mask),  # compiled operation by
    (_top_k, _top_p),  # operation, and as one program
  ):
    assert top_k(row, jnp.array([1])).tolist() == want
    assert top_p(row, jnp.array([0.2])).tolist() == want


def test_one_hot_rows():
  for hot in (0, 5, _VOCAB - 1):
    row = np.full((1, _VOCAB), -np.inf, np.float32)
    row[0, hot] = 2.5
    only = np.isfinite(row)
    np.testing.assert_array_equal(_top_k(row, jnp.array([1])), only)
    for p in (1e-30, 0.5, 0.999):
      np.testing.assert_array_equal(_top_p(row, jnp.array([p])), only)
    # Asked for more than there are: the rest ties at -inf and stays -inf.
    settings = sampling.make_sampling(1, temperature=1.0, top_k=3, top_p=0.9)
    np.testing.assert_array_equal(_warp(row, settings), row)


def test_top_p_counts_what_top_k_left():
  logits = jnp.log(jnp.array([[0.4, 0.3, 0.2, 0.1]]))
  settings = sampling.make_sampling(1, temperature=1.0, top_k=2, top_p=0.5)
  # Of the two kept the first has 4/7 > 0.5; of all four it has only 0.4.
  assert np.isfinite(sampling.warp(logits, settings)).tolist() == [
    [True, False, False, False]
  ]


def test_rows_have_cuts_of_their_own():
  rng = np.random.default_rng(1)
  rows = rng.normal(size=(5, _VOCAB)).astype(np.float32)
  ks, ps = [0, 1, 3, _VOCAB, 99], [0.1, 0.5, 0.75, 0.9, 1.0]
  by_k = _top_k(rows, jnp.array(ks))
  by_p = _top_p(rows, jnp.array(ps))
  for i, row in enumerate(rows):
    np.testing.assert_array_equal(by_k[i], _sorted_top_k(row, ks[i]))
    keep, near = _sorted_top_p(row, ps[i])
    assert not near.any()
    np.testing.assert_array_equal(by_p[i], keep)
