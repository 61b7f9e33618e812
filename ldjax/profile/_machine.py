"""How fast this machine reads and multiplies: ceilings, measured."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Machine(NamedTuple):
  """What the device reached on large arrays."""

  bytes_per_second: float
  """Of the fastest of several ways to read an array once."""
  flops_per_second: float
  """Of a product of two square matrices."""
  read_bytes: int
  """Size of the array that was read."""
  matmul_size: int
  """Rows and columns of the matrices."""
  dtype: str
  """Of them."""


def _fastest(call: Callable[[], Any], repeats: int) -> float:
  jax.block_until_ready(call())  # compiles
  times = []
  for _ in range(repeats):
    began = time.perf_counter()
    jax.block_until_ready(call())
    times.append(time.perf_counter() - began)
  return min(times)


_total = jax.jit(jnp.sum)
_columns = jax.jit(lambda x: x.sum(0))
_maxima = jax.jit(lambda x: x.max(1))
_product = jax.jit(
  lambda a, b: jax.lax.dot(a, b, precision=jax.lax.Precision.HIGHEST)
)


def measure_machine(
  dtype: Any = "float32",
  *,
  read_bytes: int | None = None,
  matmul_size: int | None = None,
  repeats: int = 5,
) -> Machine:
  """Measures the ceilings of the default device with small programs.

  The fastest call counts: a ceiling is what nothing disturbed.

  Args:
    dtype: of the matrices, that of the model's weights.
    read_bytes: default 128 MiB on a CPU, more than its caches hold, and 1 GiB
      elsewhere.
    matmul_size: default 1024 on a CPU and 8192 elsewhere.
    repeats: calls of each program.

  Raises:
    ValueError: for sizes or repeats below 1.

  Example:
    >>> machine = measure_machine(read_bytes=2**20, matmul_size=64, repeats=1)
    >>> machine.bytes_per_second > 0, machine.matmul_size
    (True, 64)
  """
  on_cpu = jax.default_backend() == "cpu"
  if read_bytes is None:
    read_bytes = 2**27 if on_cpu else 2**30
  if matmul_size is None:
    matmul_size = 1024 if on_cpu else 8192
  for name, value, least in (
    ("read_bytes", read_bytes, 4096),
    ("matmul_size", matmul_size, 1),
    ("repeats", repeats, 1),
  ):
    if value < least:
      raise ValueError(f"{name} is {value}; it must be at least {least}")
  flat = jnp.ones((read_bytes // 4096 * 1024,), jnp.float32)
  wide, long = flat.reshape(-1, 1024), flat.reshape(4, -1)
  reading = min(
    _fastest(lambda: _total(flat), repeats),
    _fastest(lambda: _columns(wide), repeats),
    _fastest(lambda: _maxima(long), repeats),
  )
  matrix = jnp.ones((matmul_size, matmul_size), jnp.dtype(dtype))
  multiplying = _fastest(lambda: _product(matrix, matrix), repeats)
  return Machine(
    bytes_per_second=flat.nbytes / reading,
    flops_per_second=2 * matmul_size**3 / multiplying,
    read_bytes=flat.nbytes,
    matmul_size=matmul_size,
    dtype=jnp.dtype(dtype).name,
  )
