"""Published EAGLE drafts: every layout read, what is wrong refused by name."""

import dataclasses
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from ldjax import _base, models
from ldjax.checkpoints import _eagle_file

V, W, E, F, N, K, H, L = 31, 11, 12, 10, 6, 2, 4, 6
TARGET = models.TransformerConfig(
  vocab_size=V,
  hidden_size=E,
  intermediate_size=20,
  num_layers=L,
  num_heads=2,
  num_kv_heads=1,
  head_dim=6,
  max_position_embeddings=64,
)
CONFIG = {
  "architectures": ["LlamaForCausalLM"],
  "model_type": "llama",
  "hidden_act": "silu",
  "hidden_size": E,
  "intermediate_size": F,
  "num_attention_heads": N,
  "num_key_value_heads": K,
  "head_dim": H,
  "num_hidden_layers": 1,
  "rms_norm_eps": 1e-6,
  "vocab_size": V,
}
IDS = np.array([0, 2, 3, 7, 8, 12, 19, 20, 25, 29, 30])
LAYER = {False: "layers.0.", True: "midlayer."}


def maps(ids=IDS):
  held = np.zeros(V, bool)
  held[ids] = True
  return {"d2t": ids - np.arange(len(ids)), "t2d": held}


def tensors(third, *, fc_bias=True, qkv_bias=False, ids=IDS, seed=0):
  """What the reference code saves, by its names."""
  rng = np.random.default_rng(seed)
  layer, wide = LAYER[third], 2 * E if third else E
  shapes = {
    "embed_tokens.weight": (V, E),
    "fc.weight": (E, 3 * E if third else 2 * E),
    layer + "self_attn.q_proj.weight": (N * H, wide),
    layer + "self_attn.k_proj.weight": (K * H, wide),
    layer + "self_attn.v_proj.weight": (K * H, wide),
    layer + "self_attn.o_proj.weight": (E, N * H),
    layer + "mlp.gate_proj.weight": (F, E),
    layer + "mlp.up_proj.weight": (F, E),
    layer + "mlp.down_proj.weight": (E, F),
    layer + "post_attention_layernorm.weight": (E,),
  }
  if third:
    shapes["lm_head.weight"] = (V if ids is None else len(ids), E)
    shapes["norm.weight"] = (E,)
    shapes[layer + "hidden_norm.weight"] = (E,)
    shapes[layer + "input_layernorm.weight"] = (E,)
  elif fc_bias:
    shapes["fc.bias"] = (E,)
  if qkv_bias:
    for name, heads in (("q", N), ("k", K), ("v", K)):
      shapes[f"{layer}self_attn.{name}_proj.bias"] = (heads * H,)
  found = {
    name: (rng.normal(size=shape) / shape[-1] ** 0.5 + (len(shape) == 1))
    for name, shape in shapes.items()
  }
  found = {name: x.astype(np.float32) for name, x in found.items()}
  return found | (maps(ids) if third and ids is not None else {})


def renamed(found, *pairs):
  for old, new in pairs:
    found = {name.replace(old, new): x for name, x in found.items()}
  return found


def says(third, **changes):
  raw = {**CONFIG, **({"draft_vocab_size": W} if third else {})}
  raw.update(changes)
  return {key: value for key, value in raw.items() if value != "absent"}


def write(folder, found, raw):
  folder.mkdir(parents=True, exist_ok=True)
  safetensors.numpy.save_file(found, folder / "model.safetensors")
  (folder / "config.json").write_text(json.dumps(raw))
  return folder


def read(folder, **options):
  return _eagle_file.read_eagle(folder, TARGET, **options)


# The reference computation, from the tensors by their names.


def rms(weight, x, eps=1e-6):
  return x / np.sqrt((x**2).mean() + eps) * weight


def silu(x):
  return x / (1 + np.exp(-x))


