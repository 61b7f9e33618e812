"""From a config.json, of any style and supported family, to a configuration."""

import pathlib
from collections.abc import Container, Mapping
from typing import Any

from ldjax import models
from ldjax.checkpoints import _config_keys, _config_rope, _families
from ldjax.checkpoints._config_keys import Keys


def _nope_layers(keys: Keys, num_layers: int) -> tuple[int, ...]:
  # 1 stands for a layer with rotary embedding, 0 for one without.
  flags = keys.layers("no_rope_layers", num_layers)
  if flags is None:
    interval = keys.integer("no_rope_layer_interval", 4)
    if interval < 1:
      raise ValueError(
        f"{keys.file}: no_rope_layer_interval is {interval}; it must be at"
        " least 1"
      )
    return tuple(range(interval - 1, num_layers, interval))
  if any(value not in (0, 1) for value in flags):
    raise ValueError(
      f"{keys.file}: no_rope_layers is {flags!r:.80}; only 0 and 1 are known"
    )
  return tuple(layer for layer, rotates in enumerate(flags) if not rotates)


def _windows(
  keys: Keys,
  family: _families.Family,
  num_layers: int,
  nope_layers: tuple[int, ...],
) -> tuple[int | None, ...]:
  size = None
  if family.windows != "none" and (
    not family.switch or keys.flag("use_sliding_window")
  ):
    size = keys.get("sliding_window")
  if size is not None and (
    isinstance(size, bool) or not isinstance(size, int) or size < 1
  ):
    raise ValueError(
      f"{keys.file}: sliding_window is {size!r}; a number of positions, at"
      " least 1, or null is needed"
    )
  first = 0
  if size is not None and family.windows == "upper":
    first = keys.integer("max_window_layers", 28)
  concerned: Container[int] = range(num_layers)
  if family.windows == "nope":
    concerned = nope_layers
  elif family.windows == "pattern":
    every = keys.integer("sliding_window_pattern")
    if every < 1:
      raise ValueError(
        f"{keys.file}: sliding_window_pattern is {every}; it must be at least 1"
      )
    concerned = [i for i in range(num_layers) if (i + 1) % every]
  windowed = [
    size is not None and layer >= first and layer in concerned
    for layer in range(num_layers)
  ]
  kinds = keys.layers("layer_types", num_layers)
  if kinds is not None:
    for kind in kinds:
      if kind not in ("full_attention", "sliding_attention"):
        raise ValueError(
          f"{keys.file}: layer_types holds {kind!r}, which is not supported;"
          " 'full_attention' and 'sliding_attention' are"
        )
    named = [kind == "sliding_attention" for kind in kinds]
    if any(named) and size is None:
      raise ValueError(
        f"{keys.file}: layer_types holds 'sliding_attention', but there is no"
        " window: use_sliding_window is"
        f" {keys.get('use_sliding_window')!r} and sliding_window"
        f" {keys.get('sliding_window')!r}"
      )
    free = family.switch or family.windows == "pattern"
    if not free and named != windowed:
      raise ValueError(
        f"{keys.file}: layer_types differ from what a"
        f" {family.architecture} does (sliding_window {size}); layers of"
        " different kinds are not supported for it"
      )
    windowed = named
  return tuple(size if inside else None for inside in windowed)


def _refuse(raw: Mapping[str, Any], file: pathlib.Path) -> _families.Family:
  kind = raw.get("model_type")
  architectures = raw.get("architectures")
  family = _families.FAMILIES.get(kind) if isinstance(kind, str) else None
  if family is None:
    named = repr(kind) if kind is not None else "missing"
    raise ValueError(
      f"{file}: model_type is {named}; supported: "
      + ", ".join(map(repr, _families.FAMILIES))
      + f" (architectures: {architectures})"
    )
  # Early conversions spell it LLaMAForCausalLM.
  if architectures and family.architecture.lower() not in [
    str(name).lower() for name in architectures
  ]:
    raise ValueError(
      f"{file}: architectures is {architectures}; of model_type {kind!r} only"
      f" {family.architecture} is supported"
    )
  if raw.get("quantization_config") is not None:
    method = raw["quantization_config"]
    if isinstance(method, dict):
      method = method.get("quant_method", method)
    raise ValueError(
      f"{file}: quantization_config ({method}) is not supported; use the"
      " unquantised model, or a GGUF file"
    )
  for key, value in family.only.items():
    if raw.get(key) not in (None, value):
      raise ValueError(
        f"{file}: {key} is {raw[key]!r}, which is not supported; only {value!r}"
      )
  return family


