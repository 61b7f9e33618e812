"""GGUF files: round trips through an independent writer, and refusals."""

import json
import math

import gguf
import numpy as np
import pytest

from ldjax import checkpoints, models

_KIND = gguf.GGMLQuantizationType


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1), (3, 1)])
def test_round_trip_puts_the_rows_back(tmp_path, make_tiny, heads):
  tiny = make_tiny(num_attention_heads=heads[0], num_key_value_heads=heads[1])
  loaded = checkpoints.read(tiny.gguf(tmp_path / "tiny.gguf"))
  tiny.check(loaded.params)
  assert loaded.config == checkpoints.read_config(tiny.folder(tmp_path))
  assert loaded.config == checkpoints.read_config(tmp_path / "tiny.gguf")
  assert loaded.eos_token_ids == (2,)
  assert loaded.name == "Tiny"


def test_interleaved_order_is_really_different(make_tiny):
  # The writer's shuffle is the known formula of llama.cpp's converter.
  tiny = make_tiny()
  name = "model.layers.0.self_attn.q_proj.weight"
  weight = tiny.weights[name]
  formula = weight.reshape(4, 2, 6, 32).swapaxes(1, 2).reshape(weight.shape)
  shuffled = tiny._shuffled(name, weight)
  np.testing.assert_array_equal(shuffled, formula)
  assert not np.array_equal(shuffled, weight)


def test_untied_and_biases(tmp_path, make_tiny):
  tiny = make_tiny(
    tie_word_embeddings=False, attention_bias=True, mlp_bias=True
  )
  loaded = checkpoints.read(tiny.gguf(tmp_path / "tiny.gguf"))
  tiny.check(loaded.params)
  assert not loaded.config.tie_word_embeddings
  assert loaded.config.qkv_bias
  assert loaded.config.o_bias and loaded.config.mlp_bias


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
  "changes",
  [
    {"model_type": "qwen2"},
    {"model_type": "qwen3"},
    {"model_type": "qwen3", "attention_bias": True},
    {"model_type": "mistral", "sliding_window": None},
  ],
  ids=["qwen2", "qwen3", "qwen3 with biases", "mistral"],
)
def test_round_trip_of_other_families(tmp_path, make_tiny, changes, tied):
  # Only llama's q and k rows are interleaved; Mistral's files say llama.
  tiny = make_tiny(tie_word_embeddings=tied, **changes)
  path = tiny.gguf(tmp_path / "tiny.gguf")
  loaded = checkpoints.read(path)
  tiny.check(loaded.params)
  assert loaded.config == checkpoints.read_config(tiny.folder(tmp_path))
  assert loaded.config.qk_norm == (changes["model_type"] == "qwen3")
  assert loaded.config.tie_word_embeddings == tied


def test_a_window_of_mistral(tmp_path, make_tiny):
  tiny = make_tiny(model_type="mistral", sliding_window=16)
  metadata = {"llama.attention.sliding_window": 16}
  loaded = checkpoints.read(tiny.gguf(tmp_path / "t.gguf", metadata=metadata))
  assert loaded.config.windows == (16, 16)
  assert loaded.config == checkpoints.read_config(tiny.folder(tmp_path))
  # As long as the longest text: it hides nothing.
  metadata = {"llama.attention.sliding_window": 64}
  path = tiny.gguf(tmp_path / "long.gguf", metadata=metadata)
  assert checkpoints.read_config(path).windows == ()


@pytest.mark.parametrize(
  ("kind", "lost"),
  [
    ("qwen2", "self_attn.q_proj.bias"),
    ("qwen2", "self_attn.v_proj.bias"),
    ("qwen3", "self_attn.k_norm.weight"),
  ],
)
def test_what_a_family_always_has(tmp_path, make_tiny, kind, lost):
  tiny = make_tiny(model_type=kind)
  for layer in range(2):
    del tiny.weights[f"model.layers.{layer}.{lost}"]
  for path in (tiny.gguf(tmp_path / "t.gguf"), tiny.folder(tmp_path / "hf")):
    with pytest.raises(ValueError, match=f"no tensor for .*layers.0.{lost}"):
      checkpoints.read(path)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_float_types(tmp_path, make_tiny, bfloat16, dtype):
  tiny = make_tiny()
  path = tiny.gguf(tmp_path / "tiny.gguf")
  wanted = bfloat16 if dtype == "bfloat16" else np.float16
  tiny.check(checkpoints.read(path, dtype).params, wanted)


