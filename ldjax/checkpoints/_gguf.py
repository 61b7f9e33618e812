"""Target models in GGUF files, architectures llama, qwen2 and qwen3.

Files of Mistral and of SmolLM2 say llama.
"""

import functools
import pathlib
from typing import Any

import numpy as np

from ldjax import models
from ldjax.checkpoints import _gguf_file, _rope_factors, _rules

_BLOCK = r"blk\.(\d+)\."


def _line(name: str, target: str, transform: str = "") -> _rules.Rule:
  return _rules.Rule(
    _BLOCK + name + r"\.(weight|bias)",
    f"layers/{{0}}/{target}/{{1}}",
    transform,
  )


_COMMON = (
  _rules.Rule(r"token_embd\.weight", "embed_tokens/weight"),
  _line("attn_norm", "input_layernorm"),
  _line("attn_v", "self_attn/v_proj"),
  _line("attn_output", "self_attn/o_proj"),
  _line("ffn_norm", "post_attention_layernorm"),
  _line("ffn_gate", "mlp/gate_proj"),
  _line("ffn_up", "mlp/up_proj"),
  _line("ffn_down", "mlp/down_proj"),
  _rules.Rule(r"output_norm\.weight", "norm/weight"),
  _rules.Rule(r"output\.weight", "lm_head/weight"),
  # Read by the configuration, see `_rope_factors`.
  _rules.Rule(r"rope_freqs\.weight", None),
)

_HALVES = (
  _line("attn_q", "self_attn/q_proj"),
  _line("attn_k", "self_attn/k_proj"),
)
# For each architecture its table; only llama's q and k rows are interleaved.
RULES = {
  "llama": (
    *_COMMON,
    _line("attn_q", "self_attn/q_proj", "split_query_halves"),
    _line("attn_k", "self_attn/k_proj", "split_key_halves"),
  ),
  "qwen2": (*_COMMON, *_HALVES),
  "qwen3": (
    *_COMMON,
    *_HALVES,
    _line("attn_q_norm", "self_attn/q_norm"),
    _line("attn_k_norm", "self_attn/k_norm"),
  ),
}

_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def split_halves(array: np.ndarray, heads: int) -> np.ndarray:
  """Puts rows back from interleaved RoPE order to two halves a head.

  GGUF keeps the two halves of a llama head's rows shuffled together (0, H/2,
  1, H/2 + 1, …); here, as in Hugging Face, the halves stand one after the
  other.

  Args:
    array: `[heads * H, …]`, a weight or a bias.
    heads: N for queries, K for keys.

  Returns:
    The rows in the other order, same shape.
  """
  half = array.shape[0] // heads // 2
  paired = array.reshape(heads, half, 2, *array.shape[1:])
  return np.moveaxis(paired, 2, 1).reshape(array.shape)


class _Metadata:
  """Typed access to one architecture's keys, with errors that name them."""

  def __init__(self, contents: _gguf_file.Contents, arch: str):
    self.contents = contents
    self.arch = arch

  def get(self, key: str) -> Any:
    return self.contents.metadata.get(f"{self.arch}.{key}")

  def number(self, key: str, default: float | None = None) -> float:
    value = self.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float):
      found = "missing" if value is None else f"{value!r:.60}"
      raise ValueError(
        f"{self.contents.path}: metadata {self.arch}.{key} is {found}; one"
        " number for all layers is needed"
      )
    return value

  def integer(self, key: str, default: int | None = None) -> int:
    value = self.number(key, default)
    if value != int(value):
      raise ValueError(
        f"{self.contents.path}: metadata {self.arch}.{key} is {value}; an"
        " integer is needed"
      )
    return int(value)


def _refuse(data: _Metadata) -> None:
  path = data.contents.path
  split = data.contents.metadata.get("split.count", 0)
  if split > 1:
    raise ValueError(
      f"{path}: one of {split} parts; join them with `gguf-split --merge`"
    )
  if data.integer("expert_count", 0) > 0:
    raise ValueError(
      f"{path}: {data.arch}.expert_count is {data.integer('expert_count')};"
      " mixtures of experts are not supported"
    )
  kind = data.get("rope.scaling.type")
  if kind not in (None, "none"):
    raise ValueError(
      f"{path}: {data.arch}.rope.scaling.type {kind!r} is not supported;"
      " 'none' is, and the llama3 stretch (rope_freqs.weight)"
    )
  linear = data.number("rope.scale_linear", 1.0)
  if linear != 1.0:
    raise ValueError(
      f"{path}: {data.arch}.rope.scale_linear is {linear}; linear rope scaling"
      " is not supported"
    )


def _windows(data: _Metadata) -> tuple[int | None, ...]:
  window = data.integer("attention.sliding_window", 0)
  if not 0 < window < data.integer("context_length"):
    return ()
  pattern = data.get("attention.sliding_window_pattern")
  if data.arch != "llama" or pattern is not None:
    # Mistral's window is every layer's; a Qwen's is that of some layers only.
    raise ValueError(
      f"{data.contents.path}: {data.arch}.attention.sliding_window is {window},"
      " and the file does not say for which layers in a way that is supported;"
      " use the Hugging Face folder"
    )
  return (window,) * data.integer("block_count")


