"""From a config.json, of any style and supported family, to a configuration."""

import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from ldjax import models


class _Family(NamedTuple):
  """What a model_type stands for where its config.json is silent.

  Args:
    architecture: the only class whose weights are read.
    fixed: fields of the configuration that no key of the file changes.
    absent: what transformers takes for a key that is missing.
    windows: which layers a sliding window concerns: "none", "all", "upper"
      (from `max_window_layers` on) or "nope" (those without rotary embedding).
    switch: whether the window needs `use_sliding_window`, and `layer_types` may
      name the layers.
  """

  architecture: str
  fixed: Mapping[str, Any] = {}
  absent: Mapping[str, Any] = {}
  windows: str = "none"
  switch: bool = False


_FAMILIES = {
  "llama": _Family("LlamaForCausalLM"),
  "mistral": _Family(
    "MistralForCausalLM",
    fixed={"qkv_bias": False, "o_bias": False, "mlp_bias": False},
    absent={
      "num_key_value_heads": 8,
      "max_position_embeddings": 131072,
      "sliding_window": 4096,
    },
    windows="all",
  ),
  "qwen2": _Family(
    "Qwen2ForCausalLM",
    fixed={"qkv_bias": True, "o_bias": False, "mlp_bias": False},
    absent={
      "num_key_value_heads": 32,
      "max_position_embeddings": 32768,
      "sliding_window": 4096,
    },
    windows="upper",
    switch=True,
  ),
  "qwen3": _Family(
    "Qwen3ForCausalLM",
    fixed={"mlp_bias": False, "qk_norm": True},
    absent={
      "head_dim": 128,
      "num_key_value_heads": 32,
      "max_position_embeddings": 32768,
      "sliding_window": 4096,
    },
    windows="upper",
    switch=True,
  ),
  "smollm3": _Family(
    "SmolLM3ForCausalLM",
    absent={
      "num_key_value_heads": 4,
      "max_position_embeddings": 32768,
      "rope_theta": 2000000.0,
      "tie_word_embeddings": True,
    },
    windows="nope",
    switch=True,
  ),
}


class Keys:
  """Typed access to a config.json, with errors that name file and key."""

  def __init__(
    self, raw: Mapping[str, Any], absent: Mapping[str, Any], file: pathlib.Path
  ):
    self.raw = raw
    self.absent = absent
    self.file = file

  def get(self, key: str, default: Any = None) -> Any:
    """The value of a key; the family's for a missing one, None for a null."""
    return self.raw[key] if key in self.raw else self.absent.get(key, default)

  def integer(self, key: str, default: int | None = None) -> int:
    value = self.get(key, default)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int):
      found = "missing" if value is None else repr(value)
      raise ValueError(f"{self.file}: {key} is {found}; an integer is needed")
    return value

  def number(self, key: str, default: float) -> float:
    value = self.get(key, default)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float):
      raise ValueError(f"{self.file}: {key} is {value!r}, not a number")
    return float(value)

  def flag(self, key: str) -> bool:
    value = self.get(key)
    if value is not None and not isinstance(value, bool):
      raise ValueError(
        f"{self.file}: {key} is {value!r}; true or false is needed"
      )
    return bool(value)

  def layers(self, key: str, num_layers: int) -> list[Any] | None:
    """A list with an entry for each layer, or None."""
    value = self.get(key)
    if value is None:
      return None
    if not isinstance(value, list) or len(value) < num_layers:
      raise ValueError(
        f"{self.file}: {key} is {value!r:.80}; a list with an entry for each of"
        f" the {num_layers} layers is needed"
      )
    return value[:num_layers]