def test_several_types_in_one_file(tmp_path, make_tiny):
  tiny = make_tiny()
  kinds = {
    "token_embd.weight": _KIND.Q8_0,
    "blk.0.ffn_up.weight": _KIND.Q4_0,
    "blk.1.ffn_up.weight": _KIND.Q4_1,
    "blk.0.ffn_down.weight": _KIND.Q5_0,
    "blk.0.attn_q.weight": _KIND.F16,
    "blk.1.attn_k.weight": _KIND.BF16,
  }
  path = tiny.gguf(tmp_path / "called-q4_0.gguf", kinds=kinds)
  params = checkpoints.read(path).params

  def through(name, kind):
    raw = gguf.quants.quantize(tiny.weights[name], kind)
    return gguf.quants.dequantize(raw, kind).astype(np.float32)

  for layer, name, kind in [
    (None, "model.embed_tokens.weight", _KIND.Q8_0),
    (0, "mlp.up_proj.weight", _KIND.Q4_0),
    (1, "mlp.up_proj.weight", _KIND.Q4_1),
    (0, "mlp.down_proj.weight", _KIND.Q5_0),
    (0, "self_attn.q_proj.weight", _KIND.F16),
    (1, "self_attn.k_proj.weight", _KIND.BF16),
  ]:
    if layer is None:
      node, full = params["embed_tokens"]["weight"], name
    else:
      group, projection, _ = name.split(".")
      node = params["layers"][layer][group][projection]["weight"]
      full = f"model.layers.{layer}.{name}"
    np.testing.assert_array_equal(np.asarray(node), through(full, kind), full)


def test_q8_0_by_hand(tmp_path, make_tiny):
  # One block of 32: a half-precision scale, then 32 signed bytes.
  tiny = make_tiny()
  row = np.arange(-16, 16, dtype=np.float32)
  row[0] = -127.0  # so that the scale is 1 and every value exact
  tiny.weights["model.embed_tokens.weight"] = np.tile(row, (31, 1))
  path = tiny.gguf(tmp_path / "t.gguf", kinds={"token_embd.weight": _KIND.Q8_0})
  tiny.check(checkpoints.read(path).params)


def test_unsupported_type_names_tensor_and_type(tmp_path, make_tiny):
  tiny = make_tiny()
  path = tmp_path / "tiny.gguf"
  tiny.gguf(path, kinds={"blk.1.ffn_up.weight": _KIND.Q8_0})
  raw = bytearray(path.read_bytes())
  # Q8_1 has no dequantiser; its blocks are larger, so grow the file as well.
  name = b"blk.1.ffn_up.weight"
  at = raw.index(name) + len(name) + 4 + 2 * 8
  assert raw[at] == _KIND.Q8_0
  raw[at] = _KIND.Q8_1
  path.write_bytes(raw + bytes(4096))
  with pytest.raises(ValueError, match=r"'blk.1.ffn_up.weight'.*Q8_1"):
    checkpoints.read(path)
  raw[at] = 250
  path.write_bytes(raw)
  with pytest.raises(ValueError, match=r"'blk.1.ffn_up.weight'.*number 250"):
    checkpoints.read(path)


def _stretched(factor, low, high, original, theta, size):
  """The converter's loop over frequencies, written by hand."""
  values = []
  for i in range(0, size, 2):
    wavelength = 2 * math.pi * theta ** (i / size)
    if wavelength < original / high:
      values.append(1.0)
    elif wavelength > original / low:
      values.append(factor)
    else:
      smooth = (original / wavelength - low) / (high - low)
      values.append(1 / ((1 - smooth) / factor + smooth))
  return np.array(values, np.float32)


