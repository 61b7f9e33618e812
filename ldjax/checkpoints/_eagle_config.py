"""What config.json and tensors together tell of an EAGLE draft."""

import pathlib
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ldjax import models
from ldjax.checkpoints import (
  _config_keys,
  _config_rope,
  _rules,
  _safetensors,
)

_DEPTH = 7
"""Tokens ahead; no file says it, it is the depth of EAGLE's default tree."""

# Keys that mean another computation than the one here, unless they are falsy.
_REFUSED = (
  "layernorms",
  "norm_before_fc",
  "fc_norm",
  "norm_output",
  "embed_requires_grad",
)


class Says(NamedTuple):
  """A config.json, taken apart."""

  file: pathlib.Path
  outer: Mapping[str, Any]
  """The whole object."""
  keys: _config_keys.Keys
  """Of the decoder layer: the whole object, or `transformer_layer_config`."""
  kind: str | None
  """"eagle" or "eagle3" where it says so."""


def parse(folder: pathlib.Path) -> Says:
  """Reads config.json, and refuses by name what is not supported."""
  file = folder / "config.json"
  if not file.is_file():
    raise FileNotFoundError(
      f"{file}: missing; it says how many heads an EAGLE draft has"
    )
  outer = _safetensors.read_json(file)
  kind: Any = outer.get("speculators_model_type")
  layer: Any = outer
  if kind is not None:
    if kind not in ("eagle", "eagle3"):
      raise ValueError(
        f"{file}: speculators_model_type is {kind!r}; 'eagle' and 'eagle3' are"
        " supported"
      )
    layer = outer.get("transformer_layer_config")
    if not isinstance(layer, dict):
      raise ValueError(
        f"{file}: transformer_layer_config is {layer!r:.80}; an object is"
        " needed there"
      )
    built = outer.get("transformer_layer_architecture", "LlamaDecoderLayer")
    if built != "LlamaDecoderLayer":
      raise ValueError(
        f"{file}: transformer_layer_architecture {built!r} is not supported;"
        " only 'LlamaDecoderLayer' is"
      )
  for key in _REFUSED:
    if outer.get(key):
      raise ValueError(f"{file}: {key} {outer[key]!r} is not supported")
  if layer.get("hidden_act", "silu") not in ("silu", "swish"):
    raise ValueError(
      f"{file}: hidden_act {layer['hidden_act']!r} is not supported; only silu"
    )
  if layer.get("quantization_config") or outer.get("quantization_config"):
    raise ValueError(
      f"{file}: quantization_config is not supported; use the draft before it"
      " was quantised"
    )
  return Says(file, outer, _config_keys.Keys(layer, {}, file), kind)


