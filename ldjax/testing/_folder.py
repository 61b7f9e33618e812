"""A checkpoint small enough for tests and notebooks."""

import json
import os
import pathlib

import numpy as np
import safetensors.numpy
import tokenizers

_SPECIAL = (
  "<s>",
  "<|im_start|>",
  "<|im_end|>",  # 258, the tokenizer's eos
  "</s>",  # 259, that of config.json
  "<|eot|>",  # 260, that of generation_config.json
  "<pad>",
)
_TEMPLATE = (
  "{% for m in messages %}<|im_start|>{{ m['role'][0] }}{{ m['content'] }}"
  "<|im_end|>{% endfor %}"
  "{% if add_generation_prompt %}<|im_start|>a{% endif %}"
)


def _write_tokenizer(folder: pathlib.Path) -> None:
  """One token a byte, ids in the order of the byte alphabet, then special."""
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  backend = tokenizers.Tokenizer(
    tokenizers.models.BPE({text: i for i, text in enumerate(alphabet)}, [])
  )
  backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False
  )
  backend.decoder = tokenizers.decoders.ByteLevel()
  backend.add_special_tokens(list(_SPECIAL))
  backend.save(str(folder / "tokenizer.json"))
  settings = {"eos_token": "<|im_end|>", "chat_template": _TEMPLATE}
  (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _weights(config: dict[str, int]) -> dict[str, np.ndarray]:
  width, wide = config["hidden_size"], config["intermediate_size"]
  queries = config["num_attention_heads"] * config["head_dim"]
  keys = config["num_key_value_heads"] * config["head_dim"]
  rng = np.random.default_rng(0)

  def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
    return scale * rng.standard_normal(shape, np.float32)

  def matrix(outputs: int, inputs: int) -> np.ndarray:
    return normal(outputs, inputs, scale=1.5 * inputs**-0.5)

  weights = {
    "model.embed_tokens.weight": normal(config["vocab_size"], width, scale=0.5),
    "model.norm.weight": 1 + normal(width, scale=0.1),
  }
  for i in range(config["num_hidden_layers"]):
    layer = f"model.layers.{i}."
    weights |= {
      layer + "input_layernorm.weight": 1 + normal(width, scale=0.1),
      layer + "post_attention_layernorm.weight": 1 + normal(width, scale=0.1),
      layer + "self_attn.q_proj.weight": matrix(queries, width),
      layer + "self_attn.k_proj.weight": matrix(keys, width),
      layer + "self_attn.v_proj.weight": matrix(keys, width),
      layer + "self_attn.o_proj.weight": matrix(width, queries),
      layer + "mlp.gate_proj.weight": matrix(wide, width),
      layer + "mlp.up_proj.weight": matrix(wide, width),
      layer + "mlp.down_proj.weight": matrix(width, wide),
    }
  return weights


def write_tiny_model(folder: str | os.PathLike[str]) -> pathlib.Path:
  """Writes a Hugging Face folder: a random two-layer llama, one token a byte.

  262 tokens, of which 256 are bytes; 258, 259 and 260 end a text, each by
  another file's word. The weights are the same each time.

  Args:
    folder: made if it is not there.

  Returns:
    The folder, for `ldjax.load`.

  Example:
    >>> import tempfile
    >>> import ldjax
    >>> model = ldjax.load(write_tiny_model(tempfile.mkdtemp()))
    >>> model.config.vocab_size
    262
  """
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  config = {
    "vocab_size": 256 + len(_SPECIAL),
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 256,
  }
  more = {
    "model_type": "llama",
    "tie_word_embeddings": True,
    "eos_token_id": 259,
  }
  (folder / "config.json").write_text(json.dumps({**config, **more}))
  (folder / "generation_config.json").write_text('{"eos_token_id": [260, 259]}')
  _write_tokenizer(folder)
  safetensors.numpy.save_file(_weights(config), folder / "model.safetensors")
  return folder