@pytest.mark.parametrize(
  "setting",
  [(8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192), (16.0, 2.0, 9.0, 4096)],
)
def test_llama3_factors_are_recovered(tmp_path, make_tiny, setting):
  tiny = make_tiny(
    head_dim=64, num_attention_heads=2, num_key_value_heads=1, rope_theta=5e5
  )
  found = _stretched(*setting, 5e5, 64)
  assert len(np.unique(found)) > 3
  path = tiny.gguf(tmp_path / "t.gguf", extra={"rope_freqs.weight": found})
  loaded = checkpoints.read(path)
  tiny.check(loaded.params)
  scaling = loaded.config.rope_scaling
  if setting[1:] == (1.0, 4.0, 8192):
    assert scaling == models.RopeScaling(
      factor=setting[0],
      low_freq_factor=1.0,
      high_freq_factor=4.0,
      original_max_position_embeddings=8192,
    )
  # Whatever numbers were found, the frequencies are the file's: float32's half
  # ulp over the file's factor, times what the line's fit adds.
  plain = 5e5 ** -(np.arange(0, 64, 2) / 64)
  frequencies = np.asarray(models.rotary_frequencies(loaded.config), np.float64)
  np.testing.assert_allclose(frequencies, plain / found, rtol=1e-5)


def test_factors_of_one_are_no_scaling(tmp_path, make_tiny):
  extra = {"rope_freqs.weight": np.ones(6, np.float32)}
  tiny = make_tiny()
  path = tiny.gguf(tmp_path / "t.gguf", extra=extra)
  loaded = checkpoints.read(path)
  tiny.check(loaded.params)
  assert loaded.config.rope_scaling is None


@pytest.mark.parametrize(
  ("factors", "message"),
  [
    ([1, 1, 2, 1, 3, 4], "not those of a llama3 stretch"),
    ([1, 2, 2, 2, 2, 2], "not those of a llama3 stretch"),
    ([1, 1, 1], "3 factors and the head 6"),
    ([1, 1, 1, 1, 1, 0], "damaged"),
    ([1, 1, 1, 1, 1, np.nan], "damaged"),
  ],
)
def test_factors_that_are_no_llama3_stretch(
  tmp_path, make_tiny, factors, message
):
  extra = {"rope_freqs.weight": np.array(factors, np.float32)}
  path = make_tiny().gguf(tmp_path / "t.gguf", extra=extra)
  with pytest.raises(ValueError, match=message):
    checkpoints.read(path)


@pytest.mark.parametrize(
  ("metadata", "message"),
  [
    ({"llama.rope.scaling.type": "yarn"}, "'yarn'"),
    ({"llama.rope.scaling.type": "linear"}, "'linear'"),
    ({"llama.rope.scale_linear": 4.0}, "scale_linear is 4.0"),
    ({"llama.expert_count": 8}, "expert_count is 8"),
    (
      {
        "llama.attention.sliding_window": 16,
        "llama.attention.sliding_window_pattern": 2,
      },
      "sliding_window is 16",
    ),
    ({"split.count": 3}, "one of 3 parts"),
  ],
)
def test_what_is_not_supported_is_refused(
  tmp_path, make_tiny, metadata, message
):
  path = make_tiny().gguf(tmp_path / "t.gguf", metadata=metadata)
  with pytest.raises(ValueError, match=message) as error:
    checkpoints.read(path)
  assert "t.gguf" in str(error.value)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_windows_of_some_layers_are_refused(tmp_path, make_tiny, kind):
  metadata = {f"{kind}.attention.sliding_window": 16}
  path = make_tiny(model_type=kind).gguf(tmp_path / "t", metadata=metadata)
  with pytest.raises(ValueError, match=f"{kind}.attention.sliding_window is"):
    checkpoints.read(path)


