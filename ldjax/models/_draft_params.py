"""Parameters of drafts: fresh ones, borrowed ones, what training changes."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ldjax import typing
from ldjax.models import _eagle, _functionalize, _heads, _medusa

Array = typing.Array
DraftConfig = _functionalize.DraftConfig

_ENDS = ("down_proj", "o_proj", "project", "up")
"""Layers at the end of a residual branch or of an output."""


def _select(params: Any, like: Any, path: str = "") -> Any:
  if not isinstance(like, Mapping):
    return params
  for key in like:
    if key not in params:
      raise ValueError(f"params lack {path}{key}, which the configuration has")
  return {key: _select(params[key], like[key], f"{path}{key}.") for key in like}


def _without(params: Any, like: Any) -> Any:
  if not isinstance(params, Mapping):
    return params
  rest = {}
  for key, value in params.items():
    if key not in like:
      rest[key] = value
    elif isinstance(value, Mapping) and (inner := _without(value, like[key])):
      rest[key] = inner
  return rest


@functools.lru_cache(maxsize=64)
def _kinds(config: DraftConfig, dtype: Any) -> tuple[Any, Any, Any]:
  """Shapes of what is trained, of the map of ids, and of what is borrowed."""
  module = _functionalize.abstract_module(config, dtype)
  _, *states = nnx.split(module, nnx.Param, _heads.TokenIds, _heads.Borrowed)
  trained, token_ids, borrowed = map(nnx.to_pure_dict, states)
  return trained, token_ids, borrowed


def abstract_draft(
  config: DraftConfig, dtype: jax.typing.DTypeLike = jnp.float32
) -> Any:
  """Shapes of the parameters that are a draft's own.

  Args:
    config: its shape.
    dtype: of its weights.

  Returns:
    Nested dicts of `jax.ShapeDtypeStruct`: what training changes, and
    "token_ids" [W] int32 where the vocabulary is a part of the target's.

  Example:
    >>> import ldjax
    >>> config = ldjax.models.MedusaConfig(
    ...   num_heads=1, num_layers=0, hidden_size=8, vocab_size=11,
    ...   target_vocab_size=31)
    >>> sorted(abstract_draft(config))
    ['heads', 'token_ids']
  """
  trained, token_ids, _ = _kinds(config, jnp.dtype(dtype))
  return {**trained, **token_ids}


def partition_draft(config: DraftConfig, params: Any) -> tuple[Any, Any]:
  """Parts what training changes from what it must not change.

  Args:
    config: of the draft.
    params: nested dicts, with or without what is borrowed.

  Returns:
    The trained parameters, and the rest: the map of ids and what is borrowed.
    `combine_draft` puts them together again.

  Raises:
    ValueError: naming a trained parameter that is missing.

  Example:
    >>> import jax, numpy as np, ldjax
    >>> config = ldjax.models.MedusaConfig(
    ...   num_heads=1, num_layers=0, hidden_size=8, vocab_size=2,
    ...   target_vocab_size=31)
    >>> params = ldjax.models.init_draft(
    ...   config, jax.random.key(0), token_ids=np.array([5, 7]))
    >>> trained, frozen = partition_draft(config, params)
    >>> sorted(trained), sorted(frozen)
    (['heads'], ['token_ids'])
  """
  trained, _, _ = _kinds(config, jnp.dtype(jnp.float32))
  return _select(params, trained), _without(params, trained)


def combine_draft(trained: Any, frozen: Any) -> Any:
  """Puts together what `partition_draft` parted.

  Args:
    trained: nested dicts.
    frozen: nested dicts with other leaves.

  Example:
    >>> combine_draft({"output": {"project": 1}}, {"output": {"weight": 2}})
    {'output': {'project': 1, 'weight': 2}}
  """
  both = dict(trained)
  for key, value in frozen.items():
    both[key] = combine_draft(both[key], value) if key in both else value
  return both


def check_token_ids(config: DraftConfig, token_ids: Any) -> np.ndarray:
  """The map of a trimmed vocabulary as int32, if it is one.

  Args:
    config: of the draft, with `target_vocab_size`.
    token_ids: [W] integers in any order.

  Raises:
    ValueError: for another length, an id twice, or one that the target lacks.
  """
  ids = np.asarray(token_ids)
  if ids.shape != (config.vocab_size,) or ids.dtype.kind not in "iu":
    raise ValueError(
      f"token_ids is {ids.dtype.name} of shape {ids.shape}; vocab_size asks"
      f" for {config.vocab_size} integers"
    )
  whole = _heads.embed_rows(config)
  for wrong in (ids.min(), ids.max()):
    if not 0 <= wrong < whole:
      raise ValueError(
        f"token_ids holds {wrong}; the target's ids are 0 to {whole - 1}"
      )
  unique, counts = np.unique(ids, return_counts=True)
  if len(unique) < len(ids):
    raise ValueError(
      f"token_ids holds {unique[np.argmax(counts)]} more than once; each id"
      " has one place"
    )
  return ids.astype(np.int32)


def output_rows(
  config: DraftConfig, target_params: Any, token_ids: Any
) -> Array:
  """The target's output matrix, rows of a draft's vocabulary: [W, E].

  Args:
    config: of the draft.
    target_params: the target's parameters.
    token_ids: [W] int32; of no matter where the draft guesses all tokens.
  """
  matrix = target_params.get("lm_head", target_params["embed_tokens"])["weight"]
  return matrix if config.target_vocab_size is None else matrix[token_ids]


def _check_target(config: DraftConfig, target_params: Any) -> None:
  shape = tuple(target_params["embed_tokens"]["weight"].shape)
  wanted = (_heads.embed_rows(config), _heads.target_width(config))
  if shape != wanted:
    raise ValueError(
      f"the target's embedding is {shape}, but the draft was made for one of"
      f" {wanted} (vocabulary, width); it belongs to another model"
    )


def borrow(config: DraftConfig, params: Any, target_params: Any) -> Any:
  """Adds the target's matrices that a draft works with to its own parameters.

  The embedding (for all but Medusa heads) and a whole output matrix are the
  target's own buffers; of a trimmed vocabulary the rows are copied. They are
  the bare matrices: a target's `embed_scale` and `final_soft_cap` are no part
  of a draft, which is trained with what it borrows.

  Args:
    config: of the draft.
    params: its own parameters, nested dicts.
    target_params: of a `Transformer`, nested dicts.

  Returns:
    Parameters for the functions of `functionalize_draft`.

  Raises:
    ValueError: for a target of another vocabulary or width.

  Example:
    >>> import jax, ldjax
    >>> tiny = ldjax.testing.tiny_model()
    >>> config = ldjax.models.RecurrentConfig(
    ...   depth=2, num_layers=1, target_size=24, hidden_size=16,
    ...   intermediate_size=20, vocab_size=31)
    >>> own = ldjax.models.init_draft(config, jax.random.key(0))
    >>> params = borrow(config, own, tiny.params)
    >>> params["embed"]["weight"] is tiny.params["embed_tokens"]["weight"]
    True
  """
  _check_target(config, target_params)
  added: dict[str, Any] = {}
  if not isinstance(config, _medusa.MedusaConfig):
    added["embed"] = {"weight": target_params["embed_tokens"]["weight"]}
  if config.shared_output:
    rows = output_rows(config, target_params, params.get("token_ids"))
    added["output"] = {**params.get("output", {}), "weight": rows}
  return {**params, **added}


def _layer(config: _eagle.EagleConfig, own: Any, target_params: Any) -> Any:
  layers = target_params["layers"]
  last = {name: layers[max(layers)][name] for name in own}
  if jax.tree.map(jnp.shape, last) != jax.tree.map(jnp.shape, own):
    raise ValueError(
      "the target's last layer has other parameters than the draft's layer;"
      " give the draft the target's sizes, or leave out target_params (layers"
      " with biases or norms of queries and keys can't be taken over)"
    )
  return jax.tree.map(lambda x, like: x.astype(like.dtype), last, own)


def init_draft(
  config: DraftConfig,
  key: Array,
  dtype: jax.typing.DTypeLike = jnp.float32,
  *,
  token_ids: Any = None,
  target_params: Any = None,
) -> Any:
  """Fresh parameters for training.

  Residual branches begin at zero, and so does an output of the draft's own
  (`output`), so that training begins there with every token equally likely.
  With a target, Medusa heads begin with its output matrix and an `EagleDraft`
  with its last layer; the others take nothing from it. Of that layer the
  weights are taken as they are: give the target only if it is of a Llama's kind
  (no `norm_offset`, activation "silu").

  Args:
    config: of the draft.
    key: a typed PRNG key.
    dtype: of the weights.
    token_ids: [W] integers, the target's id of each entry of a trimmed
      vocabulary; None where `config.target_vocab_size` is.
    target_params: of the target, to begin with parts of it; None for none.

  Returns:
    Nested dicts without what is borrowed, see `borrow`.

  Raises:
    ValueError: for a map of ids that does not fit, or a target that does not.

  Example:
    >>> import jax, ldjax
    >>> config = ldjax.models.HydraConfig(
    ...   num_heads=2, num_layers=1, target_size=8, hidden_size=6,
    ...   vocab_size=11, output_rank=3)
    >>> sorted(init_draft(config, jax.random.key(0))["output"])
    ['down', 'up']
  """
  if (token_ids is None) != (config.target_vocab_size is None):
    raise ValueError(
      "token_ids and target_vocab_size belong together: give both for a"
      f" trimmed vocabulary or neither (target_vocab_size is"
      f" {config.target_vocab_size})"
    )
  if token_ids is not None:
    token_ids = check_token_ids(config, token_ids)
  if target_params is not None:
    _check_target(config, target_params)
  trained, _, _ = _kinds(config, jnp.dtype(dtype))

  def begin(path: Any, value: Array) -> Array:
    keys = [part.key for part in path]
    # Blocks of Medusa and Hydra heads are single layers.
    ends = keys[-2] in _ENDS or keys[-3:-2] == ["blocks"]
    ends |= keys == ["output", "weight"]
    return jnp.zeros_like(value) if ends else value

  @jax.jit
  def fresh(key):
    module = _functionalize.MODULES[type(config)]
    heads = module(config, dtype=dtype, rngs=nnx.Rngs(key))
    params = _select(nnx.to_pure_dict(nnx.state(heads)), trained)
    return jax.tree_util.tree_map_with_path(begin, params)

  params = fresh(key)
  if target_params is not None:
    if isinstance(config, _eagle.EagleConfig):
      params["layer"] = _layer(config, params["layer"], target_params)
    elif isinstance(config, _medusa.MedusaConfig) and not config.shared_output:
      rows = output_rows(config, target_params, token_ids).astype(dtype)
      if config.single_output:
        params["output"] = {"weight": rows}
      else:
        for head in params["heads"].values():
          head["lm_head"] = {"weight": jnp.array(rows)}
  if token_ids is not None:
    params["token_ids"] = jnp.asarray(token_ids)
  return params
