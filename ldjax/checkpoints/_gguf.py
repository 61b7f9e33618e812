"""Target models in GGUF files.

Files of Mistral and of SmolLM2 say llama. Where a file is silent about
something, llama.cpp's reading of it counts.
"""

import functools
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ldjax import models
from ldjax.checkpoints import (
  _config_keys,
  _gguf_file,
  _gguf_rules,
  _rope_factors,
  _rules,
)

_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


class _Family(NamedTuple):
  """What an architecture stands for.

  Args:
    fixed: fields of the configuration that no metadata changes.
    window: of a layer, where the file gives none; None if it must.
    pattern: which layers a window concerns: 0 for all, n for all but each
      n-th; None if that can't be known.
    large: the number of layers of the Gemma whose scores are scaled by E / N
      instead of H, which the file does not say.
  """

  fixed: Mapping[str, Any] = {}
  window: int | None = 0
  pattern: int | None = None
  large: int | None = None


# The norms of a Gemma hold 1 + w in a file, to be multiplied in float32.
_GEMMA = {"norm_offset": 0.0, "activation": "gelu_tanh"}
_FAMILIES = {
  "llama": _Family(pattern=0),
  "qwen2": _Family({"qkv_bias": True}),
  "qwen3": _Family({"qk_norm": True}),
  "gemma": _Family(_GEMMA),
  "gemma2": _Family(
    {**_GEMMA, "output_norms": True}, window=4096, pattern=2, large=46
  ),
  "gemma3": _Family(
    {**_GEMMA, "output_norms": True, "qk_norm": True},
    window=None,
    pattern=6,
    large=62,
  ),
  "phi3": _Family(window=None, pattern=0),
  "gpt2": _Family(
    {
      "learned_positions": True,
      "norm": "layer",
      "activation": "gelu_tanh",
      "mlp_gate": False,
      "qkv_bias": True,
      "o_bias": True,
      "mlp_bias": True,
    }
  ),
}


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
  if kind not in (None, "none") and (data.arch, kind) != ("gemma3", "linear"):
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


def _windows(data: _Metadata, longest: int) -> tuple[int | None, ...]:
  path, family = data.contents.path, _FAMILIES[data.arch]
  window = data.get("attention.sliding_window")
  if window is None and family.window is None:
    raise ValueError(
      f"{path}: metadata {data.arch}.attention.sliding_window is missing; this"
      " file is of an early converter, use a newer one or the Hugging Face"
      " folder"
    )
  window = data.integer("attention.sliding_window", family.window)
  # Where layers without a window have another rotary base it stays.
  if window < 1 or (window >= longest and data.arch != "gemma3"):
    return ()
  pattern = data.get("attention.sliding_window_pattern")
  if family.pattern is None or pattern not in (None, family.pattern):
    # Mistral's window is every layer's; a Qwen's is that of some layers only.
    raise ValueError(
      f"{path}: {data.arch}.attention.sliding_window is {window},"
      " and the file does not say for which layers in a way that is supported;"
      " use the Hugging Face folder"
    )
  every = family.pattern
  return tuple(
    None if every and not (layer + 1) % every else window
    for layer in range(data.integer("block_count"))
  )


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


def _rope(
  data: _Metadata, tensors: Mapping[str, Any], head_dim: int
) -> dict[str, Any]:
  """Fields of the configuration about rotary embedding."""
  contents = data.contents
  theta = data.number("rope.freq_base", 10000.0)
  fields: dict[str, Any] = {"rope_theta": float(theta)}
  factors = tensors.get("rope_freqs.weight")
  if factors is not None:
    fields["rope_scaling"] = _rope_factors.recover(
      _gguf_file.dequantize(contents, factors),
      theta,
      head_dim,
      data.get("rope.scaling.original_context_length"),
      str(contents.path),
    )
  if data.arch == "gemma3":
    fields["rope_local_theta"] = data.number("rope.freq_base_swa", 10000.0)
    if data.get("rope.scaling.type") == "linear":
      factor = float(data.number("rope.scaling.factor"))
      fields["rope_scaling"] = models.LinearRopeScaling(factor=factor)
  short = tensors.get("rope_factors_short.weight")
  if short is not None:
    # The long factors would turn keys that are cached already, see
    # `_config_rope`: the model is read as one of its first context.
    values = _gguf_file.dequantize(contents, short).reshape(-1)
    fields["rope_scaling"] = models.RopeFactors(
      factors=tuple(map(float, values)),
      attention_factor=float(data.number("rope.scaling.attn_factor")),
    )
    fields["max_position_embeddings"] = min(
      data.integer("context_length"),
      data.integer("rope.scaling.original_context_length"),
    )
  return fields


