"""Attention over eight-bit pages equals attention over what they stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldjax import memory, pallas_kernels
from ldjax.pallas_kernels._prefix_attention import _reference

_DTYPES = ("int8", "float8_e4m3fn")
_STATIC = ("scale", "soft_cap")
_prefix = jax.jit(pallas_kernels.prefix_attention, static_argnames=_STATIC)
_definition = jax.jit(_reference.prefix_attention, static_argnames=_STATIC)
_tree = jax.jit(pallas_kernels.tree_attention, static_argnames=_STATIC)

_LENGTHS = (0, 1, 7, 8, 293)
_ROWS, _NODES, _HEADS, _KV_HEADS, _HEAD_DIM, _SIZE = 5, 3, 6, 2, 10, 7


def _problem(dtype, query_dtype="float32"):
  """A query; quantised pages with NaN wherever nothing lives; their floats."""
  rng = np.random.default_rng(0)
  live = [-(-length // _SIZE) for length in _LENGTHS]
  num_pages = sum(live) + 3
  pages = rng.normal(size=(num_pages, _KV_HEADS, _SIZE, 2 * _HEAD_DIM))
  pages *= 10.0 ** rng.uniform(-1, 0.5, (*pages.shape[:-1], 1))
  # Far out of range on either side, or a page that is another row's.
  table = rng.choice([num_pages, 10**6, -7, 0], (_ROWS, max(live) + 1))
  order = rng.permutation(num_pages)
  used = np.zeros((num_pages, _SIZE), bool)
  taken = 0
  for row, length in enumerate(_LENGTHS):
    table[row, : live[row]] = order[taken : taken + live[row]]
    taken += live[row]
    for s in range(length):
      used[table[row, s // _SIZE], s % _SIZE] = True
  held = memory.cast_kv(jnp.asarray(pages.astype(np.float32)), dtype)
  floats = np.asarray(held.values).astype(np.float32) * np.repeat(
    np.asarray(held.scales), _HEAD_DIM, axis=-1
  )
  dead = ~used[:, None, :, None]
  garbage = jnp.asarray(127 if dtype == "int8" else jnp.nan, held.dtype)
  held = memory.QuantizedKV(
    jnp.where(dead, garbage, held.values),
    jnp.where(dead, jnp.nan, held.scales),
  )
  query = rng.normal(size=(_ROWS, _NODES, _HEADS, _HEAD_DIM))
  return (
    jnp.asarray(query.astype(np.float32)).astype(query_dtype),
    held,
    jnp.asarray(np.where(dead, np.nan, floats).astype(np.float32)),
    jnp.asarray(table.astype(np.int32)),
    jnp.asarray(np.array(_LENGTHS, np.int32)),
  )


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize(
  ("window", "soft_cap"), [(None, None), (5, None), (90, 1.5)]
)
def test_the_prefix_is_that_of_its_floats(dtype, window, soft_cap):
  query, held, floats, table, length = _problem(dtype)
  start = None
  if window is not None:
    depth = jnp.array([[0, 1, window]])
    start = jnp.maximum(length[:, None] + depth - (window - 1), 0)
  options = {"scale": 0.3, "soft_cap": soft_cap, "start": start}
  # Attention over floats has oracles of its own.
  want = _definition(query, floats, table, length, **options)
  assert np.isfinite(np.asarray(want[0])).all()
  for attention in (_definition, _prefix):
    got = attention(query, held, table, length, **options)
    for mine, true in zip(got, want, strict=True):
      assert mine.dtype == jnp.float32
      np.testing.assert_allclose(mine, true, rtol=0, atol=3e-5)


def test_a_narrow_query():
  query, held, floats, table, length = _problem("int8", "bfloat16")
  want = _definition(query, floats, table, length, scale=0.3)
  got = _prefix(query, held, table, length, scale=0.3)
  # Eight bits of int8 are exact in bfloat16; weights and outputs of size 3
  # are rounded to 2^-9 of it.
  for mine, true in zip(got, want, strict=True):
    np.testing.assert_allclose(mine, true, rtol=0, atol=3 * 2.0**-6)


@pytest.mark.parametrize("dtype", _DTYPES)
def test_no_float_copy_of_the_pool_is_made(dtype):
  query, held, _, table, length = _problem(dtype)
  text = (
    _prefix.lower(query, held, table, length, scale=0.3).compile().as_text()
  )
  pool = ",".join(map(str, held.shape))
  assert f"[{pool}]" in text
  assert f"f32[{pool}]" not in text


def _block(dtype, rng):
  shape = (_ROWS, _NODES, _KV_HEADS, 2 * _HEAD_DIM)
  held = memory.cast_kv(
    jnp.asarray(rng.normal(size=shape).astype(np.float32)), dtype
  )
  floats = np.asarray(held.values).astype(np.float32) * np.repeat(
    np.asarray(held.scales), _HEAD_DIM, axis=-1
  )
  return held, jnp.asarray(floats)


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("soft_cap", [None, 1.5])
def test_the_tree_is_that_of_its_floats(dtype, soft_cap):
  query, held, floats, table, length = _problem(dtype)
  block, block_floats = _block(dtype, np.random.default_rng(1))
  mask = pallas_kernels.ancestor_mask(jnp.array([[-1, 0, 0]] * _ROWS))
  options = {"scale": 0.3, "soft_cap": soft_cap}
  want = _tree(query, block_floats, floats, table, length, mask, **options)
  got = _tree(query, block, held, table, length, mask, **options)
  np.testing.assert_allclose(got, want, rtol=0, atol=3e-5)


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("half", ["key", "value"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_broken_node_reaches_only_its_descendants(dtype, half, value):
  """Rounding hides no number that is not finite."""
  rng = np.random.default_rng(0)
  parents = jnp.asarray([[-1, 0, 0, 1, 2]])
  query = jnp.asarray(rng.standard_normal((1, 5, 3, 8)), jnp.float32)
  pages = rng.standard_normal((2, 1, 3, 16)).astype(np.float32)
  block = rng.standard_normal((1, 5, 1, 16)).astype(np.float32)

  def run(block):
    return np.asarray(
      _tree(
        query,
        memory.cast_kv(jnp.asarray(block), dtype),
        memory.cast_kv(jnp.asarray(pages), dtype),
        jnp.asarray([[1, 0]]),
        jnp.asarray([5]),
        pallas_kernels.ancestor_mask(parents),
        scale=0.3,
      )
    )

  sound = run(block)
  block[0, 2, 0, 3 if half == "key" else 11] = value
  broken = run(block)
  np.testing.assert_array_equal(broken[0, [0, 1, 3]], sound[0, [0, 1, 3]])
  assert np.isnan(broken[0, [2, 4]]).all()


@pytest.mark.parametrize("platform", ["cpu", "cuda", "rocm", "tpu"])
@pytest.mark.parametrize("dtype", _DTYPES)
def test_lowers_for_every_platform(platform, dtype):
  def attend(query, block, pages, table, length, parents):
    mask = pallas_kernels.ancestor_mask(parents)
    return pallas_kernels.tree_attention(
      query, block, pages, table, length, mask, scale=0.5
    )

  def held(*shape):
    return memory.QuantizedKV(
      jax.ShapeDtypeStruct(shape, dtype),
      jax.ShapeDtypeStruct((*shape[:-1], 2), jnp.float32),
    )

  integers = ((2, 3), (2,), (2, 5))
  traced = jax.jit(attend).trace(
    jax.ShapeDtypeStruct((2, 5, 6, 16), jnp.bfloat16),
    held(2, 5, 2, 32),
    held(7, 2, 16, 32),
    *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in integers),
  )
  text = traced.lower(lowering_platforms=(platform,)).as_text()
  assert "stablehlo.while" in text
