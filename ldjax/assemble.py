"""From files to a model that decodes: target, draft and cache together."""

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from ldjax import (
  _cache,
  _drafts,
  _sharding,
  checkpoints,
  decoding,
  memory,
  models,
  text,
)

Draft: TypeAlias = _drafts.Draft
Progress: TypeAlias = _drafts.Progress
Tree: TypeAlias = _drafts.Tree
parse_tree = _drafts.parse_tree
cache_factory = _cache.cache_factory

_MAX_LEN = 2048
_ON_PRESSURE = ("preempt", "offload", "compress", "error")


class Rung(NamedTuple):
  """One size of tree among those that a model can decode with."""

  draft: decoding.DraftFn
  """Proposes the tree: `draft.size` nodes, T."""
  decoder: decoding.Decoder
  """Decodes with it, on the state that all rungs share."""
  expected: float | None
  """Tokens a round by calibration, the bonus token included; None where
  nobody knows."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LanguageModel:
  """Everything that `generate` needs; it holds no state of any sequence."""

  name: str
  """Where it came from."""
  config: models.TransformerConfig
  """The target's shape."""
  tokenizer: text.Tokenizer
  """Text to ids and back, with the chat template."""
  target: decoding.TargetFn
  """The target as pure functions."""
  draft_name: str
  """`"ngram"`, `"none"`, `"custom"` or a folder."""
  params: decoding.DecoderParams
  """Weights of target and draft."""
  ladder: tuple[Rung, ...]
  """What to decode with, by size of the tree, ascending. With one rung every
  round is of it; with several, of which the first has the root alone,
  `generate` chooses among them as it sees how drafts fare."""
  start: int
  """The rung that stands for the draft where one is wanted."""
  fallback: decoding.Decoder
  """Decodes with a root-only tree, on the same state."""
  init_cache: Callable[[int], _cache.Cache]
  """batch -> empty cache."""
  eos_token_ids: tuple[int, ...]
  """Every id that the checkpoint or its tokenizer names as an end."""
  max_len: int
  """The most tokens of a sequence, prompt included."""
  page_size: int
  """Positions a page of the cache."""
  num_pages: int | None
  """Pages of the pool at most; None for as many as the batch can need."""
  prefill_chunks: tuple[int, ...]
  """Lengths in which prompts are read, ascending; one compile each."""
  mesh: jax.sharding.Mesh | None = None
  """The devices it is spread over; None for the default one."""
  initial_pages: int | None = None
  """Pages that `generate` begins with, growing as they are needed; None for
  all of them at once."""
  on_pressure: str = "preempt"
  """What `generate` does when rows need more pages than there may be."""
  preallocates: bool = False
  """Whether a sequence is counted as taking `max_len` positions of the cache
  from the start."""
  feature_layers: tuple[int, ...] = ()
  """Layers whose inputs `target` shows the draft; () for the final state."""

  @property
  def draft(self) -> decoding.DraftFn:
    """The draft as pure functions."""
    return self.ladder[self.start].draft

  @property
  def decoder(self) -> decoding.Decoder:
    """Decodes with `draft`."""
    return self.ladder[self.start].decoder


def _place(
  mesh: jax.sharding.Mesh | None, config: models.TransformerConfig
) -> Any:
  if mesh is not None:
    return _sharding.place_on(mesh, config)
  return _sharding.place_on_tpu if jax.default_backend() == "tpu" else None


def _decoder(
  target: decoding.TargetFn,
  draft: decoding.DraftFn,
  init_cache: Callable[[int], Any],
  max_len: int,
  mesh: jax.sharding.Mesh | None,
) -> decoding.Decoder:
  decoder = decoding.speculative(target, draft, init_cache, max_len=max_len)
  return decoder if mesh is None else _sharding.constrain(decoder, mesh)


def decoder_with(
  model: LanguageModel, draft: decoding.DraftFn
) -> decoding.Decoder:
  """A decoder of a model with some draft, the same one for the same draft.

  Args:
    model: from `load`.
    draft: on the same draft state as the model's own, if their decoders are to
      share a state.
  """
  return _decoder(
    model.target, draft, model.init_cache, model.max_len, model.mesh
  )