@pytest.mark.parametrize("arch", ["qwen3moe", "gemma3n", "phi2", "smollm3"])
def test_other_architectures_are_refused_by_name(tmp_path, make_tiny, arch):
  path = make_tiny().gguf(tmp_path / "t.gguf", arch=arch)
  with pytest.raises(ValueError, match=f"general.architecture is '{arch}'"):
    checkpoints.read(path)


def test_a_tensor_too_many(tmp_path, make_tiny):
  extra = {"blk.0.attn_q_norm.weight": np.ones(12)}
  path = make_tiny().gguf(tmp_path / "t.gguf", extra=extra)
  with pytest.raises(ValueError, match=r"'blk\.0\.attn_q_norm\.weight'"):
    checkpoints.read(path)


def test_a_tensor_too_few(tmp_path, make_tiny):
  tiny = make_tiny()
  del tiny.weights["model.layers.1.mlp.up_proj.weight"]
  path = tiny.gguf(tmp_path / "t.gguf")
  with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight"):
    checkpoints.read(path)


def test_every_truncation_is_a_clear_error(tmp_path, make_tiny):
  whole = make_tiny().gguf(tmp_path / "t.gguf").read_bytes()
  cut = tmp_path / "cut.gguf"
  sizes = [*range(0, 3000, 61), *range(3000, len(whole), 4001), len(whole) - 33]
  for size in sizes:
    cut.write_bytes(whole[:size])
    with pytest.raises(ValueError, match=r"cut\.gguf: ") as error:
      checkpoints.read(cut)
    message = str(error.value)
    assert "truncated" in message or "too short" in message, message


def test_files_that_are_not_gguf(tmp_path):
  path = tmp_path / "page.gguf"
  path.write_text("<html>" + "x" * 100)
  with pytest.raises(ValueError, match="not a GGUF file"):
    checkpoints.read(path)
  other = tmp_path / "model.safetensors"
  other.write_text("x" * 100)
  with pytest.raises(ValueError, match=r"name the folder that holds config"):
    checkpoints.read(other)
  path.write_bytes(b"GGUF" + (1).to_bytes(4, "little") + bytes(100))
  with pytest.raises(ValueError, match="GGUF version 1"):
    checkpoints.read(path)
  with pytest.raises(FileNotFoundError, match=r"absent\.gguf"):
    checkpoints.read(tmp_path / "absent.gguf")


def test_a_folder_with_a_gguf_file(tmp_path, make_tiny):
  make_tiny().gguf(tmp_path / "tiny.gguf")
  with pytest.raises(ValueError, match=r"tiny\.gguf.*name the \.gguf file"):
    checkpoints.read(tmp_path)


def test_header_agrees_with_the_package(tmp_path, make_tiny):
  path = make_tiny().gguf(
    tmp_path / "t.gguf", metadata={"general.note": "größer"}
  )
  ours = checkpoints.read_gguf_metadata(path)
  theirs = {
    key: field.contents()
    for key, field in gguf.GGUFReader(path).fields.items()
    if not key.startswith("GGUF.")
  }
  assert ours == theirs


@pytest.mark.slow
def test_demo_model(demo_model, shared_data):
  loaded = checkpoints.read(demo_model)
  published = shared_data / "configs" / "smollm2_135m"
  assert loaded.config == checkpoints.read_config(published)
  raw = json.loads((published / "config.json").read_text())
  assert loaded.eos_token_ids == (raw["eos_token_id"],)
  reader = gguf.GGUFReader(demo_model)
  by_name = {tensor.name: tensor for tensor in reader.tensors}

  def values(name):
    tensor = by_name[name]
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type)

  layer = loaded.params["layers"][7]
  np.testing.assert_array_equal(
    layer["mlp"]["down_proj"]["weight"], values("blk.7.ffn_down.weight")
  )
  keys = values("blk.7.attn_k.weight")  # 3 heads of 64 rows
  order = [
    head * 64 + (row % 32) * 2 + row // 32
    for head in range(3)
    for row in range(64)
  ]
  np.testing.assert_array_equal(
    layer["self_attn"]["k_proj"]["weight"], keys[order]
  )