def turned(x, position, theta):
  angle = position * theta ** (-2 * np.arange(H // 2) / H)
  cos, sin = np.cos(angle), np.sin(angle)
  a, b = x[:, : H // 2], x[:, H // 2 :]
  return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=1)


def guess(
  found, target, features, tokens, *, theta=10000.0, before_residual=False
):
  """Logits after the last of `tokens`, by the names of the reference code."""
  found = {name: x.astype(np.float64) for name, x in found.items()}
  third = found["fc.weight"].shape[1] == 3 * E
  layer, past = LAYER[third], []
  embed = np.asarray(target["embed_tokens"]["weight"], np.float64)

  def linear(name, x):
    bias = found.get(name.replace("weight", "bias"), 0)
    return found[name] @ x + bias

  for step, token in enumerate(tokens[1:]):
    if step < len(features):
      hidden = features[step]
      hidden = linear("fc.weight", hidden) if third else hidden
    if third:
      normed = rms(found[layer + "hidden_norm.weight"], hidden)
      embedded = rms(found[layer + "input_layernorm.weight"], embed[token])
      x = np.concatenate([embedded, normed])
      residual = normed if before_residual else hidden
    else:
      x = linear("fc.weight", np.concatenate([embed[token], hidden]))
      residual = x
    query, key, value = (
      linear(f"{layer}self_attn.{n}_proj.weight", x).reshape(-1, H)
      for n in "qkv"
    )
    past.append((turned(key, step, theta), value))
    out = []
    for n, q in enumerate(turned(query, step, theta)):
      k = n // (N // K)
      weights = np.exp([q @ key[k] / H**0.5 for key, _ in past])
      out.append(weights @ [value[k] for _, value in past] / weights.sum())
    x = residual + linear(
      layer + "self_attn.o_proj.weight", np.concatenate(out)
    )
    y = rms(found[layer + "post_attention_layernorm.weight"], x)
    gate = silu(linear(layer + "mlp.gate_proj.weight", y))
    up = linear(layer + "mlp.up_proj.weight", y)
    hidden = x + linear(layer + "mlp.down_proj.weight", gate * up)
  if third:
    return found["lm_head.weight"] @ rms(found["norm.weight"], hidden)
  output = found.get("lm_head.weight", target["lm_head"]["weight"])
  return np.asarray(output, np.float64) @ hidden


def check_guesses(config, params, found, **options):
  """The draft's logits along a text and three tokens more are NumPy's."""
  rng = np.random.default_rng(9)
  target = {
    name: {"weight": jnp.asarray(rng.normal(size=(V, E)), jnp.float32)}
    for name in ("embed_tokens", "lm_head")
  }
  tokens = rng.integers(V, size=8)
  features = rng.normal(size=(5, config.feature_size)).astype(np.float32)
  fn, _ = models.functionalize_draft(config, max_len=16)
  params = models.borrow(config, params, target)
  state = fn.observe(
    params,
    fn.init(params, 1),
    _base.Observation(
      rows=jnp.zeros((1,), jnp.int32),
      tokens=jnp.asarray(tokens[None, :5], jnp.int32),
      features=jnp.asarray(features[None]),
      positions=jnp.arange(5, dtype=jnp.int32)[None],
      count=jnp.full((1,), 5, jnp.int32),
    ),
  )
  ahead = jnp.asarray(tokens[None, 5:], jnp.int32)
  carry, logits = fn.begin(params, state, ahead[:, 0])
  for d in range(3):
    want = guess(found, target, features, tokens[: 6 + d].tolist(), **options)
    assert logits.shape == (1, 1, config.vocab_size)
    # Sums of some hundred terms of size 4 at most, 2^-24 each.
    np.testing.assert_allclose(logits[0, 0], want, rtol=0, atol=1e-4)
    if d < 2:
      parent = jnp.full((1, 1), d, jnp.int32)
      carry, logits = fn.extend(
        params, state, carry, ahead[:, d + 1, None], parent
      )


@pytest.fixture(autouse=True)
def silent():
  """A warning that a test does not expect is an error."""
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    yield


@pytest.mark.parametrize("file", ["safetensors", "torch", "shards"])
@pytest.mark.parametrize("third", [False, True], ids=["eagle", "eagle3"])
def test_the_layout_of_the_reference(tmp_path, write_torch, third, file):
  found = tensors(third)
  write(tmp_path, found, says(third))
  if file == "torch":
    (tmp_path / "model.safetensors").unlink()
    write_torch(tmp_path / "pytorch_model.bin", found)
  elif file == "shards":
    (tmp_path / "model.safetensors").unlink()
    where, names = {}, sorted(found)
    for i in range(2):
      part = {name: found[name] for name in names[i::2]}
      safetensors.numpy.save_file(part, tmp_path / f"{i}.safetensors")
      where.update(dict.fromkeys(part, f"{i}.safetensors"))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}))
  assert _eagle_file.holds_eagle(tmp_path)
  config, params = read(tmp_path)
  shape = {
    "depth": 7,
    "hidden_size": E,
    "intermediate_size": F,
    "num_heads": N,
    "num_kv_heads": K,
    "head_dim": H,
    "rms_norm_eps": 1e-6,
  }
  if third:
    assert config == models.Eagle3Config(
      **shape, vocab_size=W, target_vocab_size=V
    )
    np.testing.assert_array_equal(params["token_ids"], IDS)
    assert params["token_ids"].dtype == jnp.int32
  else:
    assert config == models.EagleConfig(
      **shape, vocab_size=V, shared_output=True, normed=False, fc_bias=True
    )
  if file == "safetensors":
    check_guesses(config, params, found)


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("before", [False, True])
def test_eagle3_of_speculators(tmp_path, prefix, before):
  found = tensors(True, seed=1)
  raw = {
    "speculators_model_type": "eagle3",
    "draft_vocab_size": W,
    "norm_before_residual": before,
    "target_hidden_size": None,
    "eagle_aux_hidden_state_layer_ids": [2, 3, 3] if before else None,
    "transformer_layer_config": says(False, rope_theta=50.0),
  }
  other = renamed(found, ("midlayer.", "layers.0."))
  other = {prefix + name: x for name, x in other.items()}
  config, params = read(write(tmp_path, other, raw))
  assert (config.norm_before_residual, config.rope_theta) == (before, 50.0)
  if not prefix:
    check_guesses(config, params, found, theta=50.0, before_residual=before)


