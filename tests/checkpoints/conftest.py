"""Tiny models written by scripts of their own: the oracle of the readers."""

import dataclasses
import json
import pathlib
import runpy
from typing import Any

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from ldjax import checkpoints
from ldjax.checkpoints import _hugging_face_out


@dataclasses.dataclass
class TinyModel:
  """Weights by Hugging Face names, and the config.json that goes with them."""

  config: dict[str, Any]
  weights: dict[str, np.ndarray]

  def folder(self, path: pathlib.Path, shards: int = 1) -> pathlib.Path:
    """Writes a Hugging Face folder."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(self.config))
    if shards == 1:
      safetensors.numpy.save_file(self.weights, path / "model.safetensors")
      return path
    names = sorted(self.weights)
    where = {}
    for shard in range(shards):
      file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
      part = {name: self.weights[name] for name in names[shard::shards]}
      where.update(dict.fromkeys(part, file))
      safetensors.numpy.save_file(part, path / file)
    index = {"metadata": {}, "weight_map": where}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path

  def gguf(
    self,
    path: pathlib.Path,
    *,
    kinds: dict[str, gguf.GGMLQuantizationType] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    metadata: dict[str, Any] | None = None,
    arch: str | None = None,
  ) -> pathlib.Path:
    """Writes a GGUF file as a converter would, llama's q and k interleaved."""
    config = self.config
    if arch is None:
      kind = config["model_type"]
      arch = "llama" if kind == "mistral" else kind
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("Tiny")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_eos_token_id(2)
    for key, value in (metadata or {}).items():
      if isinstance(value, str):
        writer.add_string(key, value)
      elif isinstance(value, float):
        writer.add_float32(key, value)
      else:
        writer.add_uint32(key, value)
    tensors = {
      self._gguf_name(name): (
        self._shuffled(name, value) if arch == "llama" else value
      )
      for name, value in self.weights.items()
    }
    for name, value in {**tensors, **(extra or {})}.items():
      value = value.astype(np.float32)
      kind = (kinds or {}).get(name)
      if kind is None:
        writer.add_tensor(name, value)
      else:
        writer.add_tensor(
          name, gguf.quants.quantize(value, kind), raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

  def _gguf_name(self, name: str) -> str:
    for old, new in (
      ("model.embed_tokens", "token_embd"),
      ("model.norm", "output_norm"),
      ("lm_head", "output"),
      ("model.layers", "blk"),
      ("input_layernorm", "attn_norm"),
      ("post_attention_layernorm", "ffn_norm"),
      ("self_attn.o_proj", "attn_output"),
      ("self_attn.q_proj", "attn_q"),
      ("self_attn.k_proj", "attn_k"),
      ("self_attn.v_proj", "attn_v"),
      ("self_attn.q_norm", "attn_q_norm"),
      ("self_attn.k_norm", "attn_k_norm"),
      ("mlp.gate_proj", "ffn_gate"),
      ("mlp.up_proj", "ffn_up"),
      ("mlp.down_proj", "ffn_down"),
    ):
      name = name.replace(old, new)
    return name

  def _shuffled(self, name: str, value: np.ndarray) -> np.ndarray:
    """q and k rows in interleaved order: within a head 0, H/2, 1, H/2+1, …"""
    if "q_proj" not in name and "k_proj" not in name:
      return value
    size = self.config["head_dim"]
    rows = []
    for start in range(0, value.shape[0], size):
      for i in range(size // 2):
        rows += [start + i, start + size // 2 + i]
    return value[rows]

  def check(self, params: Any, dtype: Any = None) -> None:
    """Every weight is where it belongs, bit by bit."""
    count = 0
    for name, value in self.weights.items():
      if name == "lm_head.weight" and self.config["tie_word_embeddings"]:
        continue
      node = params
      for part in name.removeprefix("model.").split("."):
        node = node[int(part) if part.isdigit() else part]
      wanted = value if dtype is None else value.astype(dtype)
      assert node.dtype == wanted.dtype, name
      np.testing.assert_array_equal(
        np.asarray(node).view(np.uint8), wanted.view(np.uint8), name
      )
      count += 1

    def size(tree):
      if not isinstance(tree, dict):
        return 1
      return sum(size(value) for value in tree.values())

    assert size(params) == count


def _make(dtype: Any = np.float32, seed: int = 0, **changes: Any) -> TinyModel:
  config: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 31,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,  # not E / N
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
  }
  config.update(changes)
  rng = np.random.default_rng(seed)
  width, wide = config["hidden_size"], config["intermediate_size"]
  head, vocab = config["head_dim"], config["vocab_size"]
  queries = config["num_attention_heads"] * head
  keys = config["num_key_value_heads"] * head
  shapes: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (vocab, width),
    "model.norm.weight": (width,),
  }
  if not config["tie_word_embeddings"]:
    shapes["lm_head.weight"] = (vocab, width)
  for i in range(config["num_hidden_layers"]):
    layer = f"model.layers.{i}."
    shapes[layer + "input_layernorm.weight"] = (width,)
    shapes[layer + "post_attention_layernorm.weight"] = (width,)
    for name, (outputs, inputs) in {
      "self_attn.q_proj": (queries, width),
      "self_attn.k_proj": (keys, width),
      "self_attn.v_proj": (keys, width),
      "self_attn.o_proj": (width, queries),
      "mlp.gate_proj": (wide, width),
      "mlp.up_proj": (wide, width),
      "mlp.down_proj": (width, wide),
    }.items():
      shapes[f"{layer}{name}.weight"] = (outputs, inputs)
      kind = "attention_bias" if "attn" in name else "mlp_bias"
      if config["model_type"] == "qwen2":
        biased = name[-6:] in ("q_proj", "k_proj", "v_proj")
      else:
        biased = bool(config.get(kind))
      if biased:
        shapes[f"{layer}{name}.bias"] = (outputs,)
    if config["model_type"] == "qwen3":
      shapes[layer + "self_attn.q_norm.weight"] = (head,)
      shapes[layer + "self_attn.k_norm.weight"] = (head,)
  weights = {
    name: rng.standard_normal(shape, np.float32).astype(dtype)
    for name, shape in shapes.items()
  }
  return TinyModel(config, weights)


@pytest.fixture
def make_tiny():
  """Makes a tiny model: `make_tiny(dtype, **changes of config.json)`.

  A llama unless `model_type` says otherwise.
  """
  return _make


@pytest.fixture
def bfloat16():
  """NumPy's bf16, without JAX and without torch."""
  return np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(scope="session")
def write_torch():
  """`write_torch(path, {name: array})` writes what torch.save does."""
  file = pathlib.Path(__file__).with_name("test_torch_file.py")
  return runpy.run_path(str(file))["write"]


@pytest.fixture
def check_our_format(tmp_path):
  """check(folder, target_config, config, params): a published draft becomes
  one of ours, and reads back as that, bit by bit."""

  def check(folder, target_config, config, params):
    model, ours = tmp_path / "the-model", tmp_path / "ours"
    model.mkdir()
    says = _hugging_face_out.config_of(target_config, np.dtype(np.float32))
    (model / "config.json").write_text(json.dumps(says))
    for layout in ("orbax", "vllm"):
      with pytest.raises(ValueError, match=r"give to='ldjax'|takes any"):
        checkpoints.convert(folder, ours, to=layout)
    with pytest.raises(ValueError, match="name it, target=MODEL"):
      checkpoints.convert(folder, ours, to="ldjax")
    with pytest.raises(ValueError, match="only to='ldjax' asks"):
      checkpoints.convert(folder, ours, to="medusa", target=model)
    assert not ours.exists()
    found = checkpoints.convert(folder, ours, to="ldjax", target=model)
    assert (found.layout, found.draft) == ("ldjax", config.kind)
    file = checkpoints.read_draft(ours, target_config=target_config)
    assert (file.config, file.target) == (config, "the-model")
    assert jax.tree.structure(file.params) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, file.params, params)
    with pytest.raises(ValueError, match="is a draft of ldjax's format alread"):
      checkpoints.convert(ours, tmp_path / "x", to="ldjax", target=model)

  return check