def _activation(keys: Keys, family: _families.Family) -> str:
  for key, known in family.activations.items():
    name = keys.raw.get(key)
    if name is None:
      continue
    if name not in known:
      raise ValueError(
        f"{keys.file}: {key} {name!r} is not supported; only"
        f" {' and '.join(known)}"
      )
    return known[name]
  return family.fixed.get("activation", "silu")


def _gemma(keys: Keys, hidden: int) -> dict[str, Any]:
  """What a Gemma scales and caps; Gemma 1 knows neither scalar nor caps."""
  fields: dict[str, Any] = {"embed_scale": hidden**0.5}
  scalar = keys.number("query_pre_attn_scalar", 0.0)
  if "query_pre_attn_scalar" in keys.absent:
    if scalar <= 0:
      raise ValueError(
        f"{keys.file}: query_pre_attn_scalar is {scalar}; it must be above 0"
      )
    fields["query_scale"] = scalar**-0.5
    for field, key in (
      ("attn_soft_cap", "attn_logit_softcapping"),
      ("final_soft_cap", "final_logit_softcapping"),
    ):
      cap = keys.get(key)
      fields[field] = None if cap is None else keys.number(key, 0.0)
  return fields


def _language_model(
  raw: Mapping[str, Any], family: _families.Family, file: pathlib.Path
) -> Mapping[str, Any]:
  """The object that describes the language model: the file's own, or nested."""
  if not family.nested:
    return raw
  inner = raw.get(family.nested)
  if not isinstance(inner, dict):
    raise ValueError(
      f"{file}: {family.nested} is {inner!r:.60}; an object is needed"
    )
  expected = f"{raw['model_type']}_text"
  kind = inner.get("model_type", expected)
  if kind != expected:
    raise ValueError(
      f"{file}: {family.nested} has model_type {kind!r}; only {expected!r} is"
      " supported there"
    )
  _refuse({**inner, "model_type": expected, "architectures": None}, file)
  return inner


def parse_config(
  raw: Mapping[str, Any], file: pathlib.Path
) -> models.TransformerConfig:
  """A configuration from a config.json, or a refusal by name.

  Args:
    raw: the JSON object, of transformers 4 or 5.
    file: where it was, for messages.

  Returns:
    The configuration.

  Raises:
    ValueError: for what is missing, malformed or not supported.
  """
  family = _refuse(raw, file)
  inner = _language_model(raw, family, file)
  keys = Keys(inner, family.absent, file, family.names)
  hidden, heads = (
    keys.integer("hidden_size"),
    keys.integer("num_attention_heads"),
  )
  if keys.get("head_dim") is None and (heads < 1 or hidden % heads):
    raise ValueError(
      f"{file}: {keys.name('hidden_size')} {hidden} is not a multiple of"
      f" {keys.name('num_attention_heads')} {heads}, and head_dim is not given"
    )
  num_layers = _config_keys.check_layers(
    keys.integer("num_hidden_layers"), keys.name("num_hidden_layers"), file
  )
  nope_layers = (
    _nope_layers(keys, num_layers) if family.windows == "nope" else ()
  )
  fields: dict[str, Any] = {
    "max_position_embeddings": keys.integer("max_position_embeddings", 2048)
  }
  if not family.fixed.get("learned_positions"):
    fields |= _config_rope.parse(keys, family.rope)
  if family.gemma:
    fields |= _gemma(keys, hidden)
  windows = _windows(keys, family, num_layers, nope_layers)
  if fields.get("rope_local_theta") is None:
    # A window as long as the model's longest text hides nothing.
    longest = fields["max_position_embeddings"]
    windows = tuple(
      None if size is None or size >= longest else size for size in windows
    )
  fields |= {
    "qkv_bias": keys.flag("attention_bias"),
    "o_bias": keys.flag("attention_bias"),
    "mlp_bias": keys.flag("mlp_bias"),
    **family.fixed,
    "activation": _activation(keys, family),
  }
  wide = None if family.widening is None else family.widening * hidden
  try:
    return models.TransformerConfig(
      vocab_size=keys.integer("vocab_size"),
      hidden_size=hidden,
      intermediate_size=keys.integer("intermediate_size", wide),
      num_layers=num_layers,
      num_heads=heads,
      num_kv_heads=keys.integer("num_key_value_heads", heads),
      head_dim=keys.integer("head_dim", hidden // heads),
      rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
      tie_word_embeddings=keys.flag("tie_word_embeddings"),
      windows=windows,
      nope_layers=nope_layers,
      **fields,
    )
  except ValueError as error:
    raise ValueError(f"{file}: {error}") from error