def test_eagle_of_speculators(tmp_path):
  found = tensors(False, seed=2)
  raw = {
    "speculators_model_type": "eagle",
    "transformer_layer_architecture": "LlamaDecoderLayer",
    "layernorms": False,
    "fusion_bias": True,
    "transformer_layer_config": says(False),
  }
  pairs = ("fc.", "fusion_fc."), ("layers.0.", "transformer.")
  other = renamed(found, *pairs)
  del other["embed_tokens.weight"]
  config, params = read(write(tmp_path / "a", other, raw))
  check_guesses(config, params, found)
  # With an output matrix of its own, which is then used.
  output = np.random.default_rng(3).normal(size=(V, E)).astype(np.float32)
  other["lm_head.weight"] = output
  config, params = read(write(tmp_path / "b", other, raw))
  assert not config.shared_output
  check_guesses(config, params, {**found, "lm_head.weight": output})


@pytest.mark.parametrize("fc_bias", [False, True])
@pytest.mark.parametrize("qkv_bias", [False, True])
def test_biases_are_where_the_tensors_have_them(tmp_path, fc_bias, qkv_bias):
  # sglang#5773, EAGLE#135.
  found = tensors(False, fc_bias=fc_bias, qkv_bias=qkv_bias, seed=4)
  config, params = read(write(tmp_path, found, says(False)))
  assert (config.fc_bias, config.qkv_bias) == (fc_bias, qkv_bias)
  check_guesses(config, params, found)


