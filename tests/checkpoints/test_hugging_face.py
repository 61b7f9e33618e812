"""Hugging Face folders: configurations of every style, and strict weights."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from ldjax import checkpoints, models


def _config(folder, **changes):
  raw = {
    "model_type": "llama",
    "vocab_size": 31,
    "hidden_size": 64,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    **changes,
  }
  raw = {key: value for key, value in raw.items() if value != "absent"}
  folder.mkdir(parents=True, exist_ok=True)
  (folder / "config.json").write_text(json.dumps(raw))
  return checkpoints.read_config(folder)


def test_published_configs(shared_data):
  folder = shared_data / "configs"
  small = checkpoints.read_config(folder / "Llama-3.2-1B-Instruct")
  assert small == models.TransformerConfig(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    max_position_embeddings=131072,
    rope_theta=500000.0,
    rope_scaling=models.RopeScaling(
      factor=32.0,
      low_freq_factor=1.0,
      high_freq_factor=4.0,
      original_max_position_embeddings=8192,
    ),
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
  )
  large = checkpoints.read_config(folder / "llama3_1_8b")
  assert (large.head_dim, large.rope_scaling.factor) == (128, 8.0)
  assert not large.tie_word_embeddings
  vicuna = checkpoints.read_config(folder / "vicuna-7b-delta-v0")
  assert vicuna.num_kv_heads == vicuna.num_heads == 32
  assert (vicuna.rope_theta, vicuna.rms_norm_eps) == (10000.0, 1e-6)
  assert checkpoints.read_config(folder / "codellama_7b").rope_theta == 1e6
  resaved = folder / "TinyLlama-1.1B-Chat-v1.0_resaved_4.56"
  assert checkpoints.read_config(resaved).num_layers == 22
  assert checkpoints.read_config(folder / "smollm2_135m").num_kv_heads == 3


_LLAMA3 = {
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
  "changes",
  [
    {"rope_theta": 5e5, "rope_scaling": {**_LLAMA3, "rope_type": "llama3"}},
    {"rope_theta": 5e5, "rope_scaling": {**_LLAMA3, "type": "llama3"}},
    {
      "rope_parameters": {
        **_LLAMA3,
        "rope_type": "llama3",
        "rope_theta": 5e5,
      }
    },
  ],
  ids=["rope_type", "type", "transformers-5"],
)
def test_llama3_scaling_in_each_style(tmp_path, changes):
  config = _config(tmp_path, **changes)
  assert config.rope_theta == 5e5
  assert config.rope_scaling == models.RopeScaling(**_LLAMA3)


def test_rope_defaults(tmp_path):
  assert _config(tmp_path).rope_theta == 10000.0
  style5 = {"rope_parameters": {"rope_type": "default", "rope_theta": 123.0}}
  config = _config(tmp_path, **style5)
  assert (config.rope_theta, config.rope_scaling) == (123.0, None)
  assert _config(tmp_path, rope_scaling=None).rope_scaling is None


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "linear", "longrope"])
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_other_scalings_are_refused_by_name(tmp_path, kind, key):
  with pytest.raises(ValueError, match=f"rope_type '{kind}'"):
    _config(tmp_path, rope_scaling={key: kind, "factor": 2.0})


def test_llama3_scaling_lacking_a_number(tmp_path):
  scaling = {**_LLAMA3, "rope_type": "llama3"}
  del scaling["low_freq_factor"]
  with pytest.raises(ValueError, match="'low_freq_factor', found None"):
    _config(tmp_path, rope_scaling=scaling)


def test_head_dim_and_heads(tmp_path):
  assert _config(tmp_path).head_dim == 16
  assert _config(tmp_path, head_dim=None).head_dim == 16
  assert _config(tmp_path, head_dim=32).head_dim == 32
  assert _config(tmp_path).num_kv_heads == 4
  assert _config(tmp_path, num_key_value_heads=2).num_kv_heads == 2
  biased = _config(tmp_path, attention_bias=True)
  assert biased.qkv_bias and biased.o_bias
  with pytest.raises(ValueError, match="multiple of num_kv_heads"):
    _config(tmp_path, num_key_value_heads=3)
  with pytest.raises(ValueError, match="not a multiple"):
    _config(tmp_path, num_attention_heads=5)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"quantization_config": {"quant_method": "awq"}}, "awq"),
    ({"hidden_act": "gelu"}, "'gelu'"),
    ({"model_type": "absent"}, "model_type is missing"),
    ({"vocab_size": "absent"}, "vocab_size is missing"),
    ({"vocab_size": 31.5}, "vocab_size is 31.5"),
    ({"hidden_size": True}, "hidden_size is True"),
    ({"num_attention_heads": 0}, "num_attention_heads 0"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
    ({"rms_norm_eps": "tiny"}, "rms_norm_eps is 'tiny'"),
    ({"rope_parameters": {"full": {"rope_theta": 1.0}}}, "layer type"),
  ],
)
def test_what_is_not_supported_is_refused(tmp_path, changes, message):
  with pytest.raises(ValueError, match=message) as error:
    _config(tmp_path, **changes)
  assert "config.json" in str(error.value)


@pytest.mark.parametrize("shards", [1, 3])
def test_weights_are_read(tmp_path, make_tiny, shards):
  tiny = make_tiny()
  folder = tiny.folder(tmp_path / "tiny", shards)
  lines = []
  loaded = checkpoints.read(folder, progress=lines.append)
  tiny.check(loaded.params)
  assert loaded.name == "tiny"
  assert loaded.eos_token_ids == (2,)
  assert loaded.config.head_dim == 12
  assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(loaded.params))
  assert lines[-1] == "read 20 of 20 tensors"
  assert len(lines) == 10


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_biases_and_untied(tmp_path, make_tiny, prefix):
  tiny = make_tiny(
    attention_bias=True, mlp_bias=True, tie_word_embeddings=False
  )
  other = make_tiny()
  other.config = tiny.config
  other.weights = {
    name.replace("model.", prefix): value
    for name, value in tiny.weights.items()
  }
  tiny.check(checkpoints.read(other.folder(tmp_path)).params)


def test_bfloat16_without_torch(tmp_path, make_tiny, bfloat16):
  tiny = make_tiny(bfloat16)
  tiny.weights["model.norm.weight"][:2] = [1e38, -3e-39]
  folder = tiny.folder(tmp_path)
  assert "torch" not in sys.modules
  tiny.check(checkpoints.read(folder).params)
  tiny.check(checkpoints.read(folder, dtype="bfloat16").params)
  wide = checkpoints.read(folder, dtype=jnp.float32).params
  tiny.check(wide, np.float32)
  assert np.isfinite(wide["norm"]["weight"][0])
  with pytest.raises(ValueError, match=r"'model.norm.weight' holds.*65504"):
    checkpoints.read(folder, dtype=jnp.float16)


def test_float16_and_mixed(tmp_path, make_tiny, bfloat16):
  tiny = make_tiny(np.float16)
  tiny.check(checkpoints.read(tiny.folder(tmp_path / "same")).params)
  tiny.weights["model.norm.weight"] = tiny.weights["model.norm.weight"].astype(
    bfloat16
  )
  mixed = checkpoints.read(tiny.folder(tmp_path / "mixed")).params
  tiny.check(mixed, np.float32)  # the narrowest that holds both


@pytest.mark.parametrize("dtype", ["int8", "float64", "complex64", "nonsense"])
def test_dtypes_that_cannot_hold_weights(tmp_path, make_tiny, dtype):
  with pytest.raises(ValueError, match=dtype):
    checkpoints.read(make_tiny().folder(tmp_path), dtype=dtype)


def test_tied_and_untied(tmp_path, make_tiny):
  tiny = make_tiny()
  tiny.weights["lm_head.weight"] = np.ones((31, 32), np.float32)
  loaded = checkpoints.read(tiny.folder(tmp_path / "tied, head present"))
  assert "lm_head" not in loaded.params
  tiny.check(loaded.params)
  untied = make_tiny(tie_word_embeddings=False)
  del untied.weights["lm_head.weight"]
  with pytest.raises(ValueError, match=r"parameter lm_head\.weight;.*tie_word"):
    checkpoints.read(untied.folder(tmp_path / "untied, no head"))


def test_known_extras_are_ignored(tmp_path, make_tiny):
  tiny = make_tiny()
  plain = dict(tiny.weights)
  for i in range(2):
    name = f"model.layers.{i}.self_attn.rotary_emb.inv_freq"
    tiny.weights[name] = np.ones(6, np.float32)
  folder = tiny.folder(tmp_path)
  tiny.weights = plain
  tiny.check(checkpoints.read(folder).params)


@pytest.mark.parametrize(
  ("name", "shape", "message"),
  [
    ("model.layers.0.mlp.router.weight", (3,), "'model.layers.0.mlp.router"),
    ("model.layers.2.input_layernorm.weight", (32,), "number of layers"),
    ("model.layers.0.self_attn.q_proj.bias", (48,), "biases, q/k norms"),
    ("model.layers.0.self_attn.q_norm.weight", (12,), "biases, q/k norms"),
    ("norm.weight", (32,), "norm.weight is given twice"),
    ("model.norm.weight", (33,), r"\(33,\).*asks for \(32,\)"),
    ("model.norm.weight", None, "no tensor for parameter norm.weight"),
  ],
)
def test_strictness(tmp_path, make_tiny, name, shape, message):
  tiny = make_tiny()
  if shape is None:
    del tiny.weights[name]
  else:
    tiny.weights[name] = np.zeros(shape, np.float32)
  with pytest.raises(ValueError, match=message):
    checkpoints.read(tiny.folder(tmp_path))


def test_integer_weights_are_refused(tmp_path, make_tiny):
  tiny = make_tiny()
  tiny.weights["model.norm.weight"] = np.zeros(32, np.int8)
  with pytest.raises(ValueError, match=r"'model.norm.weight' is of type I8"):
    checkpoints.read(tiny.folder(tmp_path))


def _unreadable(folder):
  """Makes sure that no weight is read: the other shards hold no weights."""
  for file in folder.glob("*.safetensors"):
    file.write_bytes(b"not weights")


def test_missing_shard_is_named_before_weights_are_read(tmp_path, make_tiny):
  folder = make_tiny().folder(tmp_path, shards=3)
  (folder / "model-00002-of-00003.safetensors").unlink()
  _unreadable(folder)
  with pytest.raises(FileNotFoundError, match="model-00002-of-00003"):
    checkpoints.read(folder)


@pytest.mark.parametrize(
  "name", ["../stray.safetensors", "/etc/passwd", "a/b.safetensors", "..\\x", 3]
)
def test_shards_stay_in_the_folder(tmp_path, make_tiny, name):
  folder = make_tiny().folder(tmp_path / "in", shards=2)
  safetensors.numpy.save_file({}, tmp_path / "stray.safetensors")
  file = folder / "model.safetensors.index.json"
  index = json.loads(file.read_text())
  index["weight_map"]["model.norm.weight"] = name
  file.write_text(json.dumps(index))
  with pytest.raises(ValueError, match="plain file name"):
    checkpoints.read(folder)


def test_only_files_of_the_index_are_read(tmp_path, make_tiny):
  tiny = make_tiny()
  folder = tiny.folder(tmp_path, shards=2)
  (folder / "consolidated.safetensors").write_bytes(b"something else")
  tiny.check(checkpoints.read(folder).params)


def test_index_and_shards_disagree(tmp_path, make_tiny):
  folder = make_tiny().folder(tmp_path, shards=2)
  file = folder / "model.safetensors.index.json"
  index = json.loads(file.read_text())
  where = index["weight_map"].pop("model.norm.weight")
  file.write_text(json.dumps(index))
  with pytest.raises(ValueError, match=r"'model.norm.weight' is not named"):
    checkpoints.read(folder)
  index["weight_map"] |= {"model.norm.weight": where, "ghost": where}
  file.write_text(json.dumps(index))
  with pytest.raises(ValueError, match="'ghost' is in"):
    checkpoints.read(folder)


def test_a_stray_shard(tmp_path, make_tiny):
  folder = make_tiny().folder(tmp_path, shards=2)
  (folder / "consolidated.safetensors").write_bytes(b"")  # another's business
  checkpoints.read(folder)
  (folder / "model-00003-of-00003.safetensors").write_bytes(b"")
  with pytest.raises(ValueError, match=r"00003-of-00003.*does not name this"):
    checkpoints.read(folder)


@pytest.mark.parametrize("shards", [1, 2])
def test_pytorch_files(tmp_path, make_tiny, write_torch, shards, bfloat16):
  tiny = make_tiny(bfloat16, tie_word_embeddings=False)
  folder = tiny.folder(tmp_path, shards)
  names = {}
  for file in list(folder.glob("model*.safetensors")):
    name = file.name.replace("model", "pytorch_model", 1)
    names[file.name] = name.replace("safetensors", "bin")
    with safetensors.safe_open(file, "np") as tensors:
      part = {key: tiny.weights[key] for key in tensors.keys()}  # noqa: SIM118
    write_torch(folder / names[file.name], part)
    file.unlink()
  index = folder / "model.safetensors.index.json"
  if shards > 1:
    text = index.read_text()
    for old, new in names.items():
      text = text.replace(old, new)
    (folder / "pytorch_model.bin.index.json").write_text(text)
    index.unlink()
  tiny.check(checkpoints.read(folder).params)


@pytest.mark.parametrize("keep", [0, 5, 100, -3])
def test_truncated_safetensors(tmp_path, make_tiny, keep):
  file = make_tiny().folder(tmp_path) / "model.safetensors"
  file.write_bytes(file.read_bytes()[:keep])
  with pytest.raises(ValueError, match=r"model\.safetensors: .*truncated"):
    checkpoints.read(tmp_path)


def test_folders_without_weights(tmp_path, make_tiny):
  folder = make_tiny().folder(tmp_path)
  (folder / "model.safetensors").unlink()
  with pytest.raises(FileNotFoundError, match=r"no weights; model\.saf"):
    checkpoints.read(folder)
  (folder / "pytorch_model.bin").write_bytes(b"")
  with pytest.raises(ValueError, match=r"pytorch_model\.bin: not a whole file"):
    checkpoints.read(folder)
  (folder / "config.json").write_text("{")
  with pytest.raises(ValueError, match=r"config\.json: not readable as JSON"):
    checkpoints.read(folder)
  (folder / "config.json").unlink()
  with pytest.raises(FileNotFoundError, match=r"config\.json: missing"):
    checkpoints.read(folder)


@pytest.mark.parametrize(
  ("config", "generation", "ids"),
  [
    ([128001, 128008, 128009], None, (128001, 128008, 128009)),
    (128001, [128009, 128001], (128001, 128009)),
    ("absent", 7, (7,)),
    (None, [5, 6], (5, 6)),
    (0, None, (0,)),
    ("absent", "absent", ()),
  ],
)
def test_eos_is_the_union(tmp_path, make_tiny, config, generation, ids):
  tiny = make_tiny()
  del tiny.config["eos_token_id"]
  if config != "absent":
    tiny.config["eos_token_id"] = config
  folder = tiny.folder(tmp_path)
  said = {} if generation == "absent" else {"eos_token_id": generation}
  (folder / "generation_config.json").write_text(json.dumps(said))
  assert checkpoints.read(folder).eos_token_ids == ids


@pytest.mark.parametrize("eos", ["</s>", [1, None], -1, True])
def test_eos_that_is_no_id(tmp_path, make_tiny, eos):
  with pytest.raises(ValueError, match="eos_token_id is"):
    checkpoints.read(make_tiny(eos_token_id=eos).folder(tmp_path))


def test_name_in_a_hub_cache(tmp_path, make_tiny):
  folder = tmp_path / "models--org--some-name" / "snapshots" / "0123abc"
  assert checkpoints.read(make_tiny().folder(folder)).name == "org/some-name"


def test_reading_does_not_need_torch(tmp_path, make_tiny, bfloat16):
  folder = make_tiny(bfloat16).folder(tmp_path)
  program = (
    "import sys; sys.modules['torch'] = None\n"
    "from ldjax import checkpoints\n"
    f"print(checkpoints.read({str(folder)!r}).params['norm']['weight'].dtype)"
  )
  done = subprocess.run(
    [sys.executable, "-c", program], capture_output=True, text=True, check=True
  )
  assert done.stdout.strip() == "bfloat16"