def _gemma(
  data: _Metadata, hidden: int, heads: int, head_dim: int
) -> dict[str, Any]:
  """What a Gemma scales and caps."""
  fields: dict[str, Any] = {"embed_scale": hidden**0.5}
  if data.arch == "gemma":
    return fields
  large = data.integer("block_count") == _FAMILIES[data.arch].large
  fields["query_scale"] = (hidden / heads if large else head_dim) ** -0.5
  if data.arch == "gemma2":
    fields["attn_soft_cap"] = data.number("attn_logit_softcapping", 50.0)
    fields["final_soft_cap"] = data.number("final_logit_softcapping", 30.0)
  elif data.get("final_logit_softcapping") is not None:
    fields["final_soft_cap"] = data.number("final_logit_softcapping")
  return fields


def parse_config(contents: _gguf_file.Contents) -> models.TransformerConfig:
  """A configuration from a GGUF file's metadata and tensor list.

  Raises:
    ValueError: for what is missing, malformed or not supported.
  """
  path = contents.path
  arch = contents.metadata.get("general.architecture")
  if not isinstance(arch, str) or arch not in _FAMILIES:
    raise ValueError(
      f"{path}: general.architecture is {arch!r}; supported: "
      + ", ".join(map(repr, _FAMILIES))
    )
  data = _Metadata(contents, arch)
  _refuse(data)
  tensors = {tensor.name: tensor for tensor in contents.tensors}
  embedding = tensors.get("token_embd.weight")
  if embedding is None or len(embedding.shape) != 2:
    raise ValueError(f"{path}: no tensor 'token_embd.weight' of two axes")
  _config_keys.check_layers(
    data.integer("block_count"), f"{arch}.block_count", path
  )
  hidden = data.integer("embedding_length")
  heads = data.integer("attention.head_count")
  if heads < 1:
    raise ValueError(f"{path}: {arch}.attention.head_count is {heads}")
  head_dim = _head_dim(data, hidden, heads)
  fixed = _FAMILIES[arch].fixed
  layered = fixed.get("norm") == "layer"
  eps = "layer_norm_epsilon" if layered else "layer_norm_rms_epsilon"
  fields: dict[str, Any] = {
    "max_position_embeddings": data.integer("context_length"),
    "qkv_bias": "blk.0.attn_q.bias" in tensors,
    "o_bias": "blk.0.attn_output.bias" in tensors,
    "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
  }
  if not fixed.get("learned_positions"):
    fields |= _rope(data, tensors, head_dim)
  if arch.startswith("gemma"):
    fields |= _gemma(data, hidden, heads, head_dim)
  fields["windows"] = _windows(data, fields["max_position_embeddings"])
  try:
    return models.TransformerConfig(
      vocab_size=data.integer("vocab_size", embedding.shape[0]),
      hidden_size=hidden,
      intermediate_size=data.integer("feed_forward_length"),
      num_layers=data.integer("block_count"),
      num_heads=heads,
      num_kv_heads=data.integer("attention.head_count_kv", heads),
      head_dim=head_dim,
      # A float32 in the file: 9.99999975e-06 was written as 1e-05.
      rms_norm_eps=float(str(np.float32(data.number(f"attention.{eps}")))),
      tie_word_embeddings="output.weight" not in tensors,
      **{**fields, **fixed},
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


def name_of(contents: _gguf_file.Contents) -> str:
  """What the model calls itself."""
  return str(contents.metadata.get("general.name", contents.path.stem))


def open_file(
  path: pathlib.Path, dtype: np.dtype[Any] | None
) -> tuple[models.TransformerConfig, _rules.Plan, tuple[int, ...], str]:
  """Configuration, plan, EOS ids and name of a GGUF file."""
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
  rules = _gguf_rules.RULES[contents.metadata["general.architecture"]]
  planned = _rules.plan(rules, tensors, models.abstract_params(config, target))
  transforms = {
    "split_query_halves": functools.partial(
      _gguf_rules.split_halves, heads=config.num_heads
    ),
    "split_key_halves": functools.partial(
      _gguf_rules.split_halves, heads=config.num_kv_heads
    ),
  }
  whole = _rules.Plan(planned, transforms, target)
  return config, whole, eos_of(contents), name_of(contents)