def test_the_whole_vocabulary(tmp_path):
  # The published Vicuna draft has a d2t of zeros (EAGLE#222).
  raw = says(True, draft_vocab_size=V)
  for name, ids in (("absent", None), ("zeros", np.arange(V))):
    found = tensors(True, ids=ids, qkv_bias=True, seed=5)
    config, params = read(write(tmp_path / name, found, raw))
    assert (config.vocab_size, config.target_vocab_size) == (V, None)
    assert "token_ids" not in params
  check_guesses(config, params, found)
  # All tokens, in another order.
  found |= maps(np.roll(np.arange(V), 1))
  config, params = read(write(tmp_path / "rolled", found, raw))
  assert config.target_vocab_size == V
  np.testing.assert_array_equal(params["token_ids"], np.roll(np.arange(V), 1))


def test_offsets_by_hand(tmp_path):
  found = tensors(True, ids=np.array([0, 3, 4, 8]))
  assert found["d2t"].tolist() == [0, 2, 2, 5]
  raw = says(True, draft_vocab_size=4)
  _, params = read(write(tmp_path / "long", found, raw))
  assert params["token_ids"].tolist() == [0, 3, 4, 8]
  found["d2t"] = found["d2t"].astype(np.int32)
  del found["t2d"]
  _, params = read(write(tmp_path / "int", found, raw))
  assert params["token_ids"].tolist() == [0, 3, 4, 8]


def test_stretched_frequencies(tmp_path):
  scaling = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
  }
  raw = says(True, rope_scaling=scaling, rope_theta=500000.0)
  config, _ = read(write(tmp_path, tensors(True), raw))
  assert config.rope_theta == 500000.0
  scaling.pop("rope_type")
  assert dataclasses.asdict(config.rope_scaling) == scaling


def test_types_and_places(tmp_path):
  found = tensors(True)
  half = {
    name: x.astype(np.float16) if x.dtype.kind == "f" else x
    for name, x in found.items()
  }
  half["embed_tokens.weight"] = found["embed_tokens.weight"]  # not needed
  write(tmp_path, half, says(True))
  placed = {}

  def place(path, array):
    placed[path] = array
    return jnp.asarray(array)

  config, params = read(tmp_path, place=place)
  assert len(placed) == len(jax.tree.leaves(params))
  assert {x.dtype.name for x in placed.values()} == {"float16", "int32"}
  lines = []
  _, params = read(tmp_path, dtype="bfloat16", progress=lines.append)
  assert params["norm"]["weight"].dtype == jnp.bfloat16
  assert lines[-1].startswith("read ")
  assert jax.tree.structure(params) == jax.tree.structure(
    dict(models.abstract_draft(config))
  )


@pytest.mark.parametrize(
  ("third", "changes", "message"),
  [
    # sglang#33966
    (True, {"num_hidden_layers": 40}, "num_hidden_layers is 40, .* say 1;"),
    (False, {"num_key_value_heads": 6}, "key_value_heads is 6, .* say 2;"),
    (True, {"intermediate_size": 11}, "intermediate_size is 11, .* say 10;"),
    (True, {"hidden_size": 13}, "hidden_size is 13, .* say 12;"),
    (True, {"draft_vocab_size": 12}, "draft_vocab_size is 12, .* say 11;"),
    (False, {"bias": False}, "bias is False, .* say True;"),
    (False, {"attention_bias": True}, "attention_bias is True, .* say False"),
  ],
)
def test_the_tensors_win(tmp_path, third, changes, message):
  found = tensors(third)
  want, _ = read(write(tmp_path / "right", found, says(third)))
  folder = write(tmp_path / "wrong", found, says(third, **changes))
  with pytest.warns(UserWarning, match=message):
    config, _ = read(folder)
  assert config == want


