"""The model against NumPy, in one block, in chunks and token by token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ldjax import memory, models
from ldjax.models import _layers

_MAX_LEN = 32


def _model(config, *, seed=0, dtype=jnp.float32, feature_layers=()):
  """A target and weights from NumPy, which compile nothing.

  Norms of one and biases of zero would hide what happens to them.
  """
  target, shapes = models.functionalize(
    models.abstract_model(config, dtype, feature_layers)
  )
  rng = np.random.default_rng(seed)

  def make(path, shape):
    if shape.ndim == 2:
      values = rng.normal(size=shape.shape)
      if path[0].key != "embed_tokens":
        values /= shape.shape[1] ** 0.5
    elif path[-1].key == "bias":
      values = rng.normal(size=shape.shape)
    else:
      values = rng.uniform(0.5, 1.5, shape.shape)
    return jnp.asarray(values.astype(shape.dtype))

  return target, jax.tree_util.tree_map_with_path(make, shapes)


def _cache(config, batch, dtype=jnp.float32, page_size=5):
  return memory.PagedKVCache.create(
    batch=batch,
    max_len=_MAX_LEN,
    num_layers=config.num_layers,
    num_kv_heads=config.num_kv_heads,
    head_dim=config.head_dim,
    page_size=page_size,
    dtype=dtype,
  )


def _run(target):
  """run(params, tokens, positions, parents, cache) -> logits, output."""

  @jax.jit
  def run(params, tokens, positions, parents, cache):
    output = target.forward(params, tokens, positions, parents, cache.view())
    return target.score(params, output.hidden).logits, output

  return run


_commit = jax.jit(lambda cache, *args: cache.commit(*args))


def _extend(run, params, cache, texts, width=None):
  """Appends a text a row, as one chain padded with invalid nodes."""
  width = max(map(len, texts)) if width is None else width
  tokens = np.full((len(texts), width), -1, np.int32)
  for row, text in enumerate(texts):
    tokens[row, : len(text)] = text
  chain = np.arange(width, dtype=np.int32)
  positions = np.asarray(cache.length)[:, None] + chain[None]
  parents = np.tile(chain - 1, (len(texts), 1))
  logits, output = run(params, tokens, positions, parents, cache)
  path = np.tile(chain, (len(texts), 1))
  count = np.array([len(text) for text in texts], np.int32)
  cache, ok = _commit(cache, output.block_kv, path, count)
  assert ok.all()
  return np.asarray(logits), cache


def _whole(prefix, parents):
  """Mask [S, S] and positions [S] of a chain with a tree on its end."""
  size = prefix + len(parents)
  mask = np.tri(size, dtype=bool)
  mask[prefix:, prefix:] = False
  positions = np.arange(size)
  for node, parent in enumerate(parents):
    here = prefix + node
    positions[here] = prefix
    mask[here, here] = True
    if parent >= 0:
      positions[here] = positions[prefix + parent] + 1
      mask[here, prefix:] |= mask[prefix + parent, prefix:]
  return mask, positions


_CONFIGS = {
  "plain": {},
  "tied, one key head, attention biases": {
    "tie_word_embeddings": True,
    "num_heads": 5,
    "num_kv_heads": 1,
    "qkv_bias": True,
    "o_bias": True,
    "rms_norm_eps": 0.25,
  },
  # Wavelengths from 6 to 1350 tokens: some stay, some are stretched in full,
  # some in part.
  "stretched, a key a head, mlp biases": {
    "num_heads": 3,
    "num_kv_heads": 3,
    "head_dim": 14,
    "mlp_bias": True,
    "rope_theta": 500.0,
    "rope_scaling": models.RopeScaling(
      factor=8.0,
      low_freq_factor=1.0,
      high_freq_factor=4.0,
      original_max_position_embeddings=64,
    ),
  },
  "Qwen2: biases but for o, a window in the upper layer": {
    "qkv_bias": True,
    "windows": (None, 4),
  },
  "Qwen3: norms of queries and keys, a window": {
    "qk_norm": True,
    "windows": (3, 3),
    "rms_norm_eps": 0.25,
  },
  "SmolLM3: a layer without positions, windows of two sizes": {
    "num_layers": 3,
    "nope_layers": (1,),
    "windows": (1, 5, None),
  },
  "Gemma 1": {
    "norm_offset": 1.0,
    "embed_scale": 22**0.5,
    "activation": "gelu_tanh",
    "tie_word_embeddings": True,
  },
  "Gemma 2: caps, four norms, every other window": {
    "norm_offset": 1.0,
    "embed_scale": 3.0,
    "activation": "gelu_tanh",
    "output_norms": True,
    "tie_word_embeddings": True,
    "query_scale": 0.6,
    "attn_soft_cap": 2.0,
    "final_soft_cap": 5.0,
    "windows": (4, None),
  },
  "Gemma 3: two rotary bases, one of them scaled": {
    "norm_offset": 1.0,
    "activation": "gelu_tanh",
    "output_norms": True,
    "qk_norm": True,
    "windows": (4, None),
    "rope_theta": 300.0,
    "rope_local_theta": 20.0,
    "rope_scaling": models.LinearRopeScaling(factor=8.0),
  },
  "Phi-3: factors of each frequency": {
    "windows": (6, 6),
    "rope_scaling": models.RopeFactors(
      factors=(1.1, 1.5, 2.5), attention_factor=1.3
    ),
  },
  "GPT-2": {
    "learned_positions": True,
    "norm": "layer",
    "activation": "gelu_tanh",
    "mlp_gate": False,
    "qkv_bias": True,
    "o_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": True,
  },
}


@pytest.mark.parametrize(
  "changes",
  [
    pytest.param(
      changes,
      id=name,
      marks=[] if name[:4] in ("Qwen", "GPT-") else [pytest.mark.slow],
    )
    for name, changes in _CONFIGS.items()
  ],
)
def test_prefix_and_tree_equal_numpy(config, numpy_forward, changes):
  config = dataclasses.replace(config, **changes)
  target, params = _model(config)
  run = _run(target)
  rng = np.random.default_rng(1)
  lengths = (0, 2, 11)
  texts = [rng.integers(0, 37, n).tolist() for n in lengths]
  cache = _cache(config, 3)
  for part in ([text[:7] for text in texts], [text[7:] for text in texts]):
    _, cache = _extend(run, params, cache, part, width=7)  # one program
  assert cache.length.tolist() == list(lengths)

  trees = np.array(
    [
      [-1, 0, 1, 2, 3, 4, 5],
      [-1, 0, 0, 1, 1, 2, 4],
      [-1, 0, 0, 0, 0, 0, 0],
    ],
    np.int32,
  )
  tokens = rng.integers(0, 37, trees.shape).astype(np.int32)
  whole = [_whole(n, t) for n, t in zip(lengths, trees, strict=True)]
  positions = np.stack([w[1][-7:] for w in whole]).astype(np.int32)
  logits, output = run(params, tokens, positions, trees, cache)
  assert logits.dtype == jnp.float32
  for row, text in enumerate(texts):
    want = numpy_forward(
      config,
      params,
      [*text, *tokens[row]],
      whole[row][1],
      whole[row][0],
    )
    # fp32 rounds to 2^-24 = 6e-8; some forty roundings lie between a token
    # and its logits, in sums of some forty terms. Times the logits' size.
    scale = max(1.0, np.abs(want["logits"]).max())
    tolerance = 2e-5 * scale
    for mine, true in (
      (logits[row], want["logits"][-7:]),
      (output.hidden[row], want["hidden"][-7:]),
      *(
        (mine[row], true[-7:])
        for mine, true in zip(output.block_kv, want["block_kv"], strict=True)
      ),
    ):
      np.testing.assert_allclose(mine, true, rtol=0, atol=tolerance)
  # Without a draft's wishes the features are the normed states.
  np.testing.assert_array_equal(output.features, output.hidden)


def test_what_is_not_asked_for_is_not_computed(config):
  """Caps and scales of one family leave nothing in the programs of others."""

  def tanhs(**changes):
    changed = dataclasses.replace(config, **changes)
    target, params = _model(changed)
    nodes = jax.ShapeDtypeStruct((1, 3), jnp.int32)
    text = (
      _run(target)
      .lower(params, nodes, nodes, nodes, _cache(changed, 1))
      .as_text()
    )
    return text.count("stablehlo.tanh")

  assert tanhs() == 0
  assert tanhs(final_soft_cap=5.0) == 1
  # In each layer one for the prefix and one for the tree.
  assert tanhs(attn_soft_cap=5.0) == 2 * config.num_layers


def test_norms_with_an_offset_multiply_in_float32():
  """1 + 2^-8 is no bf16 number: rounded before the product it would be 1."""
  norm = _layers.RMSNorm(64, eps=1e-6, dtype=jnp.bfloat16, offset=1.0)
  assert (norm.weight[...] == 0).all()
  norm.weight[...] = jnp.full((64,), 2.0**-8, jnp.bfloat16)
  x = np.random.default_rng(0).normal(size=(64,)).astype(jnp.bfloat16)
  wide = x.astype(np.float64)
  normed = wide / np.sqrt((wide**2).mean() + 1e-6)
  want = (normed * (1 + 2.0**-8)).astype(jnp.bfloat16)
  assert (want != normed.astype(jnp.bfloat16)).any()
  np.testing.assert_array_equal(norm(jnp.asarray(x)), want)


def test_features_are_what_enters_a_layer(config, numpy_forward):
  config = dataclasses.replace(config, num_layers=3)
  # In the order asked for; a list, as a caller may write it.
  target, params = _model(config, feature_layers=[2, 0])
  tokens = np.array([[5, 0, 36, 7]], np.int32)
  mask, positions = _whole(0, [-1, 0, 1, 2])
  _, output = _run(target)(
    params,
    tokens,
    positions[None].astype(np.int32),
    np.array([[-1, 0, 1, 2]], np.int32),
    _cache(config, 1),
  )
  want = numpy_forward(config, params, tokens[0], positions, mask)
  assert output.features.shape == (1, 4, 44)
  np.testing.assert_allclose(
    output.features[0],
    np.concatenate([want["entering"][2], want["entering"][0]], axis=-1),
    rtol=0,
    atol=2e-5,
  )


@pytest.mark.parametrize("layer", [-1, 2, 5])
def test_features_of_layers_that_do_not_exist(config, layer):
  with pytest.raises(ValueError, match=f"layer {layer} does .* 0 to 1"):
    models.Transformer(config, feature_layers=(0, layer), rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def plain(config):
  target, params = _model(config)
  return _run(target), params


@pytest.mark.parametrize(
  "windows", [(), pytest.param((3, 8), marks=pytest.mark.slow)]
)
def test_chunks_and_single_tokens_equal_the_whole(
  config, plain, numpy_forward, windows
):
  run, params = plain
  if windows:
    config = dataclasses.replace(config, windows=windows)
    run = _run(_model(config)[0])
  text = np.random.default_rng(2).integers(0, 37, 21).tolist()
  mask = np.tri(21, dtype=bool)
  want = numpy_forward(config, params, text, np.arange(21), mask)["logits"]
  pages = []
  for size in (7, 1):
    cache, parts = _cache(config, 1), []
    for begin in range(0, 21, size):
      logits, cache = _extend(run, params, cache, [text[begin : begin + size]])
      parts.append(logits[0])
    np.testing.assert_allclose(np.concatenate(parts), want, rtol=0, atol=1e-5)
    assert cache.length.tolist() == [21]
    pages.append(cache.pages)
  for one, two in zip(*pages, strict=True):
    np.testing.assert_allclose(one, two, rtol=0, atol=1e-5)


def test_ragged_rows_equal_solo_rows(config, plain, numpy_forward):
  # transformers#17514: positions shifted by the padding; NaN from rows that
  # are nothing but padding.
  run, params = plain
  rng = np.random.default_rng(3)
  texts = [rng.integers(0, 37, n).tolist() for n in (2, 10, 0, 7)]
  more = [rng.integers(0, 37, n).tolist() for n in (3, 1, 2, 10)]
  cache = _cache(config, 4)
  together, cache = _extend(run, params, cache, texts)
  after, cache = _extend(run, params, cache, more)
  assert np.isfinite(together).all()
  assert np.isfinite(after).all()
  assert cache.length.tolist() == [5, 11, 2, 17]
  for row in range(4):
    first, second = len(texts[row]), len(more[row])
    size = first + second
    want = numpy_forward(
      config,
      params,
      texts[row] + more[row],
      np.arange(size),
      np.tri(size, dtype=bool),
    )["logits"]
    got = np.concatenate([together[row, :first], after[row, :second]])
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(got.argmax(-1), want.argmax(-1))


@pytest.mark.parametrize(
  ("dtype", "cache_dtype"),
  [
    ("float32", "bfloat16"),
    pytest.param("bfloat16", "bfloat16", marks=pytest.mark.slow),
    pytest.param("bfloat16", "float32", marks=pytest.mark.slow),
    pytest.param("float16", "bfloat16", marks=pytest.mark.slow),
    pytest.param("float16", "float16", marks=pytest.mark.slow),
    pytest.param("float16", "float32", marks=pytest.mark.slow),
  ],
)
def test_parameters_and_cache_of_any_dtype(
  config, numpy_forward, dtype, cache_dtype
):
  # tunix#1321: a bf16 cache and fp32 projections did not meet.
  config = dataclasses.replace(
    config, num_layers=1, qkv_bias=True, qk_norm=True, windows=(7,)
  )
  target, params = _model(config, dtype=jnp.dtype(dtype))
  assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
  run = _run(target)
  text = np.random.default_rng(4).integers(0, 37, 12).tolist()
  cache, parts = _cache(config, 1, dtype=cache_dtype), []
  for begin in (0, 4, 8):
    logits, cache = _extend(run, params, cache, [text[begin : begin + 4]])
    parts.append(logits[0])
  assert all(x.dtype == cache_dtype for x in cache.pages)
  want = numpy_forward(
    config, params, text, np.arange(12), np.tri(12, dtype=bool)
  )["logits"]
  # About twenty roundings in a row, each of half a unit in the last place,
  # add up like a random walk; three times that, of the logits' size.
  unit = {"float32": 2.0**-24, "bfloat16": 2.0**-9, "float16": 2.0**-12}
  coarse = max(unit[dtype], unit[cache_dtype])
  size = np.abs(want).max()
  got = np.concatenate(parts)
  assert got.dtype == np.float32
  error = np.abs(got - want).max()
  assert error < 3 * 20**0.5 * coarse * size


def test_positions_past_256_are_exact_in_bfloat16(config, numpy_forward):
  config = dataclasses.replace(config, num_layers=1)
  target, params = _model(config, dtype=jnp.bfloat16)
  run = _run(target)
  tokens = np.array([[3, 1, 4, 1, 5]], np.int32)
  parents = np.array([[-1, 0, 1, 2, 3]], np.int32)
  cache = _cache(config, 1, dtype=jnp.float32)
  for begin in (0, 255, 1021, 32749):
    positions = np.arange(begin, begin + 5, dtype=np.int32)
    _, output = run(params, tokens, positions[None], parents, cache)
    want = numpy_forward(
      config, params, tokens[0], positions, np.tri(5, dtype=bool)
    )["block_kv"][0]
    # A position rounded to eight bits would turn a key by up to 1, 2 and 64
    # radians; three roundings of bf16 move one of size 4 by 2^-7 * 3.
    np.testing.assert_allclose(
      output.block_kv[0][0].astype(np.float32), want, rtol=0, atol=3 * 2.0**-7
    )


def test_invalid_nodes_change_nothing(config, plain):
  run, params = plain
  cache = _cache(config, 1)
  _, cache = _extend(run, params, cache, [[1, 2, 3, 4, 5, 6, 7]])
  parents = np.array([[-1, 0, 0, 1, 2, 3, 3]], np.int32)
  tokens = np.array([[4, 5, 6, 7, 8, 9, 10]], np.int32)
  positions = np.array([[7, 8, 8, 9, 9, 10, 10]], np.int32)
  want, _ = run(params, tokens, positions, parents, cache)
  tokens[0, [2, 4, 6]] = -1
  got, _ = run(params, tokens, positions, parents, cache)
  assert np.isfinite(got).all()
  np.testing.assert_array_equal(
    np.asarray(got)[0, [0, 1, 3, 5]], np.asarray(want)[0, [0, 1, 3, 5]]
  )


@pytest.mark.parametrize(
  "window", [1, 4, *(pytest.param(w, marks=pytest.mark.slow) for w in (6, 30))]
)
def test_a_tree_equals_its_chains_under_a_window(config, window):
  """Each path of a deep tree, run alone after the prefix, gives the same."""
  config = dataclasses.replace(config, windows=(window, window))
  target, params = _model(config)
  run = _run(target)
  rng = np.random.default_rng(5)
  cache = _cache(config, 1)
  _, cache = _extend(run, params, cache, [rng.integers(0, 37, 9).tolist()])
  # Depth 6; nodes of one depth lie far apart in the block.
  parents = np.array([[-1, 0, 0, 1, 2, 3, 5, 4, 6]], np.int32)
  tokens = rng.integers(0, 37, parents.shape).astype(np.int32)
  chains = []
  for node, parent in enumerate(parents[0]):
    chains.append([*(chains[parent] if parent >= 0 else ()), tokens[0, node]])
  positions = np.array([[8 + len(chain) for chain in chains]], np.int32)
  got, _ = run(params, tokens, positions, parents, cache)
  for node in (6, 7, 8):
    alone, _ = _extend(run, params, cache, [chains[node]], width=9)
    # Sums of some forty terms in another order.
    np.testing.assert_allclose(
      got[0, node], alone[0, len(chains[node]) - 1], rtol=0, atol=1e-5
    )


def test_a_window_shows_exactly_so_many_positions(config):
  """mistral.rs#486: a window off by one. Seen by what moves the last logits."""
  config = dataclasses.replace(config, num_layers=1, windows=(4,))
  target, params = _model(config)
  run = _run(target)
  text = np.random.default_rng(6).integers(0, 37, 12).tolist()

  def last(text, chunk):
    cache = _cache(config, 1)
    for begin in range(0, 12, chunk):
      logits, cache = _extend(run, params, cache, [text[begin : begin + chunk]])
    return logits[0, -1]

  for chunk in (12, 3):  # within a block, and in the prefix
    want, moved = last(text, chunk), []
    for place in range(12):
      other = [*text[:place], (text[place] + 1) % 37, *text[place + 1 :]]
      if not np.array_equal(last(other, chunk), want):
        moved.append(place)
    assert moved == [8, 9, 10, 11]
