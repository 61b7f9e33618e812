"""Eight-bit rows against NumPy, and that they are moved as they are."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ldjax import memory

_DTYPES = ("int8", "float8_e4m3fn")
_BATCH, _LAYERS, _HEADS, _HEAD_DIM = 3, 2, 2, 5
_NODES, _DEPTH = 7, 4  # T and D+1

_cast = jax.jit(memory.cast_kv, static_argnums=1)
_commit = jax.jit(lambda cache, *args: cache.commit(*args))


def _rounded(kv, dtype):
  """Values and scales of [..., 2H] in NumPy, a row of H numbers at a time."""
  width = kv.shape[-1] // 2
  values = np.zeros(kv.shape, np.float32)
  scales = np.zeros((*kv.shape[:-1], 2), np.float32)
  for index in np.ndindex(kv.shape[:-1]):
    for half in range(2):
      part = slice(half * width, (half + 1) * width)
      row = kv[index][part].astype(np.float32)
      if not np.isfinite(row).all():
        scales[index][half] = np.nan
        continue
      top = np.abs(row).max()
      if top < 1e-30:
        continue
      scale = top / np.float32(127 if dtype == "int8" else 448)
      scales[index][half] = scale
      if dtype == "int8":
        values[index][part] = np.rint(row / scale)
      else:
        values[index][part] = (row / scale).astype(ml_dtypes.float8_e4m3fn)
  return values, scales


def _floats(seed, shape, dtype=np.float32):
  rng = np.random.default_rng(seed)
  spread = 10.0 ** rng.uniform(-3, 3, (*shape[:-1], 1))
  return (spread * rng.normal(size=shape)).astype(dtype)


def _dequantized(kv):
  values, scales = (np.asarray(x).astype(np.float64) for x in kv)
  return values * np.repeat(scales, values.shape[-1] // 2, axis=-1)


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("floats", ["float32", "bfloat16"])
def test_rows_are_scaled_and_rounded(dtype, floats):
  kv = _floats(0, (3, 7, 2, 10)).astype(floats)
  kv[0, 0] = 0
  kv[0, 1] = 1e-38
  kv[0, 2, :, :5] = 0  # zero keys beside values
  kv[0, 3, 0, 2] = np.nan
  kv[0, 4, 1, 7] = -np.inf
  held = _cast(jnp.asarray(kv), dtype)
  assert held.values.dtype == dtype and held.dtype == dtype
  assert held.scales.dtype == jnp.float32
  assert held.shape == kv.shape and held.scales.shape == (3, 7, 2, 2)
  values, scales = _rounded(kv, dtype)
  np.testing.assert_allclose(held.scales, scales, rtol=3e-7)
  # A quotient next to a midpoint may be rounded either way: one step of 127,
  # or one of the eight in a power of two.
  got = np.asarray(held.values).astype(np.float32)
  different = got != values
  assert different.mean() < 0.01
  limit = 1.0 if dtype == "int8" else np.abs(values) / 8 + 2**-8
  assert (np.abs(got - values) <= limit).all()
  # What is read is near what was written, each row by its own size.
  sound = np.isfinite(kv.astype(np.float32)).all(-1)
  true = kv[sound].astype(np.float64).reshape(-1, 5)
  read = _dequantized(held)[sound].reshape(-1, 5)
  bound = np.abs(true).max(-1, keepdims=True) / (254 if dtype == "int8" else 28)
  assert (np.abs(read - true) <= bound * (1 + 1e-6) + 1e-30).all()


@pytest.mark.parametrize("dtype", _DTYPES)
def test_what_is_not_finite_can_be_seen(dtype):
  for value in (np.nan, np.inf, -np.inf):
    kv = np.ones((1, 10), np.float32)
    kv[0, 3] = value
    held = _cast(jnp.asarray(kv), dtype)
    assert np.isnan(held.scales[0, 0]) and np.isfinite(held.scales[0, 1])
    assert np.isfinite(np.asarray(held.values).astype(np.float32)).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_float_caches_only_round(dtype):
  kv = _floats(1, (3, 10))
  got = _cast(jnp.asarray(kv), dtype)
  np.testing.assert_array_equal(got, jnp.asarray(kv).astype(dtype))


@pytest.mark.parametrize(
  "dtype", ["int4", "int16", "float64", "float8_e5m2", "nonsense", "bool"]
)
def test_dtypes_that_no_cache_has(dtype):
  with pytest.raises(ValueError, match=rf"{dtype}; .* int8, float8_e4m3fn"):
    memory.cache_dtype(dtype)
  for create in (memory.PagedKVCache.create, memory.DenseKVCache.create):
    with pytest.raises(ValueError, match=dtype):
      create(
        batch=1,
        max_len=4,
        num_layers=1,
        num_kv_heads=1,
        head_dim=2,
        dtype=dtype,
      )


def _empty(kind, dtype, num_pages=8):
  sizes = {
    "batch": _BATCH,
    "max_len": 12,
    "num_layers": _LAYERS,
    "num_kv_heads": _HEADS,
    "head_dim": _HEAD_DIM,
    "dtype": dtype,
  }
  if kind == "dense":
    return memory.DenseKVCache.create(**sizes)
  return memory.PagedKVCache.create(page_size=3, num_pages=num_pages, **sizes)


def _blocks(seed, dtype):
  shape = (_BATCH, _NODES, _HEADS, 2 * _HEAD_DIM)
  return tuple(
    _cast(jnp.asarray(_floats(seed + layer, shape)), dtype)
    for layer in range(_LAYERS)
  )


_COMMITS = (([4, 2, 0], [6, 0, 0, 3]), ([3, 4, 1], [2, 5, 1, 0]))


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("kind", ["paged", "dense"])
def test_a_commit_copies_bits(kind, dtype):
  cache = _empty(kind, dtype)
  lists = [[] for _ in range(_BATCH)]
  for seed, (count, path) in enumerate(_COMMITS):
    blocks = _blocks(10 * seed, dtype)
    cache, ok = _commit(
      cache, blocks, np.array([path] * _BATCH), np.array(count)
    )
    assert ok.all()
    for row in range(_BATCH):
      for node in path[: count[row]]:
        lists[row].append([x[row, node] for x in jax.tree.leaves(blocks)])
  view = cache.view()
  assert view.length.tolist() == [7, 6, 1]
  size = view.pages[0].shape[2]
  for row in range(_BATCH):
    for position, entry in enumerate(lists[row]):
      page = view.block_table[row, position // size]
      got = [x[page, :, position % size] for x in jax.tree.leaves(view.pages)]
      for mine, true in zip(got, entry, strict=True):
        np.testing.assert_array_equal(mine, true)


def test_blocks_that_were_not_quantised():
  blocks = (jnp.ones((_BATCH, _NODES, _HEADS, 2 * _HEAD_DIM)),) * _LAYERS
  args = np.zeros((_BATCH, _DEPTH), np.int32), np.ones(_BATCH, np.int32)
  for kind in ("paged", "dense"):
    with pytest.raises(ValueError, match=r"float32 in a cache of int8; .*cast"):
      _empty(kind, "int8").commit(blocks, *args)
    with pytest.raises(ValueError, match=r"int8 in a cache of float32"):
      _empty(kind, "float32").commit(_blocks(0, "int8"), *args)


def test_bytes_of_a_page():
  # L, K, Z; 2H numbers of a byte and two scales of four.
  assert _empty("paged", "int8").page_bytes == 2 * 2 * 3 * (10 + 8)
  assert _empty("paged", "bfloat16").page_bytes == 2 * 2 * 3 * 20


def test_a_donated_commit_copies_no_pool(as_users):
  args = (
    _blocks(0, "int8"),
    np.zeros((_BATCH, _DEPTH), np.int32),
    np.array([4, 1, 2], np.int32),
  )
  cache = _empty("paged", "int8")
  copy = re.compile(r"(?:s8\[8,2,3,10\]|f32\[8,2,3,2\])\S* copy\(")

  def copies(**options):
    commit = jax.jit(lambda cache, *args: cache.commit(*args), **options)
    program = commit.lower(cache, *args).compile(as_users)
    return len(copy.findall(program.as_text()))

  assert copies(donate_argnums=0) == 0
  assert copies() == 2 * _LAYERS  # the search does find them


def _filled(seed=3):
  """A float cache of which not every page, nor every held page, is full."""
  cache = _empty("paged", "float32")
  cache = cache.replace(
    pages=tuple(jnp.full_like(x, jnp.nan) for x in cache.pages)
  )
  for step, (count, path) in enumerate(_COMMITS):
    blocks = _blocks(seed + 10 * step, "float32")
    cache, ok = _commit(
      cache, blocks, np.array([path] * _BATCH), np.array(count)
    )
    assert ok.all()
  return cache


def _slots(cache):
  """(page, slot) of every committed position."""
  table, size = np.asarray(cache.block_table), cache.page_size
  return [
    (table[row, s // size], s % size)
    for row in range(_BATCH)
    for s in range(int(cache.length[row]))
  ]


@pytest.mark.parametrize("dtype", _DTYPES)
def test_a_cache_is_quantised_in_place(dtype):
  cache = _filled()
  before = [np.asarray(x) for x in cache.pages]
  old = cache.pages
  after, error = cache.quantize(dtype)
  assert all(x.is_deleted() for x in old)
  assert after.page_size == cache.page_size
  for name in ("block_table", "length", "pool"):
    jax.tree.map(
      np.testing.assert_array_equal, getattr(after, name), getattr(cache, name)
    )
  assert error.largest.shape == error.rms.shape == (_LAYERS, 2)
  for layer in range(_LAYERS):
    held, read = after.pages[layer], _dequantized(after.pages[layer])
    assert held.dtype == dtype
    want = _cast(jnp.asarray(before[layer]), dtype)
    jax.tree.map(np.testing.assert_array_equal, held, want)
    # The error of what is held, key and value apart; the NaN of the rest
    # counts for nothing.
    for half in range(2):
      part = slice(half * _HEAD_DIM, (half + 1) * _HEAD_DIM)
      largest = squares = errors = 0.0
      for page, slot in _slots(cache):
        true = before[layer][page, :, slot, part].astype(np.float64)
        wrong = read[page, :, slot, part] - true
        tops = np.abs(true).max(-1, keepdims=True)
        largest = max(largest, np.abs(wrong / tops).max())
        squares += (true**2).sum()
        errors += (wrong**2).sum()
      assert 0 < largest < (1 / 250 if dtype == "int8" else 1 / 27)
      np.testing.assert_allclose(error.largest[layer, half], largest, rtol=1e-3)
      rms = np.sqrt(errors / squares)
      np.testing.assert_allclose(error.rms[layer, half], rms, rtol=1e-3)


def test_a_quantised_cache_goes_on_as_one_that_always_was():
  """Its rows are those that commits of quantised blocks would have left."""
  cache, _ = _filled().quantize("int8")
  other = _empty("paged", "int8")
  for step, (count, path) in enumerate(_COMMITS):
    blocks = _blocks(3 + 10 * step, "int8")
    other, _ = _commit(
      other, blocks, np.array([path] * _BATCH), np.array(count)
    )
  for page, slot in _slots(cache):
    for mine, true in zip(
      jax.tree.leaves(cache.pages), jax.tree.leaves(other.pages), strict=True
    ):
      np.testing.assert_array_equal(mine[page, :, slot], true[page, :, slot])
  blocks = _blocks(50, "int8")
  path = np.array([[0, 1, 2, 3]] * _BATCH)
  cache, ok = _commit(cache, blocks, path, np.array([1, 0, 3]))
  assert ok.all() and cache.length.tolist() == [8, 6, 4]


def test_a_full_page_that_no_row_holds_counts():
  """A page kept for later prompts: referenced, and in no table."""
  cache = _filled()
  page = int(cache.block_table[0, 0])
  kept = cache.replace(pool=cache.pool.retain(jnp.array([page])))
  kept = kept.release(jnp.ones(_BATCH, bool))
  assert int(kept.pool.num_free) == kept.pool.num_pages - 1
  read = np.asarray(kept.pages[0][page])
  _, error = kept.quantize("int8")
  want = _dequantized(_cast(jnp.asarray(read), "int8")) - read
  rms = np.sqrt((want[..., :5] ** 2).sum() / (read[..., :5] ** 2).sum())
  np.testing.assert_allclose(error.rms[0, 0], rms, rtol=1e-3)


def test_an_empty_cache_has_no_error():
  _, error = _empty("paged", "float32").quantize("int8")
  assert not error.largest.any() and not error.rms.any()


def test_what_cannot_be_quantised():
  with pytest.raises(ValueError, match=r"bfloat16 would save nothing; .* int8"):
    _filled().quantize("bfloat16")
  cache, _ = _filled().quantize("int8")
  with pytest.raises(ValueError, match="quantised already, to int8"):
    cache.quantize("float8_e4m3fn")