@pytest.mark.parametrize(
  ("third", "changes", "message"),
  [
    (True, {"num_attention_heads": "absent"}, "num_attention_heads is missing"),
    (True, {"num_attention_heads": 5}, "5 .*head_dim of 4 make 20 .* has 24"),
    (False, {"head_dim": 8}, "6 .*head_dim of 8 make 48 rows, .* has 24"),
    (True, {"num_attention_heads": 0}, "0 num_attention_heads"),
    (
      True,
      {"num_attention_heads": 2, "head_dim": "absent"},
      "k_proj.weight has 8 rows, which heads of a head_dim of 12",
    ),
    (False, {"vocab_size": 32}, "vocab_size is 32, the target's is 31"),
    (True, {"target_hidden_size": 24}, "hidden_size is 24, the target's is 12"),
    (True, {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    (
      True,
      {"rope_scaling": {"type": "yarn", "factor": 2}},
      "rope_type 'yarn' is not supported",
    ),
    # sglang#32334
    (True, {"norm_before_fc": True}, "norm_before_fc True is not supported"),
    (True, {"fc_norm": True}, "fc_norm True is not supported"),
    (True, {"quantization_config": {"bits": 4}}, "quantization_config is not"),
    (
      True,
      {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
      r"layer_ids is \[1, 2, 3\]; only \[2, 3, 3\] are supported .* 6 layers",
    ),
    (
      True,
      {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 3]}},
      r"only \[1, 2, 2\] are supported",
    ),
    (True, {"norm_before_residual": 1}, "norm_before_residual is 1"),
    (
      False,
      {"speculators_model_type": "mlp"},
      "speculators_model_type is 'mlp'; 'eagle' and 'eagle3' are",
    ),
    (
      False,
      {"speculators_model_type": "eagle"},
      "transformer_layer_config is None; an object",
    ),
    (
      False,
      {"speculators_model_type": "eagle3", "transformer_layer_config": CONFIG},
      r"is 'eagle3', but 'fc.weight' .* shape \(12, 24\) of EAGLE-1",
    ),
    (
      False,
      {
        "speculators_model_type": "eagle",
        "transformer_layer_config": CONFIG,
        "layernorms": True,
      },
      "layernorms True is not supported",
    ),
    (
      False,
      {
        "speculators_model_type": "eagle",
        "transformer_layer_config": CONFIG,
        "transformer_layer_architecture": "MixtralDecoderLayer",
      },
      "transformer_layer_architecture 'MixtralDecoderLayer' is not",
    ),
  ],
)
def test_a_config_that_is_wrong(tmp_path, third, changes, message):
  folder = write(tmp_path, tensors(third), says(third, **changes))
  with pytest.raises(ValueError, match=message) as caught:
    read(folder)
  assert str(tmp_path) in str(caught.value)


def test_where_layers_are_named_by_their_outputs(tmp_path):
  for ids in ([], [1, 2, 2]):
    inner = {"eagle_aux_hidden_state_layer_ids": ids}
    read(write(tmp_path, tensors(True), says(True, eagle_config=inner)))


def test_a_target_with_few_layers(tmp_path):
  write(tmp_path, tensors(True), says(True))
  small = dataclasses.replace(TARGET, num_layers=4)
  with pytest.raises(ValueError, match="has 4 layers and 5 are needed"):
    _eagle_file.read_eagle(tmp_path, small)


def _drop(name):
  return lambda found: found.pop(name)


def _put(name, array):
  return lambda found: found.update({name: array})


def _poison(name, value):
  def change(found):
    found[name] = found[name].copy()
    found[name].flat[1] = value

  return change


def _ids(at, value):
  def change(found):
    found["d2t"] = found["d2t"].copy()
    found["d2t"][at] = value - at
    found.pop("t2d")

  return change


ONES = np.ones(E, np.float32)


@pytest.mark.parametrize(
  ("third", "change", "message"),
  [
    # sglang#27908: a missing output matrix stayed random.
    (True, _drop("lm_head.weight"), r"no tensor for parameter output\.weight"),
    (True, _drop("norm.weight"), r"no tensor for parameter norm\.weight"),
    (True, _drop("midlayer.hidden_norm.weight"), "parameter hidden_norm"),
    (
      True,
      _drop("d2t"),
      "has 11 rows, the target 31 tokens, .* no tensor 'd2t",
    ),
    (False, _drop("fc.weight"), "no tensor named 'fc.weight' or 'fusion_fc"),
    (
      False,
      _drop("layers.0.self_attn.q_proj.weight"),
      r"no tensor for parameter layer\.self_attn\.q_proj\.weight",
    ),
    (
      False,
      _put("layers.0.self_attn.q_proj.bias", np.ones(N * H, np.float32)),
      r"no tensor for parameter layer\.self_attn\.k_proj\.bias",
    ),
    (True, _put("extra", ONES), "'extra' is not part.* left over"),
    (True, _put("fc.bias", ONES), "'fc.bias' is not part.* left over"),
    (False, _put("norm.weight", ONES), "'norm.weight' is not part"),
    (
      False,
      _put("layers.0.input_layernorm.weight", ONES),
      "'layers.0.input_layernorm.weight' is not part",
    ),
    (False, _put("d2t", np.zeros(W, int)), "'d2t' is not part"),
    (
      False,
      _put("embedding_layernorm.weight", ONES),
      "'embedding_layernorm.weight' is a norm .* extra norms are not supported",
    ),
    (
      False,
      _put("layers.1.mlp.up_proj.weight", ONES),
      "'layers.1.mlp.up_proj.weight' is of a second layer",
    ),
    (True, _put("layers.0.hidden_norm.weight", ONES), "given twice"),
    (
      True,
      _put("norm.weight", ONES[1:]),
      r"shape \(11,\); .* asks for \(12,\)",
    ),
    (
      True,
      _put("fc.weight", np.ones((E, 4 * E), np.float32)),
      r"'fc.weight' has shape \(12, 48\); EAGLE-1 and -2",
    ),
    (
      False,
      _put("layers.0.mlp.gate_proj.weight", ONES),
      "'layers.0.mlp.gate_proj.weight' has shape .* a matrix is needed",
    ),
    (
      False,
      _put("embed_tokens.weight", np.ones((32, E), np.float32)),
      "vocab_size is 32, the target's is 31",
    ),
    (
      True,
      _put("lm_head.weight", np.ones((40, E), np.float32)),
      "guesses 40 tokens, the target has 31; .* another model",
    ),
    (
      True,
      _put("lm_head.weight", np.ones((0, E), np.float32)),
      "guesses 0 tokens, the target has 31",
    ),
    (
      True,
      _put("midlayer.self_attn.q_proj.weight", np.ones((0, 24), np.float32)),
      "head_dim of 4 make 24 rows, but q_proj.weight has 0",
    ),
    (
      True,
      _put("model.d2t", np.zeros(W, int)),
      "a map of tokens is given twice",
    ),
    (True, _ids(4, 31), "'d2t' gives entry 4 the id 31; .* 0 to 30"),
    (True, _ids(0, -1), "'d2t' gives entry 0 the id -1"),
    (True, _ids(4, 12), "'d2t' gives the id 12 to more than one"),
    (True, _poison("t2d", True), "disagree about 1 tokens, .* them 1"),
    (True, _put("t2d", np.ones(30, bool)), "vocab_size is 30, the target's"),
    (True, _put("t2d", np.ones(V, int)), "'t2d' is int64 .* truth values"),
    (
      True,
      _put("d2t", np.zeros(W, bool)),
      "'d2t' is bool .* integers of shape",
    ),
    (True, _put("d2t", np.zeros(W, np.float32)), "'d2t' is of type F32"),
    (
      True,
      _put("d2t", np.zeros(9, int)),
      r"of shape \(9,\); integers of shape",
    ),
    (True, _put("norm.weight", np.ones(E)), "'norm.weight' is of type F64"),
  ],
)
@pytest.mark.filterwarnings("ignore:.*draft_vocab_size is 11")
def test_tensors_that_are_wrong(tmp_path, third, change, message):
  found = tensors(third)
  change(found)
  folder = write(tmp_path, found, says(third, draft_vocab_size="absent"))
  with pytest.raises(ValueError, match=message):
    read(folder)


@pytest.mark.parametrize("whose", ["reference", "speculators"])
@pytest.mark.parametrize("third", [False, True])
def test_to_our_format(tmp_path, check_our_format, third, whose):
  found, raw = tensors(third), says(third)
  if whose == "speculators":
    raw = {
      "speculators_model_type": "eagle3" if third else "eagle",
      "transformer_layer_config": raw,
    }
    names = [("midlayer.", "layers.0.")] if third else [("fc.", "fusion_fc.")]
    found = renamed(found, *names)
  folder = write(tmp_path / "eagle", found, raw)
  check_our_format(folder, TARGET, *read(folder))


@pytest.mark.parametrize("third", [False, True])
def test_values_that_are_not_finite(tmp_path, third):
  found = tensors(third)
  _poison("fc.weight", -np.inf)(found)
  folder = write(tmp_path, found, says(third))
  with pytest.warns(UserWarning, match=r"'fc.weight' holds 1 values that are"):
    read(folder)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("size", [0, 1, 57, -2])
def test_files_that_are_cut_off(tmp_path, write_torch, file, size):
  found = tensors(False)
  write(tmp_path, found, says(False))
  (tmp_path / "model.safetensors").rename(tmp_path / "whole")
  if file == "pytorch_model.bin":
    write_torch(tmp_path / "whole", found)
  whole = (tmp_path / "whole").read_bytes()
  (tmp_path / file).write_bytes(whole[:size])
  with pytest.raises(ValueError, match=file):
    read(tmp_path)
  (tmp_path / "config.json").write_text("{")
  (tmp_path / file).write_bytes(whole)
  with pytest.raises(ValueError, match=r"config\.json: not readable as JSON"):
    read(tmp_path)


def test_files_that_are_missing(tmp_path):
  with pytest.raises(FileNotFoundError, match="no such folder"):
    read(tmp_path / "absent")
  with pytest.raises(
    FileNotFoundError, match=r"config\.json: missing; it says"
  ):
    read(tmp_path)
  assert not _eagle_file.holds_eagle(tmp_path)
  write(tmp_path, tensors(False), says(False))
  (tmp_path / "config.json").unlink()
  with pytest.raises(
    FileNotFoundError, match=r"config\.json: missing; it says"
  ):
    read(tmp_path)
  write(tmp_path, tensors(False), says(False))
  index = tmp_path / "model.safetensors.index.json"
  index.write_text('{"weight_map": {"fc.weight": "gone.safetensors"}}')
  with pytest.raises(FileNotFoundError, match=r"gone\.safetensors: this shard"):
    read(tmp_path)


def test_drafts_of_another_model(tmp_path):
  write(tmp_path, tensors(False), says(False))
  for field in ("hidden_size", "vocab_size"):
    other = dataclasses.replace(TARGET, **{field: 48})
    with pytest.raises(
      ValueError, match=rf"{field} is \d+, the target's is 48"
    ):
      _eagle_file.read_eagle(tmp_path, other)


def test_a_target_is_no_draft(tmp_path, make_tiny):
  make_tiny().folder(tmp_path / "one")
  make_tiny().folder(tmp_path / "two", shards=2)
  assert not _eagle_file.holds_eagle(tmp_path / "one")
  assert not _eagle_file.holds_eagle(tmp_path / "two")


@pytest.mark.parametrize(
  "name",
  ["eagle_llama2_7b", "eagle_vicuna_7b", "eagle3_llama3_8b", "eagle3_qwen3_8b"],
)
def test_published_configs(tmp_path, shared_data, name):
  file = shared_data / "configs" / name / "config.json"
  if not file.is_file():
    pytest.skip(f"no {file}")
  raw = json.loads(file.read_text())
  third = name.startswith("eagle3")
  small = {key: CONFIG[key] for key in CONFIG if key in raw}
  for key in ("architectures", "model_type", "rms_norm_eps"):
    small.pop(key, None)
  if third:
    small["draft_vocab_size"] = W
  folder = write(tmp_path, tensors(third), {**raw, **small})
  config, _ = read(folder)
  assert config.kind == ("eagle3" if third else "eagle")
  assert config.rms_norm_eps == raw["rms_norm_eps"]
  assert config.rope_theta == raw.get("rope_theta", 10000.0)
  assert (config.num_heads, config.num_kv_heads, config.head_dim) == (N, K, H)
