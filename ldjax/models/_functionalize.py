"""Modules outside, pure functions inside: the only split and merge."""

import functools
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from ldjax import _base
from ldjax.models import (
  _config,
  _eagle,
  _eagle3,
  _eagle_base,
  _heads,
  _hydra,
  _medusa,
  _recurrent,
  _transformer,
)

DraftConfig: TypeAlias = (
  _eagle.EagleConfig
  | _eagle3.Eagle3Config
  | _hydra.HydraConfig
  | _hydra.HydraMlpConfig
  | _medusa.MedusaConfig
  | _recurrent.RecurrentConfig
)
"""The shape of draft heads of any family."""

MODULES: dict[Any, Any] = {
  _eagle.EagleConfig: _eagle.EagleDraft,
  _eagle3.Eagle3Config: _eagle3.Eagle3Draft,
  _hydra.HydraConfig: _hydra.HydraHeads,
  _hydra.HydraMlpConfig: _hydra.HydraMlpHeads,
  _medusa.MedusaConfig: _medusa.MedusaHeads,
  _recurrent.RecurrentConfig: _recurrent.RecurrentDraft,
}


@functools.lru_cache(maxsize=256)
def _target_fn(graphdef: nnx.GraphDef) -> _base.TargetFn:
  def forward(params, tokens, positions, parents, view):
    return nnx.merge(graphdef, params)(tokens, positions, parents, view)

  def score(params, hidden):
    return nnx.merge(graphdef, params).score(hidden)

  def draw(params, *arguments):
    return nnx.merge(graphdef, params).draw(*arguments)

  return _base.TargetFn(forward, score, draw)


@functools.lru_cache(maxsize=256)
def _heads_fn(
  config: DraftConfig, dtype: Any, max_len: int | None
) -> _base.HeadsFn:
  module = MODULES[type(config)]
  graphdef, _ = _split(abstract_module(config, dtype))

  def init(params, batch):
    del params
    return module.empty(config, dtype, batch, max_len)

  def observe(params, state, observation):
    return nnx.merge(graphdef, params).observe(state, observation)

  def begin(params, state, pending):
    return nnx.merge(graphdef, params).begin(state, pending)

  def extend(params, state, carry, tokens, parents):
    return nnx.merge(graphdef, params).extend(state, carry, tokens, parents)

  def unroll(params, features, tokens):
    return nnx.merge(graphdef, params).unroll(features, tokens)

  def score(params, states):
    return nnx.merge(graphdef, params).score(states)

  return _base.HeadsFn(
    init=init,
    observe=observe,
    release=module.release,
    begin=begin,
    extend=extend,
    unroll=unroll,
    score=score,
    token_ids=lambda params: params.get("token_ids"),
    depth=config.depth,
    vocab_size=config.vocab_size,
    feature_size=config.feature_size,
    observes_all=module.observes_all,
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


def abstract_module(config: DraftConfig, dtype: Any) -> _heads.Heads:
  """Draft heads of shapes only."""
  module = MODULES[type(config)]
  return nnx.eval_shape(lambda: module(config, dtype=dtype, rngs=nnx.Rngs(0)))


def functionalize_draft(
  draft: DraftConfig | _heads.Heads,
  dtype: jax.typing.DTypeLike | None = None,
  *,
  max_len: int | None = None,
) -> tuple[_base.HeadsFn, Any]:
  """Splits draft heads into pure functions and a plain dict of parameters.

  Heads of one configuration, dtype and `max_len` give the same functions. The
  parameters include what is borrowed of the target: `borrow` puts its matrices
  there.

  Args:
    draft: heads, or a configuration for parameters of shapes only.
    dtype: of parameters, state and computation; default that of the heads, or
      float32.
    max_len: the most positions of a row in the cache of an `EagleDraft` or
      `Eagle3Draft`; the others need none.

  Returns:
    `HeadsFn` and the parameters, nested dicts keyed as the module's
    attributes.

  Raises:
    ValueError: for a dtype that is not the heads' own, or a draft with a cache
      without `max_len`.

  Example:
    >>> import ldjax
    >>> config = ldjax.models.MedusaConfig(
    ...   num_heads=2, num_layers=1, hidden_size=8, vocab_size=11)
    >>> fn, shapes = functionalize_draft(config)
    >>> fn.depth, shapes["heads"][0]["lm_head"]["weight"].shape
    (2, (11, 8))
  """
  if isinstance(draft, _heads.Heads):
    config, own = draft.config, draft.dtype
    if dtype is not None and jnp.dtype(dtype) != own:
      raise ValueError(
        f"dtype is {jnp.dtype(dtype).name}, but the heads were made in"
        f" {own.name}; leave it out"
      )
    module = draft
  else:
    config, own = draft, jnp.dtype(jnp.float32 if dtype is None else dtype)
    module = abstract_module(config, own)
  if not isinstance(config, _eagle_base.LayerConfig):
    max_len = None
  elif max_len is None or max_len < 1:
    raise ValueError(
      f"max_len is {max_len}; an {MODULES[type(config)].__name__} has a cache"
      " of its own, so give the most positions of a row, at least 1"
    )
  return _heads_fn(config, own, max_len), _split(module)[1]


def feature_layers(config: DraftConfig, num_layers: int) -> tuple[int, ...]:
  """The target layers whose inputs a draft reads, for `abstract_model`.

  Args:
    config: of the draft.
    num_layers: L, of the target.

  Returns:
    Numbers of layers; () for the final normed state.

  Raises:
    ValueError: for a target that has too few layers for the draft.

  Example:
    >>> import ldjax
    >>> config = ldjax.models.MedusaConfig(
    ...   num_heads=2, num_layers=1, hidden_size=8, vocab_size=11)
    >>> feature_layers(config, 32)
    ()
  """
  if isinstance(config, _eagle3.Eagle3Config):
    return config.feature_layers(num_layers)
  return ()


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
