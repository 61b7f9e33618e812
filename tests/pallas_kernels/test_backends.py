"""Every backend of `prefix_attention` against its definition.

On a CPU the kernels are interpreted: TPU's by both of its interpreters, the
second of which fills memory with NaN, and GPU's with its detector of races. On
a device they are compiled. What a backend's entry in `LIMITS` excludes must be
refused, and nothing else.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from ldjax import _base, pallas_kernels
from ldjax.pallas_kernels import _limits, _prefix_attention
from ldjax.pallas_kernels._prefix_attention import _mosaic_tpu, _reference

_definition = jax.jit(
  _reference.prefix_attention, static_argnames=("scale", "soft_cap")
)

_PLATFORM = jax.default_backend()
_BACKENDS = {
  "cpu": ("xla", "tpu_plain", "tpu_nan", "gpu_races"),
  "tpu": ("xla", "mosaic_tpu"),
  "gpu": ("xla", "mosaic_gpu"),
}[_PLATFORM]
_IMPLEMENTATION = {
  "xla": "xla",
  "tpu_plain": "mosaic_tpu",
  "tpu_nan": "mosaic_tpu",
  "mosaic_tpu": "mosaic_tpu",
  "gpu_races": "mosaic_gpu",
  "mosaic_gpu": "mosaic_gpu",
}


@functools.cache
def _function(backend):
  """(query, pages, table, length, start=, scale=, soft_cap=) -> result."""
  static = ("scale", "soft_cap")
  if backend.startswith("tpu_"):
    function = functools.partial(
      _mosaic_tpu.prefix_attention,
      # Several steps, several tiles of rows, several blocks of heads.
      blocks=pallas_kernels.PrefixBlocks(
        step_pages=2, query_rows=16, kv_heads=2
      ),
      interpret=True if backend == "tpu_plain" else pltpu.InterpretParams(),
    )
  elif backend == "gpu_races":
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from ldjax.pallas_kernels._prefix_attention import _mosaic_gpu

    function = functools.partial(
      _mosaic_gpu.prefix_attention,
      interpret=plgpu.InterpretGPUParams(detect_races=True),
    )
  else:
    function = functools.partial(
      pallas_kernels.prefix_attention, implementation=backend
    )
  return jax.jit(function, static_argnames=static)


def _races():
  from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

  return gpu_callbacks.get_races().races_found


def _problem(
  lengths, *, groups, kv_heads, head_dim, page_size, nodes, dtype, page_dtype
):
  """Pages of NaN, scrambled, in which only live slots hold numbers."""
  rng = np.random.default_rng(sum(lengths) + head_dim)
  rows = len(lengths)
  live = [-(-length // page_size) for length in lengths]
  num_pages = sum(live) + 3
  eight = page_dtype in ("int8", "float8_e4m3fn")
  values = np.full((num_pages, kv_heads, page_size, 2 * head_dim), np.nan)
  if eight:
    values = np.full(values.shape, 127.0)
  scales = np.full((num_pages, kv_heads, page_size, 2), np.nan)
  order = rng.permutation(num_pages)
  table = rng.choice(
    [num_pages, 10**6, -7, 0, num_pages - 1], (rows, max(live) + 2)
  )
  taken = 0
  for row, length in enumerate(lengths):
    table[row, : live[row]] = order[taken : taken + live[row]]
    taken += live[row]
    for s in range(length):
      place = table[row, s // page_size], slice(None), s % page_size
      normal = rng.normal(size=(kv_heads, 2, head_dim))
      scale = np.abs(normal).max(-1) / 127.0
      scales[place] = scale
      if eight:
        normal = np.round(normal / scale[..., None])
      values[place] = normal.reshape(kv_heads, -1)
  pages = jnp.asarray(values.astype(np.float32)).astype(page_dtype)
  if eight:
    pages = _base.QuantizedKV(pages, jnp.asarray(scales.astype(np.float32)))
  query = rng.normal(size=(rows, nodes, groups * kv_heads, head_dim))
  return (
    jnp.asarray(query.astype(np.float32)).astype(dtype),
    pages,
    jnp.asarray(table.astype(np.int32)),
    jnp.asarray(np.array(lengths, np.int32)),
  )


def _starts(lengths, nodes, window):
  """Nodes at several depths; the last is deeper than the window is long."""
  depth = np.arange(nodes) * (window // max(nodes - 1, 1) + 1)
  position = np.array(lengths)[:, None] + depth
  return jnp.asarray(np.maximum(position - (window - 1), 0), jnp.int32)


def _tolerance(dtype):
  # fp32: scores are sums of H products of normal numbers, good to some 1e-6.
  # 16 bits: queries, weights and pages are rounded to eight bits (bf16) or
  # eleven; see test_prefix_attention.
  return {"float32": 3e-5, "bfloat16": 2.0**-5, "float16": 2.0**-8}[dtype]


def _check(backend, problem, **settings):
  implementation = _IMPLEMENTATION[backend]
  entry = _limits.limits("prefix_attention", implementation)
  query, pages = problem[:2]
  why = _limits.refusals(
    entry,
    dtype=query.dtype.name,
    page_dtype=pages.dtype.name,
    head_dim=query.shape[-1],
    page_size=pages.shape[2],
  )
  old = [reason for reason in why if reason.startswith("jax is")]
  if old:
    pytest.skip(f"{implementation}: {old[0]}")
  if why:
    with pytest.raises(ValueError, match="can't do this") as error:
      pallas_kernels.prefix_attention(
        *problem, implementation=implementation, **settings
      )
    assert all(reason in str(error.value) for reason in why)
    return
  got = _function(backend)(*problem, **settings)
  want = _definition(*problem, **settings)
  for mine, true in zip(got, want, strict=True):
    assert mine.dtype == jnp.float32
    np.testing.assert_allclose(
      mine, true, rtol=0, atol=_tolerance(query.dtype.name)
    )
  seen = np.isfinite(want[1])
  assert (np.asarray(got[0])[~seen] == 0).all()
  assert np.isneginf(np.asarray(got[1])[~seen]).all()
  if backend == "gpu_races":
    assert not _races()


def _edges(page_size):
  return (0, 1, page_size - 1, page_size, page_size + 1)


_DTYPES = (
  ("float32", "float32"),
  ("bfloat16", "bfloat16"),
  ("float32", "bfloat16"),
  ("float16", "float16"),
  ("float32", "int8"),
  ("bfloat16", "int8"),
  ("float32", "float8_e4m3fn"),
)


@pytest.mark.parametrize("backend", _BACKENDS)
@pytest.mark.parametrize(
  ("groups", "kv_heads", "head_dim", "page_size", "dtypes", "window"),
  [
    (3, 1, 64, 16, ("float32", "float32"), None),
    (8, 2, 128, 8, ("bfloat16", "bfloat16"), 5),
    (1, 3, 80, 7, ("float32", "int8"), 9),
  ],
)
def test_equals_the_definition(
  backend, groups, kv_heads, head_dim, page_size, dtypes, window
):
  lengths, nodes = (*_edges(page_size), 5 * page_size + 3), 5
  problem = _problem(
    lengths,
    groups=groups,
    kv_heads=kv_heads,
    head_dim=head_dim,
    page_size=page_size,
    nodes=nodes,
    dtype=dtypes[0],
    page_dtype=dtypes[1],
  )
  start = None if window is None else _starts(lengths, nodes, window)
  cap = None if window is None else 3.0
  _check(backend, problem, scale=0.3, start=start, soft_cap=cap)


@pytest.mark.slow
@pytest.mark.parametrize("backend", _BACKENDS)
@pytest.mark.parametrize("dtypes", _DTYPES, ids="-".join)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_the_whole_matrix(backend, head_dim, dtypes):
  if backend == "tpu_plain":
    pytest.skip("its other interpreter is the stricter one")
  for groups, window in ((1, None), (3, 20), (8, None)):
    lengths, nodes = (*_edges(16), 70), 3
    problem = _problem(
      lengths,
      groups=groups,
      kv_heads=2,
      head_dim=head_dim,
      page_size=16,
      nodes=nodes,
      dtype=dtypes[0],
      page_dtype=dtypes[1],
    )
    start = None if window is None else _starts(lengths, nodes, window)
    _check(backend, problem, scale=head_dim**-0.5, start=start, soft_cap=None)


@pytest.mark.slow
@pytest.mark.parametrize("backend", _BACKENDS)
@pytest.mark.parametrize("page_size", [2, 7, 8, 24, 64, 128])
def test_sizes_of_pages(backend, page_size):
  lengths = (*_edges(page_size), 2 * page_size + 1)
  problem = _problem(
    lengths,
    groups=2,
    kv_heads=3,
    head_dim=64,
    page_size=page_size,
    nodes=4,
    dtype="bfloat16",
    page_dtype="bfloat16",
  )
  _check(backend, problem, scale=0.2, start=None, soft_cap=None)


# jax#24491: attention that is wrong where queries and keys differ in number.
@pytest.mark.slow
@pytest.mark.parametrize("backend", _BACKENDS)
@pytest.mark.parametrize("nodes", [1, 5, 26, 100])
def test_numbers_of_queries_and_keys(backend, nodes):
  problem = _problem(
    (1, 63, 100, 257),
    groups=4,
    kv_heads=1,
    head_dim=64,
    page_size=16,
    nodes=nodes,
    dtype="bfloat16",
    page_dtype="bfloat16",
  )
  _check(backend, problem, scale=0.125, start=None, soft_cap=None)


def test_what_is_chosen_for_a_device():
  """Without a name it always lowers; kernels only where they fit."""

  def kernels(platform, dtype, head_dim, page_size):
    shapes = (
      ((2, 5, 6, head_dim), dtype),
      ((7, 2, page_size, 2 * head_dim), dtype),
      ((2, 3), jnp.int32),
      ((2,), jnp.int32),
    )
    attend = jax.jit(
      lambda *arrays: pallas_kernels.prefix_attention(*arrays, scale=0.5)
    )
    traced = attend.trace(*(jax.ShapeDtypeStruct(*each) for each in shapes))
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    return "tpu_custom_call" in text or "mosaic_gpu" in text

  assert not kernels("cpu", jnp.bfloat16, 64, 16)
  assert kernels("tpu", jnp.bfloat16, 64, 16)
  assert kernels("tpu", jnp.float32, 128, 8)
  assert not kernels("tpu", jnp.float16, 64, 16)
  assert not kernels("tpu", jnp.bfloat16, 80, 16)  # would copy the pool
  assert not kernels("tpu", jnp.bfloat16, 64, 7)
  assert not kernels("cuda", jnp.float32, 64, 16)
  entry = _limits.limits("prefix_attention", "mosaic_gpu")
  fits = _limits.version(jax.__version__) >= _limits.version(entry.since)
  assert kernels("cuda", jnp.bfloat16, 64, 16) == fits
  with pallas_kernels.without_kernels():
    assert not kernels("tpu", jnp.bfloat16, 64, 24)


def test_under_vmap_and_jvp():
  problem = _problem(
    (3, 9),
    groups=2,
    kv_heads=1,
    head_dim=64,
    page_size=8,
    nodes=2,
    dtype="float32",
    page_dtype="float32",
  )
  query, *rest = problem

  def attend(query):
    return pallas_kernels.prefix_attention(query, *rest, scale=0.1)

  want = jnp.stack([attend(query)[0], attend(2 * query)[0]])
  both = jnp.stack([query, 2 * query])
  got = jax.vmap(attend)(both)[0]
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)
  text = (
    jax.jit(jax.vmap(attend)).trace(both).lower(lowering_platforms=("tpu",))
  )
  assert "tpu_custom_call" in text.as_text()
  value, slope = jax.jvp(lambda x: attend(x)[0].sum(), (query,), (query,))
  assert np.isfinite(value) and np.isfinite(slope)


@pytest.mark.parametrize(
  ("changes", "reason"),
  [
    ({"dtype": "float32"}, "the dtype is float32; it takes bfloat16 or"),
    ({"page_dtype": "int8"}, "the pages' dtype is int8; it takes"),
    ({"page_dtype": "float16"}, "it must be that of the queries, bfloat16"),
    ({"head_dim": 80}, "head_dim is 80; it takes 64, 128 or 256"),
    ({"page_size": 24}, "page_size is 24; it takes 8, 16, 32, 64 or 128"),
    (
      {"page_size": 128, "head_dim": 256},
      "is 32768; shared memory takes 16384",
    ),
    ({"jax_version": "0.10.2"}, "jax is 0.10.2; it needs 0.11.2 or later"),
  ],
)
def test_a_refusal_names_value_and_limit(changes, reason):
  entry = _limits.limits("prefix_attention", "mosaic_gpu")
  problem = {
    "dtype": "bfloat16",
    "page_dtype": "bfloat16",
    "head_dim": 128,
    "page_size": 16,
    "jax_version": "0.12.0.1",
  }
  assert _limits.refusals(entry, **problem) == []
  assert any(
    reason in each for each in _limits.refusals(entry, **{**problem, **changes})
  )
  with pytest.raises(ValueError, match="can't do this"):
    _limits.check(entry, **{**problem, **changes})


_NAMED = (
  (
    "prefix_attention",
    lambda dtype: functools.partial(
      pallas_kernels.prefix_attention,
      jnp.ones((1, 5, 2, 64), dtype),
      jnp.ones((3, 1, 16, 128), dtype),
      jnp.array([[2, 0]]),
      jnp.array([20]),
      scale=0.125,
    ),
  ),
  (
    "score",
    lambda dtype: functools.partial(
      pallas_kernels.score, jnp.ones((1, 128), dtype), jnp.ones((9, 128), dtype)
    ),
  ),
)


@pytest.mark.parametrize(("kernel", "build"), _NAMED)
def test_a_named_kernel_runs_nowhere_in_its_place(kernel, build):
  call = functools.partial(build("bfloat16"), implementation="mosaic_tpu")
  reason = (
    f"'mosaic_tpu' of {kernel} is for TPU v4 and later, but this is compiled"
    " for {}. Leave implementation out, or give 'xla'"
  )
  for run in (call, jax.jit(call)):
    with pytest.raises(ValueError, match=reason.format("cpu")):
      run()
  traced = jax.jit(call).trace()
  with pytest.raises(ValueError, match=reason.format("cuda")):
    traced.lower(lowering_platforms=("cuda",))
  traced.lower(lowering_platforms=("tpu",))


def test_a_kernel_that_does_not_compile_is_not_replaced(monkeypatch):
  """Chosen unasked, lowered for a TPU, refused by its compiler."""

  def fail(*_, **__):
    raise NotImplementedError("shared memory is 300 kB; there are 200")

  monkeypatch.setitem(_prefix_attention._KERNELS, "mosaic_tpu", fail)
  jax.clear_caches()
  _prefix_attention._by_platform.cache_clear()
  _prefix_attention._kernel.cache_clear()
  with pytest.raises(NotImplementedError, match="300 kB"):
    jax.jit(_NAMED[0][1]("bfloat16")).trace()
  _prefix_attention._by_platform.cache_clear()
  _prefix_attention._kernel.cache_clear()


@pytest.mark.slow
def test_a_round_with_kernels_gives_the_same_text(monkeypatch):
  """The decoder around the interpreted kernel, against XLA."""
  from ldjax import decoding, sampling, testing

  tokens, lengths = testing.pad_prompts([[5, 9, 2, 7, 7], [3], [8, 1, 4]])

  def run(vocab_size):
    tiny = testing.tiny_model(vocab_size=vocab_size, page_size=4)
    decoder = decoding.speculative(
      tiny.target,
      testing.random_tree_draft(6, 3, vocab_size),
      tiny.init_cache,
      max_len=tiny.max_len,
    )
    params = decoding.DecoderParams(tiny.params)
    given = sampling.make_sampling(3, temperature=[0.0, 0.7, 1.0], seed=3)
    state = jax.jit(
      lambda p: decoder.init(
        p, tokens, lengths, sampling=given, max_new_tokens=12
      )
    )(params)
    step = jax.jit(lambda p, s: decoder.step(p, s)[0])
    for _ in range(12):
      state = step(params, state)
    return np.asarray(state.tokens)

  want = run(41)
  jax.clear_caches()
  used = []

  def by_platform(names, *, blocks, scale, soft_cap):
    del names, blocks

    def attend(query, pages, table, length, start):
      used.append(query.shape)
      return _mosaic_tpu.prefix_attention(
        query,
        pages,
        table,
        length,
        start=start,
        scale=scale,
        soft_cap=soft_cap,
        blocks=pallas_kernels.PrefixBlocks(step_pages=2),
        interpret=pltpu.InterpretParams(),
      )

    return attend

  monkeypatch.setattr(_prefix_attention, "_by_platform", by_platform)
  got = run(41)
  assert used
  np.testing.assert_array_equal(got, want)
