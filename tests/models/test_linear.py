"""The weight product: one value on every path, one form a platform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldjax import models

_IN, _OUT = 101, 13
_linear = jax.jit(models.linear, static_argnames="out_dtype")


def _arrays(dtype, *shapes):
  rng = np.random.default_rng(0)
  return [
    jnp.asarray(rng.normal(size=s).astype(np.float32)).astype(dtype)
    for s in shapes
  ]


def _wide(x):
  return np.asarray(x).astype(np.float64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("rows", [1, 2, 7, 33])
def test_equals_numpy(dtype, rows):
  x, weight, bias = _arrays(dtype, (rows, _IN), (_OUT, _IN), (_OUT,))
  want = _wide(x) @ _wide(weight).T
  # Summed in fp32: at most `_IN` roundings of 2^-24 of a partial sum, which
  # is under the sum of magnitudes; then one rounding to the result's dtype.
  magnitude = np.abs(_wide(x)) @ np.abs(_wide(weight)).T
  unit = {"float32": 0.0, "bfloat16": 2.0**-9, "float16": 2.0**-12}[dtype]
  unit *= 2  # of the number itself, not of the next power of two
  tolerance = _IN * 2.0**-24 * magnitude + unit * np.abs(want)
  got = _linear(x, weight)
  assert got.dtype == dtype
  assert (np.abs(_wide(got) - want) <= tolerance).all()
  wide = _linear(x, weight, out_dtype=jnp.float32)
  assert wide.dtype == jnp.float32
  assert (np.abs(_wide(wide) - want) <= _IN * 2.0**-24 * magnitude).all()
  # With a bias: one more rounding, of the sum.
  want = want + _wide(bias)
  tolerance += (unit + 2.0**-23) * np.abs(want) + unit * np.abs(_wide(bias))
  assert (np.abs(_wide(_linear(x, weight, bias)) - want) <= tolerance).all()


def test_leading_axes_are_rows():
  x, weight = _arrays("float32", (2, 3, 5, _IN), (_OUT, _IN))
  got = _linear(x, weight)
  assert got.shape == (2, 3, 5, _OUT)
  np.testing.assert_array_equal(
    got.reshape(30, _OUT), _linear(x.reshape(30, _IN), weight)
  )
  assert _linear(x[0, 0, 0], weight).shape == (_OUT,)


@pytest.mark.parametrize("rows", [1, 3])
def test_under_vmap(rows):
  x, weight = _arrays("float32", (5, rows, _IN), (5, _OUT, _IN))
  tolerance = 1e-4  # _IN * 2^-24 * the sum of magnitudes, about 75
  one = jax.jit(jax.vmap(models.linear, in_axes=(0, None)))(x, weight[0])
  want = np.einsum("bri,oi->bro", _wide(x), _wide(weight[0]))
  np.testing.assert_allclose(one, want, rtol=0, atol=tolerance)
  each = jax.jit(jax.vmap(models.linear))(x, weight)
  want = np.einsum("bri,boi->bro", _wide(x), _wide(weight))
  np.testing.assert_allclose(each, want, rtol=0, atol=tolerance)


def _lowered(rows, platforms):
  x, weight = _arrays("float32", (rows, _IN), (_OUT, _IN))
  traced = jax.jit(models.linear).trace(x, weight)
  return traced.lower(lowering_platforms=platforms).as_text()


def test_the_form_follows_the_platform_compiled_for():
  # Not the default backend, which is this machine's CPU throughout.
  assert _lowered(7, ("cpu",)).count("optimization_barrier") == 2
  for platform in ("cuda", "rocm", "tpu"):
    text = _lowered(7, (platform,))
    assert "optimization_barrier" not in text
    assert text.count("dot_general") == 1
    # fp32 stays fp32: no TF32, no bf16 passes.
    assert "HIGHEST" in text
  # One row on a CPU is a product of a matrix and a vector.
  text = _lowered(1, ("cpu",))
  assert "optimization_barrier" not in text
  assert f"tensor<{_IN}xf32>) -> tensor<{_OUT}xf32>" in text
  # One export for two platforms holds both forms.
  both = _lowered(7, ("cpu", "cuda"))
  assert both.count("optimization_barrier") == 2
  assert "contracting_dims = [1] x [0]" in both
  assert "contracting_dims = [1] x [1]" in both


def test_gradients_pass():
  x, weight = _arrays("float32", (3, _IN), (_OUT, _IN))
  got = jax.jit(jax.grad(lambda w: models.linear(x, w).sum()))(weight)
  want = np.broadcast_to(_wide(x).sum(0), (_OUT, _IN))
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
