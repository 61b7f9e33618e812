"""Gemma, Phi-3 and GPT-2: files as published, logits as NumPy has them.

The oracle takes weights by their names in the file and the file's config.json,
so that it shares nothing with the readers or the model.
"""

import dataclasses
import json
import math

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from ldjax import assemble, checkpoints, models
from ldjax.checkpoints import _hugging_face_out

_SIZES = {
  "vocab_size": 37,
  "hidden_size": 24,
  "intermediate_size": 20,
  "num_hidden_layers": 4,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 64,
  "rms_norm_eps": 1e-5,
  "rope_theta": 100.0,
}
_CONFIGS = {
  "gemma": {
    **_SIZES,
    "model_type": "gemma",
    "head_dim": 10,  # not E / N
    "hidden_act": "gelu",
    "hidden_activation": None,
  },
  # Caps low enough to bend scores and logits, a window shorter than the text.
  "gemma2": {
    **_SIZES,
    "model_type": "gemma2",
    "head_dim": 10,
    "query_pre_attn_scalar": 7,
    "attn_logit_softcapping": 1.5,
    "final_logit_softcapping": 3.0,
    "sliding_window": 5,
  },
  "gemma3_text": {
    **_SIZES,
    "model_type": "gemma3_text",
    "head_dim": 10,
    "query_pre_attn_scalar": 7,
    "sliding_window": 5,
    "sliding_window_pattern": 3,
    "rope_theta": 5000.0,
    "rope_local_base_freq": 50.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
  },
  "phi3": {
    **_SIZES,
    "model_type": "phi3",
    "sliding_window": 6,
    "original_max_position_embeddings": 40,
    "max_position_embeddings": 160,
    "rope_scaling": {
      "type": "longrope",
      "short_factor": [1.1, 1.5, 2.5],
      "long_factor": [9.0, 9.0, 9.0],
    },
    "tie_word_embeddings": False,
  },
  "gpt2": {
    "model_type": "gpt2",
    "vocab_size": 37,
    "n_embd": 24,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "n_inner": None,
    "layer_norm_epsilon": 1e-5,
  },
}


