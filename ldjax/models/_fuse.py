"""Parameters held in fewer, larger matrices: the same function, other sums."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ldjax import typing
from ldjax.models import _config

Array = typing.Array


def possible_fusions(config: _config.TransformerConfig) -> tuple[str, ...]:
  """What `fuse` can do to a model of this shape, and is not done yet.

  Args:
    config: of the model.

  Example:
    >>> import ldjax
    >>> possible_fusions(ldjax.testing.tiny_model().config)
    ('qkv', 'gate_up', 'norms')
  """
  fits = {
    "qkv": True,
    "gate_up": config.mlp_gate,
    "norms": config.norm == "rms",
  }
  return tuple(
    part for part in _config.FUSIONS if fits[part] and part not in config.fused
  )


def _joined(linears: Sequence[dict[str, Array]]) -> dict[str, Array]:
  return {
    name: jnp.concatenate([each[name] for each in linears])
    for name in linears[0]
  }


def _scaled(
  linear: dict[str, Array], norm: dict[str, Array], offset: float | None
) -> dict[str, Array]:
  """A product that does what it did behind the norm's weight."""
  weight = linear["weight"]
  scale = norm["weight"].astype(jnp.float32) + (offset or 0.0)
  wide = weight.astype(jnp.float32) * scale[None, :]
  return {**linear, "weight": wide.astype(weight.dtype)}


def _fused_layer(
  layer: dict[str, Any], config: _config.TransformerConfig, parts: Sequence[str]
) -> dict[str, Any]:
  done = {*config.fused, *parts}
  sides = (
    ("qkv", "self_attn", "input_layernorm", ("q_proj", "k_proj", "v_proj")),
    ("gate_up", "mlp", "post_attention_layernorm", ("gate_proj", "up_proj")),
  )
  layer = dict(layer)
  for part, name, norm, separate in sides:
    inner = dict(layer[name])
    joined = f"{part}_proj"
    if part in parts:
      inner[joined] = _joined([inner.pop(each) for each in separate])
    if "norms" in parts:
      targets = (
        [joined] if part in done else [s for s in separate if s in inner]
      )
      for each in targets:
        inner[each] = _scaled(inner[each], layer[norm], config.norm_offset)
      del layer[norm]
    layer[name] = inner
  return layer


def fuse(
  config: _config.TransformerConfig,
  params: Any,
  parts: Sequence[str] | None = None,
) -> tuple[_config.TransformerConfig, Any]:
  """Puts projections side by side and norms' weights into them.

  Fewer products for a step to start, each larger. Sums are taken in another
  order where a norm's weight is folded in, so logits differ in the last bits;
  decoding with any tree still gives one text.

  Args:
    config: of the model.
    params: its parameters, as `functionalize` gives them.
    parts: of "qkv", "gate_up" and "norms", see `TransformerConfig.fused`; None
      for all that are possible.

  Returns:
    The configuration of the fused model and its parameters, which share what
    did not change.

  Raises:
    ValueError: for parts that are unknown, done already, or that the model
      has not.

  Example:
    >>> import ldjax
    >>> tiny = ldjax.testing.tiny_model()
    >>> config, params = fuse(tiny.config, tiny.params, ["qkv"])
    >>> config.fused, sorted(params["layers"][0]["self_attn"])
    (('qkv',), ['o_proj', 'qkv_proj'])
  """
  can = possible_fusions(config)
  parts = can if parts is None else tuple(dict.fromkeys(parts))
  for part in parts:
    if part not in can:
      raise ValueError(
        f"part {part!r} can't be fused in this model; what can be is"
        f" {', '.join(map(repr, can)) or 'nothing (more)'}"
      )
  fused = tuple(
    each for each in _config.FUSIONS if each in (*config.fused, *parts)
  )
  layers = params["layers"]
  if parts:
    fuse_one = jax.jit(lambda layer: _fused_layer(layer, config, parts))
    layers = {number: fuse_one(layer) for number, layer in layers.items()}
  return dataclasses.replace(config, fused=fused), {**params, "layers": layers}