def _feature_layers(
  drafts: _drafts.Drafts, config: models.TransformerConfig
) -> tuple[int, ...]:
  """What the target must show these drafts."""
  if drafts.config is None:
    return ()
  return models.feature_layers(drafts.config, config.num_layers)


def _target(
  config: models.TransformerConfig, dtype: Any, feature_layers: tuple[int, ...]
) -> decoding.TargetFn:
  model = models.abstract_model(config, dtype, feature_layers)
  return models.functionalize(model)[0]


def _rungs(
  drafts: _drafts.Drafts, build: Callable[[decoding.DraftFn], decoding.Decoder]
) -> dict[str, Any]:
  """The fields of a `LanguageModel` that depend on its draft alone."""
  return {
    "draft_name": drafts.name,
    "ladder": tuple(
      Rung(each.draft, build(each.draft), each.expected)
      for each in drafts.ladder
    ),
    "start": drafts.main,
    "fallback": build(drafts.root),
  }


def _device(mesh: jax.sharding.Mesh | None) -> jax.Device:
  return jax.local_devices()[0] if mesh is None else mesh.devices.flat[0]


def load(
  path: str | os.PathLike[str] = "demo",
  *,
  draft: Draft = "auto",
  tree: Tree | None = "auto",
  max_len: int | None = None,
  dtype: Any = None,
  cache_dtype: Any = None,
  page_size: int = 16,
  num_pages: int | None = None,
  initial_pages: int | None = None,
  memory_budget: str | float = 0.75,
  on_pressure: str = "preempt",
  mesh: jax.sharding.Mesh | None = None,
  progress: Progress | None = None,
) -> LanguageModel:
  """Loads a target and puts a decoder around it; see `ldjax.load`.

  Args:
    path: see there, as are all others.
    draft: the draft.
    tree: what it proposes.
    max_len: the most tokens of a sequence.
    dtype: of the weights.
    cache_dtype: of keys and values.
    page_size: positions a page of the cache.
    num_pages: pages of the pool.
    initial_pages: pages that it begins with.
    memory_budget: what weights and pool may take.
    on_pressure: what to do when rows need more.
    mesh: devices to spread the model over.
    progress: called with a line of text as loading goes on.

  Raises:
    FileNotFoundError, TypeError, ValueError: see there.
  """
  mesh = None if mesh is None else _sharding.check_mesh(mesh)
  on_cpu = _device(mesh).platform == "cpu"
  file = checkpoints.resolve(path, progress)
  config = checkpoints.read_config(file)
  limit = config.max_position_embeddings
  max_len = min(_MAX_LEN, limit) if max_len is None else max_len
  if not 2 <= max_len <= limit:
    raise ValueError(
      f"max_len is {max_len}; this model can have 2 to {limit} positions"
    )
  if dtype is None:
    # bf16 at one row is six times slower than fp32 on a CPU.
    dtype = jnp.float32 if on_cpu else jnp.bfloat16
  dtype = jnp.dtype(dtype)
  init_cache = cache_factory(
    config,
    max_len=max_len,
    page_size=page_size,
    num_pages=num_pages,
    dtype=memory.cache_dtype(dtype if cache_dtype is None else cache_dtype),
  )
  # Checks the sizes.
  page_bytes = jax.eval_shape(functools.partial(init_cache, 1)).page_bytes
  if on_pressure not in _ON_PRESSURE:
    raise ValueError(
      f"on_pressure is {on_pressure!r}; give one of {', '.join(_ON_PRESSURE)}"
    )
  budget = memory.parse_budget(
    memory_budget, memory.device_memory(_device(mesh))
  )
  tokenizer = text.load_tokenizer(file)
  # What can be refused is refused before gigabytes are read.
  place = _place(mesh, config)
  drafts = _drafts.read(
    draft,
    tree,
    model_name=os.fspath(path),
    config=config,
    dtype=dtype,
    max_len=max_len,
    file=file,
    progress=progress,
    place=place,
  )
  feature_layers = _feature_layers(drafts, config)
  checkpoint = checkpoints.read(
    file, dtype=dtype, progress=progress, place=place
  )
  target = _target(config, dtype, feature_layers)
  weights = decoding.DecoderParams(
    checkpoint.params, _drafts.borrow(drafts, checkpoint.params)
  )
  if not page_bytes:
    # Every layer has a window: a row's pages are its own, and fixed.
    initial_pages = num_pages = None
  elif num_pages is None or initial_pages is not None:
    initial_pages, num_pages = memory.pool_limits(
      initial_pages=(
        3 * -(-max_len // page_size) if initial_pages is None else initial_pages
      ),
      num_pages=num_pages,
      budget_bytes=budget,
      parameter_bytes=_sharding.bytes_a_device(weights),
      page_bytes=page_bytes // _sharding.parts_of_a_page(mesh, config),
    )
  return LanguageModel(
    name=checkpoint.name,
    config=config,
    tokenizer=tokenizer,
    target=target,
    params=weights,
    **_rungs(
      drafts, lambda each: _decoder(target, each, init_cache, max_len, mesh)
    ),
    init_cache=init_cache,
    eos_token_ids=tuple(
      sorted({*checkpoint.eos_token_ids, *tokenizer.eos_token_ids})
    ),
    max_len=max_len,
    page_size=page_size,
    num_pages=num_pages,
    initial_pages=initial_pages,
    on_pressure=on_pressure,
    prefill_chunks=(16, 64) if on_cpu else (64, 512),
    mesh=mesh,
    feature_layers=feature_layers,
  )


def with_target(
  model: LanguageModel, config: models.TransformerConfig, params: Any
) -> LanguageModel:
  """The same decoder around other parameters of the target, or other forms.

  Args:
    model: from `load`.
    config: of the same model, see `models.fuse`.
    params: of the target, nested dicts.

  Example:
    config, params = ldjax.models.fuse(model.config, model.params.target)
    fused = ldjax.with_target(model, config, params)
  """
  dtype = jax.tree.leaves(params)[0].dtype
  target = _target(config, dtype, model.feature_layers)
  model = dataclasses.replace(
    model,
    config=config,
    target=target,
    params=decoding.DecoderParams(params, model.params.draft),
  )
  build = functools.partial(decoder_with, model)
  # As `_drafts` made it: the first of a ladder proposes nothing.
  root = decoding.root_only(model.ladder[0].draft)
  return dataclasses.replace(
    model,
    ladder=tuple(
      rung._replace(decoder=build(rung.draft)) for rung in model.ladder
    ),
    fallback=build(root),
  )


def with_draft(
  model: LanguageModel,
  draft: Draft,
  tree: Tree | None = "auto",
  *,
  draft_params: Any = (),
) -> LanguageModel:
  """The same target on the same devices, with another draft or tree.

  Args:
    model: from `load`.
    draft: as for `load`.
    tree: as for `load`.
    draft_params: weights of a `DraftFn` of your own.

  Returns:
    A new `LanguageModel`; the text it gives is the same.

  Raises:
    FileNotFoundError: for a draft that is not there.
    ValueError: for a draft made for another model.

  Example:
    plain = ldjax.with_draft(model, "none")
  """
  target_params = model.params.target
  dtype = jax.tree.leaves(target_params)[0].dtype
  drafts = _drafts.read(
    draft,
    tree,
    model_name=model.name,
    config=model.config,
    dtype=dtype,
    max_len=model.max_len,
    place=_place(model.mesh, model.config),
  )
  weights = _drafts.borrow(drafts, target_params)
  if isinstance(draft, decoding.DraftFn):
    weights = draft_params
  feature_layers = _feature_layers(drafts, model.config)
  if feature_layers != model.feature_layers:
    model = dataclasses.replace(
      model,
      target=_target(model.config, dtype, feature_layers),
      feature_layers=feature_layers,
    )
  return dataclasses.replace(
    model,
    params=decoding.DecoderParams(target_params, weights),
    preallocates=False,
    **_rungs(drafts, functools.partial(decoder_with, model)),
  )
