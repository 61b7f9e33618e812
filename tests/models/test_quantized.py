"""Weights of fewer bits against NumPy."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldjax import models

_IN, _OUT = 96, 13
_linear = jax.jit(models.linear, static_argnames="out_dtype")


def _arrays(rows):
  rng = np.random.default_rng(0)
  # Rows of very different sizes: a scale for all of them would lose the small.
  scale = 10.0 ** rng.uniform(-3, 3, size=(rows, 1))
  x = (scale * rng.normal(size=(rows, _IN))).astype(np.float32)
  return x, rng.normal(size=(_OUT, _IN)).astype(np.float32)


def _rounded(x, largest, axis=-1):
  scale = np.abs(x).max(axis, keepdims=True) / np.float32(largest)
  return np.round(x / scale), scale


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_integers_times_integers(rows):
  x, weight = _arrays(rows)
  values, scale = _rounded(x, 127)
  narrow = models.narrow(jnp.asarray(weight), "w8a8")
  integers = np.asarray(narrow.array.qvalue).astype(np.float64)
  _, scales = _rounded(weight, 127.5)
  # The largest number of a row may be a step off: it is on the last half.
  assert (np.abs(integers * scales - weight) <= 0.51 * scales).all()
  want = (values @ integers.T) * scale * scales.T
  got = _linear(x, narrow)
  np.testing.assert_allclose(got, want, rtol=1e-6)
  # What eight bits lose: half a step of either factor, summed over columns.
  exact = x.astype(np.float64) @ weight.T
  limit = (
    0.5
    * (
      scale * np.abs(weight).sum(1) + scales.T * np.abs(x).sum(1, keepdims=True)
    )
    + 0.25 * _IN * scale * scales.T
  )
  assert (np.abs(got - exact) <= limit).all()


def test_a_row_does_not_depend_on_the_others():
  x, weight = _arrays(7)
  narrow = models.narrow(jnp.asarray(weight), "w8a8")
  alone = [np.asarray(_linear(x[i : i + 1], narrow))[0] for i in range(7)]
  np.testing.assert_array_equal(_linear(x, narrow), alone)


def test_rows_of_zeros_and_of_what_is_no_number():
  _, weight = _arrays(1)
  x = np.ones((3, _IN), np.float32)
  x[0], x[1, 3] = 0, np.nan
  got = np.asarray(_linear(x, models.narrow(jnp.asarray(weight), "w8a8")))
  assert (got[0] == 0).all()
  assert np.isnan(got[1]).all()
  assert np.isfinite(got[2]).all()


@pytest.mark.parametrize(
  ("precision", "largest", "columns"), [("int8", 127.5, _IN), ("int4", 7.5, 32)]
)
def test_the_weight_alone(precision, largest, columns):
  x, weight = _arrays(3)
  narrow = models.narrow(jnp.asarray(weight), precision)
  assert narrow.shape == (_OUT, _IN)
  groups = weight.reshape(_OUT, -1, columns)
  _, scale = _rounded(groups, largest)
  wide = np.asarray(narrow.wide(jnp.float32)).reshape(groups.shape)
  # int4 has a number more below zero than above; scales may use it.
  assert (np.abs(wide - groups) <= 0.51 * scale).all()
  want = x.astype(np.float64) @ wide.reshape(_OUT, _IN).T
  got = np.asarray(_linear(x, narrow))
  magnitude = np.abs(x) @ np.abs(weight).T
  assert (np.abs(got - want) <= _IN * 2.0**-23 * magnitude).all()


def test_an_unknown_precision_and_a_missing_package(monkeypatch):
  weight = jnp.ones((2, 3))
  with pytest.raises(ValueError, match="known are 'bfloat16'"):
    models.narrow(weight, "int3")
  monkeypatch.setitem(sys.modules, "qwix", None)
  with pytest.raises(ValueError, match=r"pip install 'ldjax\[quantized\]'"):
    models.narrow(weight, "int8")
