"""Every family of draft heads: against NumPy, and the contract of heads."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldjax import _base, decoding, models, sampling, testing

B, S, E, W, V, D = 2, 7, 10, 11, 31, 3
_TRIMMED = {"vocab_size": W, "target_vocab_size": V}
_RECURRENT = models.RecurrentConfig(
  depth=D,
  num_layers=2,
  target_size=E,
  hidden_size=7,
  intermediate_size=5,
  **_TRIMMED,
)
_HYDRA = models.HydraConfig(
  num_heads=D, num_layers=1, target_size=E, hidden_size=7, **_TRIMMED
)
_EAGLE = models.EagleConfig(
  depth=D,
  hidden_size=E,
  intermediate_size=13,
  num_heads=6,
  num_kv_heads=2,
  head_dim=4,
  **_TRIMMED,
)
_EAGLE3 = models.Eagle3Config(
  depth=D,
  hidden_size=E,
  intermediate_size=13,
  num_heads=6,
  num_kv_heads=2,
  head_dim=4,
  **_TRIMMED,
)
_HYDRA_MLP = models.HydraMlpConfig(
  num_heads=D, num_layers=2, hidden_size=E, vocab_size=V
)
_MEDUSA = models.MedusaConfig(
  num_heads=D, num_layers=2, hidden_size=E, **_TRIMMED
)
_CONFIGS = {
  "medusa": _MEDUSA,
  "medusa-shared": dataclasses.replace(_MEDUSA, shared_output=True),
  "medusa-single": dataclasses.replace(_MEDUSA, single_output=True),
  "hydra": dataclasses.replace(_HYDRA, vocab_size=V, target_vocab_size=None),
  "hydra-shared": dataclasses.replace(_HYDRA, shared_output=True),
  "recurrent": _RECURRENT,
  "recurrent-low-rank": dataclasses.replace(_RECURRENT, output_rank=3),
  "recurrent-shared": dataclasses.replace(
    _RECURRENT, hidden_size=E, shared_output=True
  ),
  "eagle": dataclasses.replace(_EAGLE, output_rank=5),
  "eagle-shared": dataclasses.replace(
    _EAGLE, vocab_size=V, target_vocab_size=None, shared_output=True
  ),
  "eagle-published": dataclasses.replace(
    _EAGLE,
    vocab_size=V,
    target_vocab_size=None,
    shared_output=True,
    normed=False,
    fc_bias=True,
    rope_scaling=models.RopeScaling(
      factor=8.0,
      low_freq_factor=1.0,
      high_freq_factor=4.0,
      original_max_position_embeddings=32,
    ),
  ),
  "eagle-published-biased": dataclasses.replace(
    _EAGLE, shared_output=True, normed=False, qkv_bias=True, rope_theta=77.0
  ),
  "eagle3": _EAGLE3,
  "eagle3-whole": dataclasses.replace(
    _EAGLE3, vocab_size=V, target_vocab_size=None, qkv_bias=True
  ),
  "eagle3-normed": dataclasses.replace(_EAGLE3, norm_before_residual=True),
  "hydra-mlp": _HYDRA_MLP,
  "hydra-mlp-small": dataclasses.replace(
    _HYDRA_MLP, num_layers=1, output_bias=False
  ),
}
_KINDS = [
  "medusa-shared",
  "hydra",
  "hydra-mlp",
  "recurrent-low-rank",
  "eagle",
  "eagle-published",
  "eagle3",
]


def _random(shapes, seed, dtype=np.float32):
  rng = np.random.default_rng(seed)

  def leaf(like):
    if like.dtype == jnp.int32:
      return jnp.asarray(rng.permutation(V)[: like.shape[0]], jnp.int32)
    value = rng.normal(size=like.shape) / like.shape[-1] ** 0.5
    value = value + (1 if len(like.shape) == 1 else 0)  # norms and biases
    return jnp.asarray(value.astype(np.float32)).astype(dtype)

  return jax.tree.map(leaf, shapes)


def _draft(name, seed=3):
  fn, shapes = models.functionalize_draft(_CONFIGS[name], max_len=16)
  return fn, _random(shapes, seed)


def _text(name, seed=4, batch=B, size=S):
  rng = np.random.default_rng(seed)
  tokens = jnp.asarray(rng.integers(V, size=(batch, size)), jnp.int32)
  shape = (batch, size, _CONFIGS[name].feature_size)
  return tokens, jnp.asarray(rng.normal(size=shape), jnp.float32)


def _seen(tokens, features, begin, end, count=None, rows=None, width=None):
  """An observation of positions begin to end; what pads it is garbage."""
  batch = tokens.shape[0]
  width = end - begin if width is None else width
  place = jnp.minimum(jnp.arange(width) + begin, tokens.shape[1] - 1)
  place = place.astype(jnp.int32)
  return _base.Observation(
    rows=jnp.arange(batch, dtype=jnp.int32) if rows is None else rows,
    tokens=tokens[:, place],
    features=features[:, place],
    positions=jnp.broadcast_to(place[None], (batch, width)),
    count=jnp.full((batch,), end - begin, jnp.int32)
    if count is None
    else jnp.asarray(count, jnp.int32),
  )


def _observed(fn, params, tokens, features, end):
  """The state after positions before `end`, in two uneven chunks."""
  state = fn.init(params, tokens.shape[0])
  for begin, stop in ((0, min(3, end)), (3, end)):
    if begin < stop:
      seen = _seen(tokens, features, begin, stop, width=5)
      state = fn.observe(params, state, seen)
  return state


# The same families once more, in NumPy and float64: the logits of one guess.


def _wide(tree):
  if isinstance(tree, dict):
    return {key: _wide(value) for key, value in tree.items()}
  array = np.asarray(tree)
  return array if array.dtype == np.int32 else array.astype(np.float64)


def _norm(params, x):
  return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * params["weight"]


def _silu(x):
  return x / (1 + np.exp(-x))


def _linear(params, x):
  return x @ params["weight"].T + params.get("bias", 0.0)


def _mlp(params, x):
  gate, up = _linear(params["gate_proj"], x), _linear(params["up_proj"], x)
  return _linear(params["down_proj"], _silu(gate) * up)


def _output(params, x):
  for layer in ("project", "down"):
    x = _linear(params[layer], x) if layer in params else x
  return _linear(params.get("up", params), x)


def _medusa(config, params, features, tokens, d):
  head, x = params["heads"][d], features[-1]
  for block in sorted(head["blocks"]):
    x = x + _silu(_linear(head["blocks"][block], x))
  return _linear(head.get("lm_head", params.get("output")), x)


def _hydra(config, params, features, tokens, d):
  parts = [_norm(params["feature_norm"], features[-1])]
  for token in tokens[len(features) :]:
    parts.append(_norm(params["embed_norm"], params["embed"]["weight"][token]))
  head = params["heads"][d]
  x = _linear(head["input_proj"], np.concatenate(parts))
  for block in sorted(head["blocks"]):
    x = x + _silu(_linear(head["blocks"][block], x))
  return _output(params["output"], _norm(params["norm"], x))


def _hydra_mlp(config, params, features, tokens, d):
  seen = [params["embed"]["weight"][t] for t in tokens[len(features) :]]
  x = np.concatenate([features[-1], *seen])
  head = params["heads"][d]
  first = head["blocks"][0]
  x = _linear(first["res_connection"], x) + _silu(_linear(first["linear"], x))
  for block in range(1, config.num_layers):
    x = x + _silu(_linear(head["blocks"][block], x))
  return _linear(head["lm_head"], x)


def _recurrent(config, params, features, tokens, d):
  x = _linear(
    params["feature_proj"], _norm(params["feature_norm"], features[-1])
  )
  for token in tokens[len(features) :]:
    read = _norm(params["embed_norm"], params["embed"]["weight"][token])
    x = _norm(params["state_norm"], x) + _linear(params["embed_proj"], read)
    for block in sorted(params["blocks"]):
      inner = params["blocks"][block]
      x = x + _mlp(inner, _norm(inner["norm"], x))
  return _output(params["output"], _norm(params["norm"], x))


def _turned(x, position, config):
  half = config.head_dim // 2
  frequency = config.rope_theta ** (-np.arange(half) / half)
  scaling = config.rope_scaling
  if scaling is not None:
    waves = scaling.original_max_position_embeddings * frequency / (2 * np.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = np.clip((waves - low) / (high - low), 0, 1)
    frequency = frequency * (keep + (1 - keep) / scaling.factor)
    assert keep.max() > 0 and keep.min() < 1
  angle = position * frequency
  turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angle)
  return np.concatenate([turned.real, turned.imag], axis=-1)


def _attended(config, attention, x, past, position):
  """What one entry finds; `past` gets its key and value."""
  width = config.head_dim
  query, key, value = (
    _linear(attention[name], x).reshape(-1, width)
    for name in ("q_proj", "k_proj", "v_proj")
  )
  past.append((_turned(key, position, config), value))
  heads = []
  for n, q in enumerate(_turned(query, position, config)):
    k = n * config.num_kv_heads // config.num_heads
    scores = np.array([q @ key[k] for key, _ in past]) / np.sqrt(width)
    weights = np.exp(scores - scores.max())
    values = np.array([value[k] for _, value in past])
    heads.append(weights @ values / weights.sum())
  return _linear(attention["o_proj"], np.concatenate(heads))


def _eagle(config, params, features, tokens, d):
  """Entry by entry, each over all before it."""
  layer, past = params["layer"], []

  def norm(owner, name, x):
    return _norm(owner[name], x) if config.normed else x

  # Numbered by position: only distances count, so the published ones, which
  # number their first entry 0, are the same.
  feature = np.zeros(E)
  for p, token in enumerate(tokens):
    if 0 < p <= len(features):
      feature = features[p - 1]
    if p == 0 and not config.normed:
      continue
    embedded = norm(params, "embed_norm", params["embed"]["weight"][token])
    pair = embedded, norm(params, "feature_norm", feature)
    x = _linear(params["fc"], np.concatenate(pair))
    y = norm(layer, "input_layernorm", x)
    x = x + _attended(config, layer["self_attn"], y, past, p)
    x = x + _mlp(layer["mlp"], _norm(layer["post_attention_layernorm"], x))
    feature = norm(params, "norm", x)
  return _output(params["output"], feature)


def _eagle3(config, params, features, tokens, d):
  """Entry by entry, the first of the second token."""
  layer, past, x = params["layer"], [], None
  for p in range(1, len(tokens)):
    if p <= len(features):
      x = _linear(params["fc"], features[p - 1])
    embedded = params["embed"]["weight"][tokens[p]]
    normed = _norm(params["hidden_norm"], x)
    y = np.concatenate([_norm(layer["input_layernorm"], embedded), normed])
    x = normed if config.norm_before_residual else x
    x = x + _attended(config, layer["self_attn"], y, past, p)
    x = x + _mlp(layer["mlp"], _norm(layer["post_attention_layernorm"], x))
  return _output(params["output"], _norm(params["norm"], x))


_NUMPY = {
  "medusa": _medusa,
  "hydra": _hydra,
  "hydra-mlp": _hydra_mlp,
  "recurrent": _recurrent,
  "eagle": _eagle,
  "eagle3": _eagle3,
}


@pytest.mark.parametrize("name", _CONFIGS)
def test_unrolled_guesses_equal_numpy(name):
  fn, params = _draft(name)
  tokens, features = _text(name)
  states = jax.jit(fn.unroll)(params, features, tokens)
  assert states.shape[:3] == (B, S, D)
  got = jax.jit(fn.score)(params, states)
  config, wide = _CONFIGS[name], _wide(params)
  assert (got.shape, got.dtype) == ((B, S, D, config.vocab_size), jnp.float32)
  for b in range(B):
    for t in range(S - 1):
      for d in range(min(D, S - 1 - t)):
        want = _NUMPY[config.kind](
          config,
          wide,
          np.asarray(features[b, : t + 1], np.float64),
          tokens[b, : t + 2 + d].tolist(),
          d,
        )
        # Below ten sums of some ten terms of size 4 at most, 2^-24 each.
        np.testing.assert_allclose(got[b, t, d], want, rtol=0, atol=3e-5)


_VARIANTS = (
  "eagle-published-biased",
  "eagle3-whole",
  "eagle3-normed",
  "hydra-mlp-small",
)


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=pytest.mark.slow) if name in _VARIANTS else name
    for name in _CONFIGS
  ],
)
def test_unroll_equals_begin_and_extend(name):
  fn, params = _draft(name)
  tokens, features = _text(name)

  @jax.jit
  def drafted(params, state, ahead):
    carry, logits = fn.begin(params, state, ahead[:, 0])
    found = [logits[:, 0]]
    for d in range(1, D):
      parent = jnp.full((B, 1), d - 1, jnp.int32)
      carry, logits = fn.extend(params, state, carry, ahead[:, d, None], parent)
      found.append(logits[:, 0])
    return jnp.stack(found, axis=1)

  states = fn.unroll(params, features, tokens)
  # Depth by depth, as the loss of training reads them.
  want = [fn.score(params, states[:, :, d]) for d in range(D)]
  ahead = jnp.pad(tokens, ((0, 0), (0, D)))
  for t in range(S - 1):
    state = _observed(fn, params, tokens, features, t + 1)
    got = drafted(params, state, ahead[:, t + 1 : t + 1 + D])
    for d in range(min(D, S - 1 - t)):
      np.testing.assert_allclose(got[:, d], want[d][:, t], rtol=0, atol=3e-5)


@pytest.mark.parametrize("name", _KINDS)
def test_nodes_of_a_tree_see_their_paths_alone(name):
  fn, params = _draft(name)
  tokens, features = _text(name)
  state = _observed(fn, params, tokens, features, 4)
  pending = tokens[:, 4]

  def run(levels):
    carry, logits = fn.begin(params, state, pending)
    found = [logits]
    for drafted, parents in levels:
      n = len(drafted)
      drafted = jnp.broadcast_to(jnp.array(drafted, jnp.int32)[None], (B, n))
      parents = jnp.broadcast_to(jnp.array(parents, jnp.int32)[None], (B, n))
      carry, logits = fn.extend(params, state, carry, drafted, parents)
      assert logits.shape in ((B, n, fn.vocab_size), (B, 1, fn.vocab_size))
      found.append(jnp.broadcast_to(logits, (B, n, fn.vocab_size)))
    return found

  # Nodes 1 to 3 below the root; 4 and 6 below node 3, 5 below node 1.
  tree = run([([5, -1, 9], [0, 0, 0]), ([2, 8, 30], [3, 1, 3])])
  for last, parent, at in ((2, 9, 0), (8, 5, 1), (30, 9, 2)):
    chain = run([([parent], [0]), ([last], [1])])
    node = [5, -1, 9].index(parent)
    np.testing.assert_allclose(
      tree[1][:, node], chain[1][:, 0], rtol=0, atol=1e-5
    )
    np.testing.assert_allclose(
      tree[2][:, at], chain[2][:, 0], rtol=0, atol=1e-5
    )
  if not name.startswith("medusa"):
    assert not np.allclose(tree[2][:, 0], tree[2][:, 1], atol=1e-3)
  assert np.isfinite(tree[1]).all()


@pytest.mark.parametrize("name", _KINDS)
def test_rows_come_and_go(name):
  fn, params = _draft(name)
  tokens, features = _text(name)
  other_tokens, other_features = _text(name, seed=5)
  begin = jax.jit(lambda state, pending: fn.begin(params, state, pending)[1])
  observe = jax.jit(lambda state, seen: fn.observe(params, state, seen))
  want = begin(_observed(fn, params, tokens, features, 5), tokens[:, 5])

  state = fn.init(params, 3)
  rows = jnp.array([2, 0], jnp.int32)
  # Something else first, which beginning again forgets.
  seen = _seen(other_tokens, other_features, 0, 5, rows=rows)
  state = observe(state, seen)
  seen = _seen(tokens, features, 0, 3, rows=rows, width=5)
  state = observe(state, seen)
  kept = jax.tree.map(np.asarray, state)
  # Nothing committed: nothing changes, whatever the positions say.
  nothing = dataclasses.replace(
    _seen(other_tokens, other_features, 0, 5, count=[0, 0]), rows=rows
  )
  state = observe(state, nothing)
  jax.tree.map(np.testing.assert_array_equal, state, kept)
  state = observe(state, _seen(tokens, features, 3, 5, rows=rows, width=5))
  pending = jnp.stack([tokens[1, 5], jnp.int32(0), tokens[0, 5]])
  got = begin(state, pending)[rows]
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)

  state = fn.release(state, jnp.array([True, False, False]))
  fresh = begin(fn.init(params, 3), pending)
  got = begin(state, pending)
  np.testing.assert_array_equal(got[0], fresh[0])
  np.testing.assert_allclose(got[2], want[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", _KINDS)
def test_bfloat16_scores_in_float32(name):
  fn, shapes = models.functionalize_draft(
    _CONFIGS[name], jnp.bfloat16, max_len=16
  )
  params = _random(shapes, 3, jnp.bfloat16)
  tokens, features = _text(name)
  # Features come in the target's type, which may be another.
  state = _observed(fn, params, tokens, features, 4)
  assert {leaf.dtype.name for leaf in jax.tree.leaves(state)} <= {
    "bfloat16",
    "int32",
  }
  _, logits = fn.begin(params, state, tokens[:, 4])
  assert logits.dtype == jnp.float32
  states = fn.unroll(params, features, tokens)
  assert states.dtype == jnp.bfloat16
  got = fn.score(params, states)
  assert got.dtype == jnp.float32
  wide, _ = models.functionalize_draft(_CONFIGS[name], max_len=16)
  same = jax.tree.map(
    lambda x: x if x.dtype == jnp.int32 else x.astype(jnp.float32), params
  )
  want = wide.score(same, wide.unroll(same, features, tokens))
  # Some twenty roundings of 2^-9 of numbers of size 4, a few at once.
  np.testing.assert_allclose(got, want, rtol=0, atol=0.25)


@pytest.mark.parametrize("name", _KINDS)
def test_guesses_end_at_the_depth(name):
  fn, params = _draft(name)
  state = fn.init(params, 1)
  node = jnp.zeros((1, 1), jnp.int32)
  carry, _ = fn.begin(params, state, node[0])
  for _ in range(1, D):
    carry, _ = fn.extend(params, state, carry, node, node)
  with pytest.raises(ValueError, match=f"{D + 1} tokens ahead.* guesses {D}"):
    fn.extend(params, state, carry, node, node)


@pytest.mark.parametrize("name", _KINDS)
def test_one_function_a_configuration(name):
  config = _CONFIGS[name]
  fn, params = models.functionalize_draft(config, max_len=16)
  again, _ = models.functionalize_draft(
    dataclasses.replace(config), jnp.float32, max_len=16
  )
  assert again is fn
  own = fn.token_ids(params)
  assert (own is None) == (config.target_vocab_size is None)
  longer, _ = models.functionalize_draft(config, max_len=17)
  assert (longer is fn) == (not config.kind.startswith("eagle"))


@pytest.mark.parametrize("value", [None, 0])
def test_a_cache_needs_a_length(value):
  with pytest.raises(ValueError, match=f"max_len is {value}; .*at least 1"):
    models.functionalize_draft(_EAGLE, max_len=value)
  with pytest.raises(ValueError, match="an Eagle3Draft has a cache"):
    models.functionalize_draft(_EAGLE3, max_len=value)


def test_the_layers_that_eagle3_reads():
  assert _EAGLE3.feature_layers(32) == (2, 16, 29)
  assert models.feature_layers(_EAGLE3, 5) == (2, 2, 2)
  assert models.feature_layers(_EAGLE3, 36) == (2, 18, 33)
  for config in (_EAGLE, _HYDRA, _HYDRA_MLP, _MEDUSA, _RECURRENT):
    assert models.feature_layers(config, 2) == ()
  with pytest.raises(ValueError, match="has 4 layers and 5 are needed"):
    models.feature_layers(_EAGLE3, 4)


@pytest.mark.slow
def test_an_eagle_cache_that_is_full_keeps_on():
  fn, params = _draft("eagle")
  tokens, features = _text("eagle", size=24)
  state = fn.init(params, B)
  for begin in range(0, 24, 6):
    seen = _seen(tokens, features, begin, begin + 6)
    state = fn.observe(params, state, seen)
  # The third chunk did not fit into 16 positions, nor did the fourth.
  assert state.cache.length.tolist() == [12, 12]
  np.testing.assert_array_equal(state.feature, features[:, -1])
  _, logits = fn.begin(params, state, tokens[:, 0])
  assert np.isfinite(logits).all()
  # Beginning again finds all of it free.
  state = fn.observe(params, state, _seen(tokens, features, 0, 16))
  assert state.cache.length.tolist() == [16, 16]
  assert int(state.cache.pool.num_free) == 0


@pytest.mark.slow
def test_published_entries_begin_with_the_second_token():
  fn, params = _draft("eagle-published")
  tokens, features = _text("eagle-published", size=24)
  state = fn.init(params, B)
  state = fn.observe(params, state, _seen(tokens, features, 0, 17))
  # One more position than the cache holds entries.
  assert state.cache.length.tolist() == [16, 16]
  state = fn.observe(params, state, _seen(tokens, features, 0, 1))
  assert state.cache.length.tolist() == [0, 0]
  np.testing.assert_array_equal(state.feature, features[:, 0])


@pytest.mark.parametrize("name", ["medusa", "eagle", "eagle3"])
def test_short_texts_unroll(name):
  fn, params = _draft(name)
  tokens, features = _text(name, size=1)
  assert fn.unroll(params, features, tokens).shape[:3] == (B, 1, D)


@pytest.mark.slow
@pytest.mark.parametrize("name", _CONFIGS)
def test_gradients_reach_every_parameter(name):
  config = _CONFIGS[name]
  fn, params = _draft(name)
  tokens, features = _text(name)
  trained, frozen = models.partition_draft(config, params)

  def loss(trained):
    params = models.combine_draft(trained, frozen)
    states = fn.unroll(params, features, tokens)[:, : S - 1 - D]
    return jnp.mean(jax.nn.logsumexp(fn.score(params, states), -1) ** 2)

  grads = jax.jit(jax.grad(loss))(trained)
  for path, grad in jax.tree_util.tree_leaves_with_path(grads):
    assert np.isfinite(grad).all(), path
    assert np.abs(grad).max() > 0, path


@pytest.mark.slow
@pytest.mark.parametrize("name", _KINDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_law_1(name, temperature):
  tiny = testing.tiny_model(
    vocab_size=V, feature_layers=(1, 0, 1) if name == "eagle3" else ()
  )
  width = tiny.config.hidden_size
  config = _CONFIGS[name]
  field = "target_size" if hasattr(config, "target_size") else "hidden_size"
  config = dataclasses.replace(config, **{field: width})
  fn, shapes = models.functionalize_draft(config, max_len=tiny.max_len)
  draft = decoding.static_tree(fn, decoding.TokenTree.product([2, 2]))
  params = models.borrow(config, _random(shapes, 7), tiny.params)
  mean_accepted = testing.assert_lossless(
    tiny.target,
    tiny.params,
    draft,
    params,
    tiny.init_cache,
    [[1, 2, 3, 4, 5], [6, 7]],
    max_len=tiny.max_len,
    sampling=sampling.make_sampling(2, temperature=temperature, seed=1),
    max_new_tokens=20,
  )
  assert mean_accepted >= 1