def _shapes(config):
  """Names and shapes of what a file of this configuration holds."""
  kind = config["model_type"]
  if kind == "gpt2":
    width, wide = config["n_embd"], 4 * config["n_embd"]
    shapes = {
      "transformer.wte.weight": (config["vocab_size"], width),
      "transformer.wpe.weight": (config["n_positions"], width),
    }
    norms = ["transformer.ln_f"]
    for i in range(config["n_layer"]):
      layer = f"transformer.h.{i}."
      norms += [layer + "ln_1", layer + "ln_2"]
      for name, size in {
        "attn.c_attn": (width, 3 * width),
        "attn.c_proj": (width, width),
        "mlp.c_fc": (width, wide),
        "mlp.c_proj": (wide, width),
      }.items():
        shapes[f"{layer}{name}.weight"] = size
        shapes[f"{layer}{name}.bias"] = size[1:]
    for norm in norms:
      shapes |= {f"{norm}.weight": (width,), f"{norm}.bias": (width,)}
    return shapes
  width, wide = config["hidden_size"], config["intermediate_size"]
  size = config.get("head_dim", width // config["num_attention_heads"])
  queries = config["num_attention_heads"] * size
  keys = config["num_key_value_heads"] * size
  shapes = {
    "model.embed_tokens.weight": (config["vocab_size"], width),
    "model.norm.weight": (width,),
  }
  if not config.get("tie_word_embeddings", True):
    shapes["lm_head.weight"] = (config["vocab_size"], width)
  for i in range(config["num_hidden_layers"]):
    layer = f"model.layers.{i}."
    parts = {
      "input_layernorm": (width,),
      "post_attention_layernorm": (width,),
      "self_attn.o_proj": (width, queries),
      "mlp.down_proj": (width, wide),
    }
    if kind == "phi3":
      parts["self_attn.qkv_proj"] = (queries + 2 * keys, width)
      parts["mlp.gate_up_proj"] = (2 * wide, width)
    else:
      parts["self_attn.q_proj"] = (queries, width)
      parts["self_attn.k_proj"] = parts["self_attn.v_proj"] = (keys, width)
      parts["mlp.gate_proj"] = parts["mlp.up_proj"] = (wide, width)
    if kind in ("gemma2", "gemma3_text"):
      parts["pre_feedforward_layernorm"] = (width,)
      parts["post_feedforward_layernorm"] = (width,)
    if kind == "gemma3_text":
      parts["self_attn.q_norm"] = parts["self_attn.k_norm"] = (size,)
    shapes |= {f"{layer}{name}.weight": shape for name, shape in parts.items()}
  return shapes


def _weights(config, dtype=np.float32):
  rng = np.random.default_rng(0)
  gemma = config["model_type"].startswith("gemma")
  weights = {}
  for name, shape in _shapes(config).items():
    if len(shape) == 2:
      # Times three: scores and logits that a cap bends.
      value = 3 * rng.normal(size=shape) / shape[1] ** 0.5
      if "wte" in name or "embed" in name:
        value = rng.normal(size=shape)
    elif name.endswith("bias"):
      value = rng.normal(size=shape)
    else:
      value = rng.uniform(-0.5, 0.5, shape) + (0 if gemma else 1)
    weights[name] = value.astype(dtype)
  return weights


def _folder(path, config, weights):
  path.mkdir(parents=True, exist_ok=True)
  (path / "config.json").write_text(json.dumps(config))
  safetensors.numpy.save_file(weights, path / "model.safetensors")
  return path


def _gelu(x):
  return x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


def _cap(x, cap):
  return x if cap is None else cap * np.tanh(x / cap)


def _attend(query, key, value, *, scale, window=None, cap=None):
  """[S, N, H], [S, K, H] twice -> [S, N * H], one query at a time."""
  size, heads, _ = query.shape
  out = np.zeros(query.shape)
  for t in range(size):
    first = 0 if window is None else max(0, t + 1 - window)
    for head in range(heads):
      mine = head // (heads // key.shape[1])
      scores = scale * key[first : t + 1, mine] @ query[t, head]
      weights = np.exp(_cap(scores, cap))
      out[t, head] = weights / weights.sum() @ value[first : t + 1, mine]
  return out.reshape(size, -1)


def _gpt2(config, weights, tokens):
  def linear(name, x):
    return x @ weights[name + ".weight"] + weights[name + ".bias"]

  def norm(name, x):
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
    return x * weights[name + ".weight"] + weights[name + ".bias"]

  size, heads = len(tokens), config["n_head"]
  x = weights["transformer.wte.weight"][tokens]
  x = x + weights["transformer.wpe.weight"][:size]
  for i in range(config["n_layer"]):
    layer = f"transformer.h.{i}."
    fused = linear(layer + "attn.c_attn", norm(layer + "ln_1", x))
    query, key, value = (
      part.reshape(size, heads, -1) for part in np.split(fused, 3, axis=-1)
    )
    scale = query.shape[-1] ** -0.5
    x = x + linear(
      layer + "attn.c_proj", _attend(query, key, value, scale=scale)
    )
    y = _gelu(linear(layer + "mlp.c_fc", norm(layer + "ln_2", x)))
    x = x + linear(layer + "mlp.c_proj", y)
  x = norm("transformer.ln_f", x)
  return x @ weights["transformer.wte.weight"].T


def _rotate(x, frequencies, factor=1.0):
  turned = np.zeros(x.shape)
  half = x.shape[-1] // 2
  for t in range(x.shape[0]):
    for i in range(half):
      cos, sin = np.cos(t * frequencies[i]), np.sin(t * frequencies[i])
      a, b = x[t, :, i], x[t, :, i + half]
      turned[t, :, i] = factor * (a * cos - b * sin)
      turned[t, :, i + half] = factor * (b * cos + a * sin)
  return turned


def _others(config, weights, tokens):
  kind, size = config["model_type"], len(tokens)
  gemma = kind.startswith("gemma")
  heads, width = config["num_attention_heads"], config["hidden_size"]
  head = config.get("head_dim", width // heads)

  def norm(name, x):
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
    return x * (weights[name + ".weight"] + (1 if gemma else 0))

  def linear(name, x):
    return x @ weights[name + ".weight"].T

  def act(x):
    return _gelu(x) if gemma else x / (1 + np.exp(-x))

  exponents = np.arange(0, head, 2) / head
  x = weights["model.embed_tokens.weight"][tokens]
  x = x * width**0.5 if gemma else x
  for i in range(config["num_hidden_layers"]):
    layer = f"model.layers.{i}."
    scale, window, factor = head**-0.5, None, 1.0
    frequencies = config["rope_theta"] ** -exponents
    if kind == "gemma2":
      scale = config["query_pre_attn_scalar"] ** -0.5
      window = config["sliding_window"] if i % 2 == 0 else None
    elif kind == "gemma3_text":
      scale = config["query_pre_attn_scalar"] ** -0.5
      if i % config["sliding_window_pattern"] == (
        config["sliding_window_pattern"] - 1
      ):
        frequencies = frequencies / 8
      else:
        window = config["sliding_window"]
        frequencies = config["rope_local_base_freq"] ** -exponents
    elif kind == "phi3":
      window = config["sliding_window"]
      frequencies = frequencies / config["rope_scaling"]["short_factor"]
      factor = math.sqrt(1 + math.log(160 / 40) / math.log(40))
    y = norm(layer + "input_layernorm", x)
    if kind == "phi3":
      fused = linear(layer + "self_attn.qkv_proj", y)
      queries = heads * head
      keys = config["num_key_value_heads"] * head
      parts = (
        fused[:, :queries],
        fused[:, queries : queries + keys],
        fused[:, queries + keys :],
      )
    else:
      parts = (linear(f"{layer}self_attn.{name}_proj", y) for name in "qkv")
    query, key, value = (part.reshape(size, -1, head) for part in parts)
    if kind == "gemma3_text":
      query = norm(layer + "self_attn.q_norm", query)
      key = norm(layer + "self_attn.k_norm", key)
    query = _rotate(query, frequencies, factor)
    key = _rotate(key, frequencies, factor)
    cap = config.get("attn_logit_softcapping")
    y = _attend(query, key, value, scale=scale, window=window, cap=cap)
    y = linear(layer + "self_attn.o_proj", y)
    four = kind in ("gemma2", "gemma3_text")
    x = x + (norm(layer + "post_attention_layernorm", y) if four else y)
    before = "pre_feedforward_layernorm" if four else "post_attention_layernorm"
    y = norm(layer + before, x)
    if kind == "phi3":
      gate, up = np.split(linear(layer + "mlp.gate_up_proj", y), 2, axis=-1)
    else:
      gate = linear(layer + "mlp.gate_proj", y)
      up = linear(layer + "mlp.up_proj", y)
    y = linear(layer + "mlp.down_proj", act(gate) * up)
    x = x + (norm(layer + "post_feedforward_layernorm", y) if four else y)
  output = "model.embed_tokens" if gemma else "lm_head"
  logits = linear(output, norm("model.norm", x))
  return _cap(logits, config.get("final_logit_softcapping"))


def _oracle(config, weights, tokens):
  """Logits [S, V] in float64 of tokens [S]."""
  wide = {name: value.astype(np.float64) for name, value in weights.items()}
  forward = _gpt2 if config["model_type"] == "gpt2" else _others
  return forward(config, wide, np.array(tokens))


def _runner(checkpoint):
  """run(tokens[T], parents[T], cache) -> logits [T, V], cache of the chain."""
  config = checkpoint.config
  target, _ = models.functionalize(models.abstract_model(config))

  @jax.jit
  def forward(params, tokens, positions, parents, cache):
    output = target.forward(params, tokens, positions, parents, cache.view())
    path = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    count = jnp.full((1,), tokens.shape[1], jnp.int32)
    longer, _ = cache.commit(output.block_kv, path, count)
    return target.score(params, output.hidden).logits[0], longer

  def run(tokens, parents, cache):
    depths = []
    for parent in parents:
      depths.append(0 if parent < 0 else depths[parent] + 1)
    positions = int(cache.length[0]) + np.array([depths], np.int32)
    return forward(
      checkpoint.params,
      np.array([tokens], np.int32),
      positions,
      np.array([parents], np.int32),
      cache,
    )

  return run, assemble.cache_factory(config, max_len=40, page_size=5)(1)


@pytest.mark.parametrize("kind", _CONFIGS)
def test_logits_of_chains_and_trees(tmp_path, kind):
  config = _CONFIGS[kind]
  weights = _weights(config)
  run, cache = _runner(checkpoints.read(_folder(tmp_path, config, weights)))
  rng = np.random.default_rng(1)
  text = rng.integers(0, 37, 24).tolist()
  want = _oracle(config, weights, text)
  # Two chunks of a chain, then a tree deeper than the windows.
  parts = []
  for begin in (0, 12):
    logits, cache = run(text[begin : begin + 12], range(-1, 11), cache)
    parts.append(logits)
  # fp32 rounds to 2^-24; some hundred roundings of sums of some twenty terms.
  tolerance = 1e-4 * max(1.0, np.abs(want).max())
  np.testing.assert_allclose(np.concatenate(parts), want, 0, tolerance)
  parents = [-1, 0, 0, 1, 2, 3, 5, 6, 7, 4, 8, 10]
  tokens = rng.integers(0, 37, len(parents)).tolist()
  got, _ = run(tokens, parents, cache)
  chains = []
  for node, parent in enumerate(parents):
    chains.append([*(chains[parent] if parent >= 0 else ()), tokens[node]])
  for node in (9, 11, 2):
    alone = _oracle(config, weights, text + chains[node])[-1]
    np.testing.assert_allclose(got[node], alone, 0, tolerance)


@pytest.mark.parametrize(
  ("kind", "changes"),
  [
    ("gemma2", {"query_pre_attn_scalar": 10}),
    ("gemma2", {"attn_logit_softcapping": 50.0}),
    ("gemma2", {"final_logit_softcapping": 30.0}),
    ("gemma2", {"sliding_window": 4}),
    ("gemma3_text", {"rope_local_base_freq": 5000.0}),
    ("gemma3_text", {"rope_theta": 50.0}),
    ("gemma3_text", {"sliding_window_pattern": 2}),
    ("gemma3_text", {"sliding_window": 6}),
    ("phi3", {"sliding_window": 5}),
    ("phi3", {"rope_scaling": {"short_factor": [1.0, 1.0, 1.0]}}),
  ],
  ids=lambda x: "-".join(x) if isinstance(x, dict) else x,
)
def test_what_the_oracle_would_notice(kind, changes):
  """Each setting moves the logits by far more than the tolerance above."""
  config = _CONFIGS[kind]
  weights = _weights(config)
  text = np.random.default_rng(1).integers(0, 37, 24).tolist()
  want = _oracle(config, weights, text)
  got = _oracle({**config, **changes}, weights, text)
  tolerance = 1e-4 * max(1.0, np.abs(want).max())
  assert np.abs(got - want).max() > 100 * tolerance


def _bits(weights):
  return {
    name: (x.dtype.name, x.shape, np.ascontiguousarray(x).tobytes())
    for name, x in weights.items()
  }


@pytest.mark.parametrize("style", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", _CONFIGS)
def test_there_and_back(tmp_path, bfloat16, kind, style):
  """Hugging Face -> Orbax -> Hugging Face: fused and transposed, every bit."""
  config = {**_CONFIGS[kind], "torch_dtype": style, "eos_token_id": [3, 5]}
  weights = _weights(config, bfloat16 if style == "bfloat16" else np.float32)
  source = _folder(tmp_path / "source", config, weights)
  checkpoints.convert(source, tmp_path / "orbax")
  checkpoints.convert(tmp_path / "orbax", tmp_path / "hf", to="hf")
  checkpoints.convert(source, tmp_path / "straight", to="hf")
  wanted = checkpoints.read(source)
  for folder in (tmp_path / "hf", tmp_path / "straight"):
    have = safetensors.numpy.load_file(folder / "model.safetensors")
    assert _bits(have) == _bits(weights)
    assert json.loads((folder / "config.json").read_text()) == config
    again = checkpoints.read(folder)
    assert (again.config, again.eos_token_ids) == (wanted.config, (3, 5))
    _same(again.params, wanted.params)


@pytest.mark.parametrize("kind", _CONFIGS)
def test_a_written_config(tmp_path, kind):
  """What a GGUF file needs: a config.json from the shape alone."""
  (tmp_path / "config.json").write_text(json.dumps(_CONFIGS[kind]))
  config = checkpoints.read_config(tmp_path)
  says = _hugging_face_out.config_of(config, np.dtype(np.float32))
  (tmp_path / "config.json").write_text(json.dumps(says))
  assert checkpoints.read_config(tmp_path) == config
  assert says["model_type"] == kind
  # The pattern as a list, which says the same.
  assert set(_CONFIGS[kind]) - {"sliding_window_pattern"} <= set(says)
  if kind == "gpt2":
    assert not {"hidden_size", "head_dim", "rope_theta"} & set(says)
    assert says["activation_function"] == "gelu_new"


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "phi3", "gpt2"])
@pytest.mark.parametrize("to", ["hf", "orbax"])
def test_gguf_to_a_folder(tmp_path, kind, to):
  """The converted model is the file's: its norms are 1 + w either way."""
  config = _gguf_config(kind)
  weights = _weights(config)
  path = _write_gguf(tmp_path / "tiny.gguf", config, weights)
  target = tmp_path / to
  checkpoints.convert(path, target, to=to)
  loaded, wanted = checkpoints.read(target), checkpoints.read(path)
  gemma = kind.startswith("gemma")
  offset = 1.0 if gemma else None
  assert loaded.config == dataclasses.replace(wanted.config, norm_offset=offset)

  def check(path, mine, theirs):
    if gemma and "norm" in jax.tree_util.keystr(path):
      mine = np.float32(1) + mine
    np.testing.assert_array_equal(mine, theirs)

  jax.tree_util.tree_map_with_path(check, loaded.params, wanted.params)
  if to == "hf":
    have = safetensors.numpy.load_file(target / "model.safetensors")
    assert {k: x.shape for k, x in have.items()} == _shapes(config)


def test_a_norm_that_is_not_one_more_than_any(tmp_path):
  config = _gguf_config("gemma")
  weights = _weights(config)
  path = _write_gguf(tmp_path / "tiny.gguf", config, weights)
  data = path.read_bytes()
  have = (1 + weights["model.norm.weight"]).astype("<f4").tobytes()
  assert data.count(have) == 1
  # 0.1 needs more bits than 1 - 0.1 has in float32.
  want = np.full(24, 0.1, "<f4").tobytes()
  path.write_bytes(data.replace(have, want))
  with pytest.raises(
    ValueError, match=r"'output_norm.weight' holds 1 \+ w, and"
  ):
    checkpoints.convert(path, tmp_path / "hf", to="hf")
  assert sorted(x.name for x in tmp_path.iterdir()) == ["tiny.gguf"]


def _same(one, two):
  jax.tree.map(np.testing.assert_array_equal, one, two)


def test_gpt2_without_prefix_and_with_its_buffers(tmp_path):
  # The buffers are of several types; none of them is read.
  config, weights = _CONFIGS["gpt2"], _weights(_CONFIGS["gpt2"], np.float16)
  plain = checkpoints.read(_folder(tmp_path / "plain", config, weights))
  assert jax.tree.leaves(plain.params)[0].dtype == jnp.float16
  bare = {name.removeprefix("transformer."): x for name, x in weights.items()}
  bare["lm_head.weight"] = weights["transformer.wte.weight"]
  for i, dtype in enumerate((np.bool_, np.uint8, np.float32)):
    bare[f"h.{i}.attn.bias"] = np.ones((1, 1, 64, 64), dtype)
    bare[f"h.{i}.attn.masked_bias"] = np.array(-1e4, np.float32)
  loaded = checkpoints.read(_folder(tmp_path / "bare", config, bare))
  assert jax.tree.leaves(loaded.params)[0].dtype == jnp.float16
  _same(plain.params, loaded.params)


@pytest.mark.parametrize("style", [4, 5])
def test_gemma3_with_vision(tmp_path, style):
  """The text model of a file that holds more, by both styles of names."""
  text, weights = _CONFIGS["gemma3_text"], _weights(_CONFIGS["gemma3_text"])
  alone = checkpoints.read(_folder(tmp_path / "alone", text, weights))
  config = {
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": text,
    "vision_config": {"hidden_size": 9},
    "eos_token_id": [1, 36],
  }
  outer, inner = ("", "language_model.model.")
  if style == 5:
    outer, inner = ("model.", "model.language_model.")
    text = {**text, "layer_types": ["sliding_attention"] * 2}
    text["layer_types"] += ["full_attention", "sliding_attention"]
    text["rope_parameters"] = {
      "full_attention": {
        "rope_type": "linear",
        "factor": 8.0,
        "rope_theta": 5000.0,
      },
      "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    }
    for key in ("rope_scaling", "rope_theta", "rope_local_base_freq"):
      del text[key]
    del text["sliding_window_pattern"]
    config["text_config"] = text
  nested = {
    name.replace("model.", inner, 1): value for name, value in weights.items()
  }
  for name in (
    "vision_tower.vision_model.head.weight",
    "multi_modal_projector",
  ):
    nested[outer + name + ".soft"] = np.ones((3, 3), np.float16)
  loaded = checkpoints.read(_folder(tmp_path / "both", config, nested))
  assert loaded.config == alone.config
  assert loaded.eos_token_ids == (1, 36)
  _same(loaded.params, alone.params)
  # Written out again it is the text model alone.
  checkpoints.convert(tmp_path / "both", tmp_path / "orbax")
  checkpoints.convert(tmp_path / "orbax", tmp_path / "hf", to="hf")
  written = safetensors.numpy.load_file(tmp_path / "hf" / "model.safetensors")
  assert _bits(written) == _bits(weights)
  says = json.loads((tmp_path / "hf" / "config.json").read_text())
  assert says["model_type"] == "gemma3_text"
  assert says["architectures"] == ["Gemma3ForCausalLM"]
  again = checkpoints.read(tmp_path / "hf")
  assert (again.config, again.eos_token_ids) == (alone.config, (1, 36))


def test_a_fused_tensor_of_another_size(tmp_path):
  config, weights = _CONFIGS["phi3"], _weights(_CONFIGS["phi3"])
  name = "model.layers.1.self_attn.qkv_proj.weight"
  weights[name] = weights[name][1:]
  with pytest.raises(ValueError, match=r"qkv_proj.*\(47, 24\).*\(48, 24\)"):
    checkpoints.read(_folder(tmp_path, config, weights))
  config, weights = _CONFIGS["gpt2"], _weights(_CONFIGS["gpt2"])
  name = "transformer.h.1.mlp.c_fc.weight"
  weights[name] = np.ascontiguousarray(weights[name].T)
  with pytest.raises(ValueError, match=r"c_fc.*\(96, 24\).*\(24, 96\)"):
    checkpoints.read(_folder(tmp_path, config, weights))


# What a GGUF file can't say has llama.cpp's value.
_GGUF = {
  "gemma2": {"query_pre_attn_scalar": 10},
  "gemma3_text": {
    "query_pre_attn_scalar": 10,
    "num_hidden_layers": 7,
    "sliding_window_pattern": 6,
    "rope_local_base_freq": 10000.0,
  },
}


def _gguf_config(kind):
  return {**_CONFIGS[kind], **_GGUF.get(kind, {})}


def _write_gguf(path, config, weights, **metadata):
  """As the converter does, with the names that its package gives."""
  kind = config["model_type"].removesuffix("_text")
  arch = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[kind]
  layers = config.get("num_hidden_layers") or config["n_layer"]
  names = gguf.get_tensor_name_map(arch, layers)
  width = config.get("hidden_size") or config["n_embd"]
  heads = config.get("num_attention_heads") or config["n_head"]
  integers = {
    "block_count": layers,
    "context_length": config.get("max_position_embeddings")
    or config["n_positions"],
    "embedding_length": width,
    "feed_forward_length": config.get("intermediate_size") or 4 * width,
    "attention.head_count": heads,
  }
  floats = {}
  if kind == "gpt2":
    floats["attention.layer_norm_epsilon"] = 1e-5
  else:
    integers["attention.head_count_kv"] = config["num_key_value_heads"]
    floats["attention.layer_norm_rms_epsilon"] = 1e-5
    floats["rope.freq_base"] = config["rope_theta"]
  if kind.startswith("gemma"):
    integers["attention.key_length"] = config["head_dim"]
    integers["attention.value_length"] = config["head_dim"]
  if kind != "gemma" and "sliding_window" in config:
    integers["attention.sliding_window"] = config["sliding_window"]
  if kind == "gemma2":
    floats["attn_logit_softcapping"] = config["attn_logit_softcapping"]
    floats["final_logit_softcapping"] = config["final_logit_softcapping"]
  writer = gguf.GGUFWriter(path, kind)
  if kind == "gemma3":
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    floats["rope.scaling.factor"] = config["rope_scaling"]["factor"]
  if kind == "phi3":
    integers["rope.dimension_count"] = width // heads
    integers["rope.scaling.original_context_length"] = 40
    floats["rope.scaling.attn_factor"] = (1 + math.log(4) / math.log(40)) ** 0.5
    for length in ("short", "long"):
      writer.add_tensor(
        f"rope_factors_{length}.weight",
        np.array(config["rope_scaling"][f"{length}_factor"], np.float32),
      )
  for key, value in {**integers, **floats, **metadata}.items():
    if value is not None:
      add = writer.add_uint32 if key in integers else writer.add_float32
      add(f"{kind}.{key}", value)
  for name, value in weights.items():
    if kind == "gpt2" and ".c_" in name:
      value = value.T
    if kind.startswith("gemma") and name.endswith("norm.weight"):
      value = value + 1
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    writer.add_tensor(found, np.ascontiguousarray(value))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


@pytest.mark.parametrize("kind", _CONFIGS)
def test_gguf(tmp_path, kind):
  config = _gguf_config(kind)
  weights = _weights(config)
  path = _write_gguf(tmp_path / "tiny.gguf", config, weights)
  loaded = checkpoints.read(path)
  folder = checkpoints.read(_folder(tmp_path / "hf", config, weights))
  wanted, gemma = folder.config, kind.startswith("gemma")
  if gemma:
    wanted = dataclasses.replace(wanted, norm_offset=0.0)
  if kind == "phi3":  # the factors are float32 in the file
    wanted = dataclasses.replace(
      wanted,
      rope_scaling=models.RopeFactors(
        factors=tuple(
          float(np.float32(x)) for x in wanted.rope_scaling.factors
        ),
        attention_factor=float(
          np.float32(wanted.rope_scaling.attention_factor)
        ),
      ),
    )
  assert loaded.config == wanted

  def check(path, mine, theirs):
    if gemma and "norm" in jax.tree_util.keystr(path):
      theirs = np.float32(1) + theirs
    np.testing.assert_array_equal(mine, theirs)

  jax.tree_util.tree_map_with_path(check, loaded.params, folder.params)


def test_gguf_norms_of_gemma_give_the_same_logits(tmp_path):
  """1 + w in the file and 1 + w in the model are one model."""
  config = _gguf_config("gemma2")
  weights = _weights(config)
  path = _write_gguf(tmp_path / "tiny.gguf", config, weights)
  run, cache = _runner(checkpoints.read(path))
  text = np.random.default_rng(1).integers(0, 37, 12).tolist()
  logits, _ = run(text, range(-1, 11), cache)
  np.testing.assert_allclose(logits, _oracle(config, weights, text), 0, 3e-4)


def test_scores_of_the_largest_gemmas_in_gguf(tmp_path):
  # 27B: the file does not say that scores are scaled by E / N.
  for kind, layers in (("gemma2", 46), ("gemma3_text", 62)):
    config = {**_gguf_config(kind), "num_hidden_layers": layers}
    path = _write_gguf(tmp_path / kind, config, {})
    with pytest.raises(ValueError, match=r"token_embd\.weight"):
      checkpoints.read_config(path)
    embedding = {"model.embed_tokens.weight": np.ones((37, 24), np.float32)}
    path = _write_gguf(tmp_path / kind, config, embedding)
    assert checkpoints.read_config(path).query_scale == 6**-0.5


@pytest.mark.parametrize(
  ("kind", "metadata", "message"),
  [
    (
      "phi3",
      {"attention.sliding_window": None},
      r"phi3\.attention\.sliding_window is missing",
    ),
    (
      "gemma3_text",
      {"attention.sliding_window": None},
      r"gemma3\.attention\.sliding_window is missing",
    ),
    (
      "phi3",
      {"rope.scaling.attn_factor": None},
      r"phi3\.rope\.scaling\.attn_factor is missing",
    ),
    (
      "gemma3_text",
      {"rope.scaling.factor": None},
      r"gemma3\.rope\.scaling\.factor is missing",
    ),
    (
      "gemma2",
      {"attention.sliding_window_pattern": 3.0},
      "does not say for which layers",
    ),
  ],
)
def test_gguf_files_that_do_not_say_enough(tmp_path, kind, metadata, message):
  config = _gguf_config(kind)
  path = tmp_path / "tiny.gguf"
  _write_gguf(path, config, _weights(config), **metadata)
  with pytest.raises(ValueError, match=message):
    checkpoints.read(path)
