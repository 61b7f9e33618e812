"""The weight matrices of a target by name, and others in their place."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ldjax import models

HEAD = "lm_head"
"""The group of the output matrix."""


def groups(config: models.TransformerConfig) -> list[str]:
  """The parts of a model that are chosen together, by name.

  Args:
    config: of the model.

  Example:
    >>> import ldjax
    >>> groups(ldjax.testing.tiny_model().config)[:2]
    ['layers.0.self_attn', 'layers.0.mlp']
  """
  halves = ("self_attn", "mlp")
  layers = [f"layers.{i}.{h}" for i in range(config.num_layers) for h in halves]
  return [*layers, HEAD]


def group_of(name: str) -> str:
  """The group of a matrix.

  Args:
    name: in full, see `matrices`.

  Example:
    >>> group_of("layers.0.mlp.up_proj"), group_of("lm_head")
    ('layers.0.mlp', 'lm_head')
  """
  return name if name == HEAD else name.rpartition(".")[0]


def matrices(params: Any, group: str) -> dict[str, Any]:
  """The weights of a group by full name, such as `layers.0.mlp.up_proj`.

  Args:
    params: of a target.
    group: see `groups`.
  """
  if group == HEAD:
    matrix = params.get(HEAD, params["embed_tokens"])
    return {HEAD: matrix["weight"]}
  _, number, half = group.split(".")
  inner = params["layers"][int(number)][half]
  return {
    f"{group}.{name}": part["weight"]
    for name, part in inner.items()
    if name.endswith("_proj")
  }


def with_weights(
  config: models.TransformerConfig, params: Any, weights: Mapping[str, Any]
) -> tuple[models.TransformerConfig, Any]:
  """Parameters with some weights in the place of others.

  An output matrix that was the embedding's becomes one of its own.

  Args:
    config: of the target.
    params: of it.
    weights: by full name, see `matrices`.

  Raises:
    ValueError: for a name that the model has not.
  """
  layers = dict(params["layers"])
  changed = {**params, "layers": layers}
  for name, weight in weights.items():
    if name == HEAD:
      changed[HEAD] = {"weight": weight}
      config = dataclasses.replace(config, tie_word_embeddings=False)
      continue
    group = group_of(name)
    if group not in groups(config) or name not in matrices(params, group):
      raise ValueError(
        f"the model has no matrix {name!r}; there are, for example,"
        f" {', '.join(matrices(params, groups(config)[0]))}"
      )
    _, number, half = group.split(".")
    last = name.rpartition(".")[2]
    layer = dict(layers[int(number)])
    layer[half] = {**layer[half], last: {**layer[half][last], "weight": weight}}
    layers[int(number)] = layer
  return config, changed


def narrowed(
  config: models.TransformerConfig, params: Any, choice: Mapping[str, str]
) -> tuple[models.TransformerConfig, Any]:
  """Parameters with the matrices of a choice in fewer bits.

  Args:
    config: of the target.
    params: of it.
    choice: precision by full name of a matrix, see `models.narrow`.

  Raises:
    ValueError: for a matrix or precision that is not known.

  Example:
    >>> import ldjax
    >>> tiny = ldjax.testing.tiny_model()
    >>> _, params = narrowed(
    ...   tiny.config, tiny.params, {"layers.1.mlp.up_proj": "bfloat16"})
    >>> params["layers"][1]["mlp"]["up_proj"]["weight"].dtype.name
    'bfloat16'
  """
  found: dict[str, Any] = {}
  for name, precision in choice.items():
    group = group_of(name)
    known = matrices(params, group) if group in groups(config) else {}
    if name not in known:
      raise ValueError(f"the model has no matrix {name!r}")
    found[name] = models.narrow(known[name], precision)
  return with_weights(config, params, found)
