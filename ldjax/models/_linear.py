"""The one weight product, in the form that each platform runs best."""

from typing import Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from ldjax import typing
from ldjax.models import _quantized

Array = typing.Array


class OtherWeight(Protocol):
  """A weight `[out, in]` that is no array and knows its own product."""

  @property
  def shape(self) -> tuple[int, ...]:
    """[out, in]."""

  def product(self, rows: Array) -> Array:
    """[n, in] -> [n, out], of float32."""


Weight: TypeAlias = Array | _quantized.NarrowWeight | OtherWeight


def linear(
  x: Array,
  weight: Weight,
  bias: Array | None = None,
  *,
  out_dtype: jax.typing.DTypeLike | None = None,
) -> Array:
  """Multiplies rows by a weight matrix held as `[out, in]`.

  fp32 products are computed in fp32 everywhere (no TF32).

  Args:
    x: [..., in].
    weight: [out, in]; of another dtype than `x`, it is the weight's that they
      are multiplied in. See `narrow` for weights in fewer bits.
    bias: [out] or None.
    out_dtype: of the result, default that of `x`.

  Returns:
    [..., out].

  Example:
    >>> import jax.numpy as jnp
    >>> linear(jnp.array([[1., 2.]]), jnp.array([[3., 4.], [5., 6.]]))
    Array([[11., 17.]], dtype=float32)
  """
  out_dtype = x.dtype if out_dtype is None else out_dtype
  rows = x.reshape(-1, x.shape[-1])
  if isinstance(weight, _quantized.NarrowWeight) and not weight.rows:
    weight = weight.wide(x.dtype)
  if not isinstance(weight, jax.Array | np.ndarray):
    out = weight.product(rows).astype(out_dtype)
    return _finish(out, x, bias)
  rows = rows.astype(weight.dtype)
  precision = (
    lax.Precision.HIGHEST
    if weight.dtype == jnp.float32
    else lax.Precision.DEFAULT
  )

  def product(lhs, rhs, contract):
    return lax.dot_general(
      lhs,
      rhs,
      (contract, ((), ())),
      precision=precision,
      preferred_element_type=out_dtype,
    )

  def plain(rows, weight):
    return product(rows, weight, ((1,), (1,)))

  def cpu(rows, weight):
    # XLA:CPU streams the weights best as `W @ x`; the barriers keep it from
    # moving the transposes back into the product, which at 2 to 32 rows costs
    # up to twice as much.
    if rows.shape[0] == 1:
      return product(weight, rows[0], ((1,), (0,)))[None]
    columns = lax.optimization_barrier(rows.T)
    result = product(weight, columns, ((1,), (0,)))
    return lax.optimization_barrier(result).T

  out = lax.platform_dependent(rows, weight, cpu=cpu, default=plain)
  return _finish(out, x, bias)


def _finish(out: Array, x: Array, bias: Array | None) -> Array:
  """The rows of a product as `x` has them, and the bias."""
  out = out.reshape(*x.shape[:-1], out.shape[-1])
  if bias is not None:
    out = out + jnp.broadcast_to(bias.astype(out.dtype), out.shape)
  return out


class Linear(nnx.Module):
  """A weight `[out, in]` and, where the model has one, a bias."""

  def __init__(
    self,
    in_features: int,
    out_features: int,
    *,
    use_bias: bool,
    dtype: jax.typing.DTypeLike,
    rngs: nnx.Rngs,
  ):
    scale = in_features**-0.5
    self.weight = nnx.Param(
      scale
      * jax.random.normal(rngs.params(), (out_features, in_features), dtype)
    )
    self.bias = (
      nnx.Param(jnp.zeros((out_features,), dtype)) if use_bias else None
    )

  def __call__(self, x: Array) -> Array:
    bias = None if self.bias is None else self.bias[...]
    # Not self.weight[...]: what is no array can't be indexed.
    return linear(x, self.weight.get_value(), bias)