def _head_dim(data: _Metadata, hidden: int, heads: int) -> int:
  rotary = data.get("rope.dimension_count")
  size = data.get("attention.key_length")
  if size is None:
    size = rotary
  if size is None:
    if hidden % heads:
      raise ValueError(
        f"{data.contents.path}: embedding length {hidden} is not a multiple of"
        f" {heads} heads, and {data.arch}.attention.key_length is missing"
      )
    size = hidden // heads
  for key in ("rope.dimension_count", "attention.value_length"):
    other = data.get(key)
    if other is not None and other != size:
      raise ValueError(
        f"{data.contents.path}: {data.arch}.{key} is {other} and the head size"
        f" {size}; only equal sizes are supported"
      )
  return int(size)


def parse_config(contents: _gguf_file.Contents) -> models.TransformerConfig:
  """A configuration from a GGUF file's metadata and tensor list.

  Raises:
    ValueError: for what is missing, malformed or not supported.
  """
  path = contents.path
  arch = contents.metadata.get("general.architecture")
  if not isinstance(arch, str) or arch not in RULES:
    raise ValueError(
      f"{path}: general.architecture is {arch!r}; supported: "
      + ", ".join(map(repr, RULES))
    )
  data = _Metadata(contents, arch)
  _refuse(data)
  tensors = {tensor.name: tensor for tensor in contents.tensors}
  embedding = tensors.get("token_embd.weight")
  if embedding is None or len(embedding.shape) != 2:
    raise ValueError(f"{path}: no tensor 'token_embd.weight' of two axes")
  hidden = data.integer("embedding_length")
  heads = data.integer("attention.head_count")
  if heads < 1:
    raise ValueError(f"{path}: {arch}.attention.head_count is {heads}")
  head_dim = _head_dim(data, hidden, heads)
  theta = data.number("rope.freq_base", 10000.0)
  scaling = None
  factors = tensors.get("rope_freqs.weight")
  if factors is not None:
    scaling = _rope_factors.recover(
      _gguf_file.dequantize(contents, factors),
      theta,
      head_dim,
      data.get("rope.scaling.original_context_length"),
      str(path),
    )
  try:
    return models.TransformerConfig(
      vocab_size=data.integer("vocab_size", embedding.shape[0]),
      hidden_size=hidden,
      intermediate_size=data.integer("feed_forward_length"),
      num_layers=data.integer("block_count"),
      num_heads=heads,
      num_kv_heads=data.integer("attention.head_count_kv", heads),
      head_dim=head_dim,
      max_position_embeddings=data.integer("context_length"),
      rope_theta=float(theta),
      rope_scaling=scaling,
      # A float32 in the file: 9.99999975e-06 was written as 1e-05.
      rms_norm_eps=float(
        str(np.float32(data.number("attention.layer_norm_rms_epsilon")))
      ),
      tie_word_embeddings="output.weight" not in tensors,
      qkv_bias=arch == "qwen2" or "blk.0.attn_q.bias" in tensors,
      o_bias="blk.0.attn_output.bias" in tensors,
      mlp_bias="blk.0.ffn_gate.bias" in tensors,
      qk_norm=arch == "qwen3",
      windows=_windows(data),
    )
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from error


def eos_of(contents: _gguf_file.Contents) -> tuple[int, ...]:
  """The ids that end a text or a turn, by the tokenizer's metadata."""
  found: dict[int, None] = {}
  for key in _EOS_KEYS:
    value = contents.metadata.get(f"tokenizer.ggml.{key}")
    if value is not None:
      found[int(value)] = None
  return tuple(found)


def read_file(
  path: pathlib.Path,
  dtype: np.dtype[Any] | None,
  progress: _rules.Progress | None,
  place: _rules.Place | None = None,
) -> tuple[models.TransformerConfig, dict[Any, Any], tuple[int, ...], str]:
  """Configuration, parameters, EOS ids and name of a GGUF file."""
  contents = _gguf_file.open_gguf(path)
  config = parse_config(contents)
  _gguf_file.check_kinds(contents)
  tensors = [
    _rules.Tensor(
      name=info.name,
      file=path.name,
      shape=info.shape,
      dtype=np.dtype(np.float32),
      read=functools.partial(_gguf_file.dequantize, contents, info),
    )
    for info in contents.tensors
  ]
  target = dtype or np.dtype(np.float32)
  rules = RULES[contents.metadata["general.architecture"]]
  planned = _rules.plan(rules, tensors, models.abstract_params(config, target))
  transforms = {
    "split_query_halves": functools.partial(
      split_halves, heads=config.num_heads
    ),
    "split_key_halves": functools.partial(
      split_halves, heads=config.num_kv_heads
    ),
  }
  params = _rules.execute(planned, transforms, target, progress, place)
  name = str(contents.metadata.get("general.name", path.stem))
  return config, params, eos_of(contents), name