def rope(keys: Keys) -> tuple[float, models.RopeScaling | None]:
  """Base of the rotary frequencies and their stretch, of a config.json.

  Raises:
    ValueError: for what is malformed or not supported, by name.
  """
  # transformers 5 moved the base into `rope_parameters`; 4 has `rope_theta`
  # beside `rope_scaling`, whose kind is `rope_type` or, older, `type`.
  file = keys.file
  settings = keys.get("rope_parameters") or keys.get("rope_scaling") or {}
  if not isinstance(settings, dict):
    raise ValueError(f"{file}: rope settings are {settings!r}, not an object")
  if any(isinstance(value, dict) for value in settings.values()):
    raise ValueError(
      f"{file}: rope_parameters differ by layer type ({', '.join(settings)});"
      " one set for all layers is supported"
    )
  inner = Keys(settings, {}, file)
  theta = inner.number("rope_theta", keys.number("rope_theta", 10000.0))
  partial = inner.get(
    "partial_rotary_factor", keys.get("partial_rotary_factor")
  )
  if partial not in (None, 1, 1.0):
    raise ValueError(
      f"{file}: partial_rotary_factor {partial} is not supported; only 1"
    )
  if keys.get("rope_interleaved"):
    raise ValueError(f"{file}: rope_interleaved true is not supported")
  kind = settings.get("rope_type", settings.get("type", "default"))
  if kind == "default":
    return theta, None
  if kind != "llama3":
    raise ValueError(
      f"{file}: rope_type {kind!r} is not supported; 'default' and 'llama3' are"
    )
  values = {}
  for key in (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
  ):
    value = settings.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
      raise ValueError(
        f"{file}: rope_type 'llama3' needs a number for {key!r}, found"
        f" {value!r}"
      )
    values[key] = value
  return theta, models.RopeScaling(
    factor=float(values["factor"]),
    low_freq_factor=float(values["low_freq_factor"]),
    high_freq_factor=float(values["high_freq_factor"]),
    original_max_position_embeddings=int(
      values["original_max_position_embeddings"]
    ),
  )


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
  family: _Family,
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
  concerned = nope_layers if family.windows == "nope" else range(num_layers)
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
    if not family.switch and named != windowed:
      raise ValueError(
        f"{keys.file}: layer_types differ from what a"
        f" {family.architecture} does (sliding_window {size}); layers of"
        " different kinds are not supported for it"
      )
    windowed = named
  return tuple(size if inside else None for inside in windowed)


def _refuse(raw: Mapping[str, Any], file: pathlib.Path) -> _Family:
  kind = raw.get("model_type")
  architectures = raw.get("architectures")
  family = _FAMILIES.get(kind) if isinstance(kind, str) else None
  if family is None:
    named = repr(kind) if kind is not None else "missing"
    raise ValueError(
      f"{file}: model_type is {named}; supported: "
      + ", ".join(map(repr, _FAMILIES))
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
  act = raw.get("hidden_act", "silu")
  if act not in ("silu", "swish"):
    raise ValueError(f"{file}: hidden_act {act!r} is not supported; only silu")
  return family


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
  keys = Keys(raw, family.absent, file)
  hidden, heads = (
    keys.integer("hidden_size"),
    keys.integer("num_attention_heads"),
  )
  if keys.get("head_dim") is None and (heads < 1 or hidden % heads):
    raise ValueError(
      f"{file}: hidden_size {hidden} is not a multiple of num_attention_heads"
      f" {heads}, and head_dim is not given"
    )
  theta, scaling = rope(keys)
  num_layers = keys.integer("num_hidden_layers")
  nope_layers = (
    _nope_layers(keys, num_layers) if family.windows == "nope" else ()
  )
  longest = keys.integer("max_position_embeddings", 2048)
  windows = _windows(keys, family, num_layers, nope_layers)
  fields = {
    "qkv_bias": keys.flag("attention_bias"),
    "o_bias": keys.flag("attention_bias"),
    "mlp_bias": keys.flag("mlp_bias"),
    **family.fixed,
  }
  try:
    return models.TransformerConfig(
      vocab_size=keys.integer("vocab_size"),
      hidden_size=hidden,
      intermediate_size=keys.integer("intermediate_size"),
      num_layers=num_layers,
      num_heads=heads,
      num_kv_heads=keys.integer("num_key_value_heads", heads),
      head_dim=keys.integer("head_dim", hidden // heads),
      max_position_embeddings=longest,
      rope_theta=theta,
      rope_scaling=scaling,
      rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
      tie_word_embeddings=keys.flag("tie_word_embeddings"),
      # A window as long as the model's longest text hides nothing.
      windows=tuple(
        None if size is None or size >= longest else size for size in windows
      ),
      nope_layers=nope_layers,
      **fields,
    )
  except ValueError as error:
    raise ValueError(f"{file}: {error}") from error
