"""Modules outside, pure functions inside: the only split and merge."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ldjax import _base, typing
from ldjax.models import _config, _medusa, _transformer

Array = typing.Array


class HeadsFn(NamedTuple):
  """Draft heads as a pure function.

  `apply(params, feature[B, X])` returns logits [B, C, V] float32.
  """

  apply: Callable[[Any, Array], Array]
  num_heads: int
  """C."""
  vocab_size: int
  """V."""
  feature_size: int
  """X."""
  dtype: Any
  """Of the features."""


@functools.lru_cache(maxsize=256)
def _target_fn(graphdef: nnx.GraphDef) -> _base.TargetFn:
  def forward(params, tokens, positions, parents, view):
    return nnx.merge(graphdef, params)(tokens, positions, parents, view)

  def score(params, hidden):
    return nnx.merge(graphdef, params).score(hidden)

  return _base.TargetFn(forward, score)


@functools.lru_cache(maxsize=256)
def _heads_fn(
  graphdef: nnx.GraphDef, config: _medusa.MedusaConfig, dtype: Any
) -> HeadsFn:
  def apply(params, feature):
    return nnx.merge(graphdef, params)(feature)

  return HeadsFn(
    apply, config.num_heads, config.vocab_size, config.hidden_size, dtype
  )


def _split(module: nnx.Module) -> tuple[nnx.GraphDef, Any]:
  graphdef, state = nnx.split(module)
  return graphdef, nnx.to_pure_dict(state)


def functionalize(
  model: _transformer.Transformer,
) -> tuple[_base.TargetFn, Any]:
  """Splits a model into pure functions and a plain dict of parameters.

  Two models of one configuration give the same functions, so whatever was
  compiled for one serves the other.

  Args:
    model: a `Transformer`, real or abstract (`nnx.eval_shape`).

  Returns:
    `TargetFn` and the parameters, nested dicts keyed as the module's
    attributes, layers by int.

  Example:
    >>> from flax import nnx
    >>> import ldjax
    >>> config = ldjax.models.TransformerConfig(
    ...   vocab_size=31, hidden_size=24, intermediate_size=40, num_layers=2,
    ...   num_heads=3, num_kv_heads=1, head_dim=8, max_position_embeddings=64)
    >>> make = lambda seed: ldjax.models.Transformer(
    ...   config, rngs=nnx.Rngs(seed))
    >>> functionalize(make(0))[0] is functionalize(make(1))[0]
    True
  """
  graphdef, params = _split(model)
  return _target_fn(graphdef), params


def functionalize_heads(heads: _medusa.MedusaHeads) -> tuple[HeadsFn, Any]:
  """Splits Medusa heads as `functionalize` splits a target.

  Example:
    >>> from flax import nnx
    >>> import ldjax
    >>> config = ldjax.models.MedusaConfig(
    ...   num_heads=2, num_layers=1, hidden_size=8, vocab_size=11)
    >>> fn, params = functionalize_heads(
    ...   ldjax.models.MedusaHeads(config, rngs=nnx.Rngs(0)))
    >>> fn.num_heads, sorted(params["heads"][0])
    (2, ['blocks', 'lm_head'])
  """
  graphdef, params = _split(heads)
  dtype = jax.tree.leaves(params)[0].dtype
  return _heads_fn(graphdef, heads.config, dtype), params


def abstract_model(
  config: _config.TransformerConfig,
  dtype: jax.typing.DTypeLike = jnp.float32,
  feature_layers: tuple[int, ...] = (),
) -> _transformer.Transformer:
  """A model of shapes only, for `functionalize` of loaded parameters.

  Args:
    config: its shape.
    dtype: of its parameters.
    feature_layers: see `Transformer`.
  """
  return nnx.eval_shape(
    lambda: _transformer.Transformer(
      config, dtype=dtype, feature_layers=feature_layers, rngs=nnx.Rngs(0)
    )
  )


def abstract_heads(
  config: _medusa.MedusaConfig, dtype: jax.typing.DTypeLike = jnp.float32
) -> _medusa.MedusaHeads:
  """Heads of shapes only, for `functionalize_heads` of loaded parameters.

  Args:
    config: their shape.
    dtype: of their parameters.
  """
  return nnx.eval_shape(
    lambda: _medusa.MedusaHeads(config, dtype=dtype, rngs=nnx.Rngs(0))
  )


def abstract_params(
  config: _config.TransformerConfig,
  dtype: jax.typing.DTypeLike = jnp.float32,
) -> Any:
  """Shapes and dtypes of a model's parameters, without allocating any.

  Args:
    config: the model's shape.
    dtype: of the parameters.

  Returns:
    Nested dicts of `jax.ShapeDtypeStruct`.

  Example:
    >>> import ldjax
    >>> config = ldjax.models.TransformerConfig(
    ...   vocab_size=31, hidden_size=24, intermediate_size=40, num_layers=2,
    ...   num_heads=3, num_kv_heads=1, head_dim=8, max_position_embeddings=64)
    >>> abstract_params(config)["norm"]["weight"].shape
    (24,)
  """
  return functionalize(abstract_model(config, dtype))[1]
