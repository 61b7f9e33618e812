"""The rotary embedding that a config.json describes."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ldjax import models
from ldjax.checkpoints._config_keys import Keys

_FULL, _SLIDING = "full_attention", "sliding_attention"
_LONG_KEYS = {
  "rope_type",
  "type",
  "rope_theta",
  "factor",
  "short_factor",
  "long_factor",
  "attention_factor",
  "original_max_position_embeddings",
  "partial_rotary_factor",
}


class Support(NamedTuple):
  """What is supported of a family's rotary embedding.

  Args:
    kinds: of scaling, as the file names them.
    local: whether layers with a window have a base of their own.
  """

  kinds: tuple[str, ...] = ("default", "llama3")
  local: bool = False


def _number(
  settings: Mapping[str, Any], kind: str, key: str, keys: Keys
) -> int | float:
  value = settings.get(key)
  if isinstance(value, bool) or not isinstance(value, int | float):
    raise ValueError(
      f"{keys.file}: rope_type {kind!r} needs a number for {key!r}, found"
      f" {value!r}"
    )
  return value


def _kind(settings: Mapping[str, Any]) -> Any:
  return settings.get("rope_type", settings.get("type", "default"))


def _settings(keys: Keys, local: bool) -> tuple[dict[str, Any], Any]:
  """Those of layers that see everything, and the base of the others."""
  # transformers 5 moved the base into `rope_parameters`; 4 has `rope_theta`
  # beside `rope_scaling`, whose kind is `rope_type` or, older, `type`.
  file = keys.file
  settings = keys.get("rope_parameters") or keys.get("rope_scaling") or {}
  if not isinstance(settings, dict):
    raise ValueError(f"{file}: rope settings are {settings!r}, not an object")
  base = keys.get("rope_local_base_freq") if local else None
  if not any(isinstance(value, dict) for value in settings.values()):
    return settings, base
  if not local:
    raise ValueError(
      f"{file}: rope_parameters differ by layer type ({', '.join(settings)});"
      " one set for all layers is supported"
    )
  full, near = settings.get(_FULL), settings.get(_SLIDING)
  if not isinstance(full, dict) or not isinstance(near, dict):
    raise ValueError(
      f"{file}: rope_parameters has {', '.join(settings)}; an object for each"
      f" of {_FULL} and {_SLIDING} is needed"
    )
  if _kind(near) != "default":
    raise ValueError(
      f"{file}: rope_type {_kind(near)!r} of {_SLIDING} is not supported; only"
      " 'default'"
    )
  return full, near.get("rope_theta", base)


def _llama3(settings: Mapping[str, Any], keys: Keys) -> models.RopeScaling:
  def number(key):
    return _number(settings, "llama3", key, keys)

  return models.RopeScaling(
    factor=float(number("factor")),
    low_freq_factor=float(number("low_freq_factor")),
    high_freq_factor=float(number("high_freq_factor")),
    original_max_position_embeddings=int(
      number("original_max_position_embeddings")
    ),
  )


def _longrope(
  settings: Mapping[str, Any], kind: str, keys: Keys
) -> dict[str, Any]:
  """Phi-3's two sets of divisors, of which the short one is kept.

  The long set counts from the first text of more than
  `original_max_position_embeddings` tokens on, and would turn the keys that
  are cached already: the model is read as one of that context.
  """
  file = keys.file
  unknown = sorted(set(settings) - _LONG_KEYS)
  if unknown:
    raise ValueError(
      f"{file}: rope_type {kind!r} with {', '.join(unknown)} is not supported"
    )
  short = settings.get("short_factor")
  if not isinstance(short, list) or not all(
    isinstance(value, int | float) and not isinstance(value, bool)
    for value in short
  ):
    raise ValueError(
      f"{file}: rope_type {kind!r} needs a list of numbers for 'short_factor',"
      f" found {short!r:.60}"
    )
  longest = keys.integer("max_position_embeddings")
  original = settings.get("original_max_position_embeddings")
  if original is None:
    original = keys.integer("original_max_position_embeddings")
  ratio = longest / original
  if settings.get("factor") not in (None, ratio):
    raise ValueError(
      f"{file}: rope_type {kind!r} has factor {settings['factor']}, but"
      f" max_position_embeddings {longest} is {ratio:g} times the original"
      f" {original}; only that is supported"
    )
  if settings.get("attention_factor") is not None:
    attention = float(_number(settings, kind, "attention_factor", keys))
  elif ratio <= 1:
    attention = 1.0
  else:
    attention = math.sqrt(1 + math.log(ratio) / math.log(original))
  return {
    "rope_scaling": models.RopeFactors(
      factors=tuple(map(float, short)), attention_factor=attention
    ),
    "max_position_embeddings": min(longest, int(original)),
  }


def parse(keys: Keys, support: Support) -> dict[str, Any]:
  """Fields of the configuration about rotary embedding.

  Args:
    keys: of the file.
    support: what the family may have.

  Returns:
    `rope_theta`, `rope_scaling` and `rope_local_theta`; with `longrope` also
    `max_position_embeddings`.

  Raises:
    ValueError: for what is malformed or not supported.
  """
  file = keys.file
  settings, local = _settings(keys, support.local)
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
  fields: dict[str, Any] = {"rope_theta": theta, "rope_scaling": None}
  if support.local:
    given = Keys({"rope_local_base_freq": local}, {}, file)
    fields["rope_local_theta"] = given.number("rope_local_base_freq", 10000.0)
  kind = _kind(settings)
  if kind not in support.kinds:
    *others, last = map(repr, support.kinds)
    raise ValueError(
      f"{file}: rope_type {kind!r} is not supported; {', '.join(others)} and"
      f" {last} are"
    )
  match kind:
    case "llama3":
      fields["rope_scaling"] = _llama3(settings, keys)
    case "linear":
      factor = float(_number(settings, kind, "factor", keys))
      fields["rope_scaling"] = models.LinearRopeScaling(factor=factor)
    case "longrope" | "su":
      fields |= _longrope(settings, kind, keys)
  return fields
