"""Noise as a function of (key, position, token id), against other sources."""

import math

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from ldjax import sampling
from ldjax.sampling import _noise


def _words(*values):
  return [jnp.asarray(np.asarray(value, np.uint32)) for value in values]


def test_threefry_equals_jax():
  rng = np.random.default_rng(0)
  counts = rng.integers(0, 2**32, (2, 101), dtype=np.uint32)
  for pair in rng.integers(0, 2**32, (5, 2), dtype=np.uint32):
    want = jax.extend.random.threefry_2x32(
      jnp.asarray(pair), jnp.asarray(counts.reshape(-1))
    )
    keys = np.broadcast_to(pair[:, None], counts.shape)
    got = sampling.threefry2x32(*_words(*keys, *counts))
    np.testing.assert_array_equal(np.concatenate(got), np.asarray(want))


@pytest.mark.parametrize(
  ("key", "counter", "want"),
  [  # the published vectors of Random123 1.09, kat_vectors
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((2**32 - 1,) * 2, (2**32 - 1,) * 2, (0x1CB996FC, 0xBB002BE7)),
    (
      (0x13198A2E, 0x03707344),
      (0x243F6A88, 0x85A308D3),
      (0xC4923A9C, 0x483DF7A0),
    ),
  ],
)
def test_threefry_known_answers(key, counter, want):
  got = sampling.threefry2x32(*_words(*key, *counter))
  assert tuple(int(x) for x in got) == want


_noise_of_size = jax.jit(sampling.gumbel, static_argnums=2)


def _noise_of(key, position):
  return _noise_of_size(key, position, 101)


def test_noise_by_hand():
  key = np.asarray(sampling.sequence_key(3))
  counts = np.stack([np.full(101, 17), np.arange(101)]).astype(np.uint32)
  bits = np.asarray(
    jax.extend.random.threefry_2x32(
      jnp.asarray(key), jnp.asarray(counts.reshape(-1))
    )
  )[:101]
  uniform = ((bits >> 1).astype(np.float32) + np.float32(0.5)) * 2.0**-31
  want = -np.log(-np.log1p(-np.float64(uniform)))
  got = _noise_of(jnp.asarray(key)[None], jnp.array([17]))[0]
  # Two logarithms of a few units in the last place each: the inner one's
  # relative error becomes the outer one's absolute error.
  np.testing.assert_allclose(got, want, rtol=2.0**-21, atol=2.0**-21)


def test_noise_of_extreme_bits_is_finite(monkeypatch):
  extremes = jnp.asarray(np.array([[0, 1, 2**32 - 1]], np.uint32))
  monkeypatch.setattr(
    _noise, "threefry2x32", lambda *_: (extremes, jnp.zeros_like(extremes))
  )
  got = np.asarray(
    sampling.gumbel(jnp.zeros((1, 2), jnp.uint32), jnp.array([0]), 3)
  )[0]
  # u = 2^-32, the same (the lowest bit is dropped), 1 - 2^-24.
  want = [-math.log(-math.log1p(-u)) for u in (2.0**-32, 1 - 2.0**-24)]
  np.testing.assert_allclose(got, [want[0], want[0], want[1]], rtol=1e-6)


def test_noise_is_a_function_of_key_position_and_id_alone():
  keys = jnp.stack([sampling.sequence_key(seed) for seed in (4, 5, 4)])
  positions = jnp.array([7, 7, 8])
  batch = np.asarray(_noise_of(keys, positions))
  for row in range(3):
    alone = _noise_of(keys[row : row + 1], positions[row : row + 1])
    np.testing.assert_array_equal(alone[0], batch[row])
  order = np.array([2, 0, 1])
  np.testing.assert_array_equal(
    _noise_of(keys[order], positions[order]), batch[order]
  )
  for size in (1, 53, 211):
    other = np.asarray(_noise_of_size(keys, positions, size))
    shared = min(size, 101)
    np.testing.assert_array_equal(other[:, :shared], batch[:, :shared])
  assert not np.intersect1d(batch[0], batch[1]).size  # another key
  assert not np.intersect1d(batch[0], batch[2]).size  # another position


def test_noise_is_standard_gumbel():
  rows = 7001
  key = jnp.broadcast_to(sampling.sequence_key(11)[None], (rows, 2))
  noise = np.asarray(
    _noise_of(key, jnp.arange(rows, dtype=jnp.int32)), np.float64
  )
  count = noise.size
  variance = math.pi**2 / 6
  # Five standard errors; the kurtosis of a Gumbel variable is 5.4.
  assert abs(noise.mean() - np.euler_gamma) < 5 * math.sqrt(variance / count)
  assert abs(noise.var() - variance) < 5 * variance * math.sqrt(4.4 / count)
  # Kolmogorov–Smirnov at one in a thousand: 1.95 / sqrt(n).
  law = np.exp(-np.exp(-np.sort(noise.reshape(-1))))
  steps = np.arange(count) / count
  distance = max(
    np.abs(law - steps).max(), np.abs(law - steps - 1 / count).max()
  )
  assert distance < 1.95 / math.sqrt(count)
  # Neighbours in position and in id are uncorrelated.
  for one, two in (
    (noise[1:], noise[:-1]),
    (noise[:, 1:], noise[:, :-1]),
  ):
    slope = np.corrcoef(one.reshape(-1), two.reshape(-1))[0, 1]
    assert abs(slope) < 5 / math.sqrt(one.size)


@pytest.mark.parametrize("seed", [0, 1, 7, 2**31 - 1])
def test_a_key_is_its_seed(seed):
  want = sampling.sequence_key(seed)
  for same in (np.int64(seed), jax.random.key(seed)):
    np.testing.assert_array_equal(sampling.sequence_key(same), want)


def test_keys_differ_by_seed_and_sample():
  # 2**32 and 2**32 + 1 would be 0 and 1 if seeds were cut to one word.
  seeds = (0, 1, 2, 2**32, 2**32 + 1, 2**64 - 1)
  keys = {
    tuple(np.asarray(sampling.sequence_key(seed, sample=sample)).tolist())
    for seed in seeds
    for sample in (0, 1, 2, 2**32 - 1)
  }
  assert len(keys) == len(seeds) * 4
  key = jax.random.key(5)
  np.testing.assert_array_equal(
    sampling.sequence_key(key, sample=3), sampling.sequence_key(5, sample=3)
  )


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seeds_out_of_range(seed):
  with pytest.raises(ValueError, match=rf"seed is {seed};.*\[0, 2\*\*64\)"):
    sampling.sequence_key(seed)


def test_seeds_of_another_kind():
  with pytest.raises(TypeError):
    sampling.sequence_key(1.5)
  with pytest.raises(ValueError, match="4 words"):
    sampling.sequence_key(jax.random.key(0, impl="rbg"))
  with pytest.raises(ValueError, match=r"shape \(2,\)"):
    sampling.sequence_key(jax.random.split(jax.random.key(0), 2))