class Shapes:
  """What the tensors say of the layer, and config.json where they cannot."""

  def __init__(self, rules: Any, tensors: Any, says: Says):
    self.tensors = _rules.targets(rules, tensors)
    self.says = says

  def has(self, *path: str) -> bool:
    """Whether a tensor would be this parameter."""
    return path in self.tensors

  def rows(self, *path: str) -> int:
    """Rows of the matrix that would be this parameter."""
    tensor = self.tensors.get(path)
    if tensor is None:
      raise ValueError(
        f"{self.says.file.parent}: no tensor for parameter {'.'.join(path)}"
      )
    if len(tensor.shape) != 2:
      raise ValueError(
        f"{tensor.file}: tensor {tensor.name!r} has shape {tensor.shape}; a"
        " matrix is needed"
      )
    return tensor.shape[0]

  def prefer(self, found: Any, *names: str) -> None:
    """Warns where config.json says another thing than the tensors."""
    for where in (self.says.outer, self.says.keys.raw):
      for name in names:
        value = where.get(name)
        if value is not None and value != found:
          warnings.warn(
            f"{self.says.file}: {name} is {value!r}, but the tensors say"
            f" {found!r}; using the {found!r} of the tensors",
            stacklevel=5,
          )
          return

  def layer(self) -> dict[str, Any]:
    """The fields of a `LayerConfig` without vocabularies."""
    keys, file = self.says.keys, self.says.file
    hidden = self.rows("fc", "weight")
    self.prefer(1, "num_hidden_layers")
    self.prefer(hidden, "hidden_size")
    attention = "layer", "self_attn"
    queries = self.rows(*attention, "q_proj", "weight")
    shared = self.rows(*attention, "k_proj", "weight")
    heads = keys.integer("num_attention_heads")
    width = keys.integer("head_dim", queries // heads if heads > 0 else 0)
    if heads < 1 or width < 1 or heads * width != queries:
      raise ValueError(
        f"{file}: {heads} num_attention_heads of a head_dim of {width} make"
        f" {heads * width} rows, but q_proj.weight has {queries}"
      )
    if shared % width:
      raise ValueError(
        f"{file}: k_proj.weight has {shared} rows, which heads of a head_dim"
        f" of {width} do not make up"
      )
    self.prefer(shared // width, "num_key_value_heads")
    inner = self.rows("layer", "mlp", "gate_proj", "weight")
    self.prefer(inner, "intermediate_size")
    biased = any(
      self.has(*attention, name, "bias")
      for name in ("q_proj", "k_proj", "v_proj")
    )
    self.prefer(biased, "qkv_bias", "attention_bias")
    rope = _config_rope.parse(keys, _config_rope.Support())
    return {
      "depth": _DEPTH,
      "hidden_size": hidden,
      "intermediate_size": inner,
      "num_heads": heads,
      "num_kv_heads": shared // width,
      "head_dim": width,
      "qkv_bias": biased,
      "rope_theta": rope["rope_theta"],
      "rope_scaling": rope["rope_scaling"],
      "rms_norm_eps": keys.number("rms_norm_eps", 1e-6),
    }


def _token_ids(
  maps: Mapping[str, _rules.Tensor], size: int, vocab: int
) -> np.ndarray | None:
  """The target's id of each of `size` draft tokens; None for the same ids.

  `d2t` holds what is to be added to a draft's id, `t2d` which of the target's
  ids the draft has.
  """
  offsets, held = maps.get("d2t"), maps.get("t2d")
  if offsets is None and size != vocab:
    raise ValueError(
      f"lm_head.weight has {size} rows, the target {vocab} tokens, and there is"
      " no tensor 'd2t' that says which they are"
    )
  ids = np.arange(size, dtype=np.int64)
  for tensor, kind, shape in (
    (offsets, "i", (size,)),
    (held, "b", (vocab,)),
  ):
    if tensor is not None and (
      tensor.dtype.kind != kind or tensor.shape != shape
    ):
      raise ValueError(
        f"tensor {tensor.name!r} is {tensor.dtype.name} of shape"
        f" {tensor.shape};"
        f" {'integers' if kind == 'i' else 'truth values'} of shape {shape} are"
        " needed"
      )
  if offsets is not None:
    ids = ids + offsets.read().astype(np.int64)
    for place in (int(np.argmin(ids)), int(np.argmax(ids))):
      if not 0 <= ids[place] < vocab:
        raise ValueError(
          f"tensor 'd2t' gives entry {place} the id {ids[place]}; the target's"
          f" ids are 0 to {vocab - 1}"
        )
    unique, counts = np.unique(ids, return_counts=True)
    if len(unique) < size:
      raise ValueError(
        f"tensor 'd2t' gives the id {unique[np.argmax(counts)]} to more than"
        " one entry; each id has one place"
      )
  if held is not None:
    mask = held.read()
    wrong = np.flatnonzero(mask != np.isin(np.arange(vocab), ids))
    if len(wrong):
      raise ValueError(
        f"tensors 'd2t' and 't2d' disagree about {len(wrong)} tokens, the first"
        f" of them {wrong[0]}"
      )
  same = size == vocab and bool((ids == np.arange(size)).all())
  return None if same else ids.astype(np.int32)


def _check_layers(
  says: Says, config: models.Eagle3Config, num_layers: int
) -> None:
  """Refuses drafts of other target layers than EAGLE-3's."""
  layers = list(config.feature_layers(num_layers))
  key = "eagle_aux_hidden_state_layer_ids"
  inner = says.outer.get("eagle_config")
  # Within `eagle_config` a layer is named by its output, else by its input.
  found = [(says.outer.get(key), layers)]
  if isinstance(inner, dict):
    found.append((inner.get(key), [layer - 1 for layer in layers]))
  for value, wanted in found:
    if value and value != wanted:
      raise ValueError(
        f"{says.file}: {key} is {value!r}; only {wanted} are supported for a"
        f" target of {num_layers} layers"
      )


def build(
  third: bool,
  shapes: Shapes,
  maps: Mapping[str, _rules.Tensor],
  target: models.TransformerConfig,
) -> tuple[models.DraftConfig, np.ndarray | None]:
  """The draft's configuration, and the target's ids of its vocabulary.

  Args:
    third: whether it is EAGLE-3.
    shapes: of the float tensors.
    maps: the tensors "d2t" and "t2d", where there are any.
    target: of the model that is drafted for.

  Raises:
    ValueError: for what does not fit.
  """
  fields, vocab = shapes.layer(), target.vocab_size
  says = shapes.says
  if not third:
    biased = shapes.has("fc", "bias")
    shapes.prefer(biased, "bias", "fusion_bias")
    return models.EagleConfig(
      **fields,
      vocab_size=vocab,
      shared_output=not shapes.has("output", "weight"),
      normed=False,
      fc_bias=biased,
    ), None
  size = shapes.rows("output", "weight")
  shapes.prefer(size, "draft_vocab_size")
  if not 1 <= size <= vocab:
    raise ValueError(
      f"{says.file.parent}: the draft guesses {size} tokens, the target has"
      f" {vocab}; it was made for another model"
    )
  ids = _token_ids(maps, size, vocab)
  config = models.Eagle3Config(
    **fields,
    vocab_size=size,
    target_vocab_size=None if ids is None else vocab,
    norm_before_residual=_config_keys.Keys(says.outer, {}, says.file).flag(
      "norm_before_residual"
    ),
  )
  _check_layers(says, config, target.num_layers)
  return config, ids
