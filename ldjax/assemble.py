"""From files to a model that decodes: target, draft and cache together."""

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from ldjax import (
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

_MAX_LEN = 2048


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
  init_cache: Callable[[int], memory.PagedKVCache]
  """batch -> empty cache."""
  eos_token_ids: tuple[int, ...]
  """Every id that the checkpoint or its tokenizer names as an end."""
  max_len: int
  """The most tokens of a sequence, prompt included."""
  page_size: int
  """Positions a page of the cache."""
  num_pages: int | None
  """Pages of the pool; None for as many as the batch can need."""
  prefill_chunks: tuple[int, ...]
  """Lengths in which prompts are read, ascending; one compile each."""
  mesh: jax.sharding.Mesh | None = None
  """The devices it is spread over; None for the default one."""
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


@functools.lru_cache(maxsize=64)
def cache_factory(
  config: models.TransformerConfig,
  *,
  max_len: int,
  page_size: int = 16,
  num_pages: int | None = None,
  dtype: Any = jnp.float32,
) -> Callable[[int], memory.PagedKVCache]:
  """Returns batch -> empty paged cache; the same one for the same arguments.

  Args:
    config: of the target.
    max_len: the most positions of a row.
    page_size: Z, positions a page.
    num_pages: P, or None for as many as the batch can need.
    dtype: of keys and values, see `memory.cache_dtype`.

  Raises:
    ValueError: for more positions than the model has learned.

  Example:
    >>> import ldjax
    >>> config = ldjax.testing.tiny_model().config
    >>> init_cache = cache_factory(config, max_len=64)
    >>> init_cache(2).pool.num_pages
    8
  """
  limit = config.max_position_embeddings
  if config.learned_positions and max_len > limit:
    raise ValueError(
      f"max_len is {max_len}, but the model has learned {limit} positions; give"
      " at most that"
    )
  return functools.partial(
    _create_cache,
    max_len=max_len,
    page_size=page_size,
    num_pages=num_pages,
    num_layers=config.num_layers,
    num_kv_heads=config.num_kv_heads,
    head_dim=config.head_dim,
    dtype=dtype,
  )


def _create_cache(batch: int, **sizes: Any) -> memory.PagedKVCache:
  return memory.PagedKVCache.create(batch=batch, **sizes)


def _place(
  mesh: jax.sharding.Mesh | None, config: models.TransformerConfig
) -> Any:
  return None if mesh is None else _sharding.place_on(mesh, config)


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


def _platform(mesh: jax.sharding.Mesh | None) -> str:
  if mesh is None:
    return jax.default_backend()
  return mesh.devices.flat[0].platform


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
  mesh: jax.sharding.Mesh | None = None,
  progress: Progress | None = None,
) -> LanguageModel:
  """Loads a target and puts a decoder around it.

  Args:
    path: a `.gguf` file, a Hugging Face folder, `"org/name"` on the hub, or
      `"demo"` for SmolLM2-135M-Instruct (fetched once, 94 MB).
    draft: `"ngram"` (no weights), `"none"` or None for plain decoding, a
      folder with draft heads (ldjax's or Medusa's), a `DraftFn` of your own
      (see `with_draft` for its weights), or `"auto"`: the model's own heads
      if it is a Medusa-2 folder, the heads that come with ldjax for it if there
      are any, else `"ngram"`. The text is the
      same with any of them.
    tree: what the draft proposes, see `parse_tree`; `"auto"` or None for a
      ladder of sizes, among which each round's is chosen by how drafts fare
      and what a size costs (see `optimize.measure_costs`). The text is the
      same with any of them.
    max_len: the most tokens of a sequence, prompt included; default 2,048 or
      what the model was made for, if that is less.
    dtype: of the weights; default float32 on CPU, bfloat16 elsewhere.
    cache_dtype: of keys and values: "float32", "bfloat16", "float16", or in
      eight bits with scales "int8" or "float8_e4m3fn"; default that of the
      weights. A draft's own cache stays in the dtype of the weights.
    page_size: positions a page of the cache.
    num_pages: pages of the pool, shared by all rows; default as many as the
      batch can need.
    mesh: devices to spread the model over, with an axis "tensor" that splits
      its matrices and the heads of its cache, and an axis "data" that splits
      the rows of a batch; either may be left out. What an axis does not
      divide (a number of heads, a vocabulary, a batch) is repeated along it.
      Pages of the cache are repeated along "data". The text is that of one
      device. Each parameter goes to its devices as it is read, so a model may
      be larger than the memory of one.
    progress: called with a line of text as loading goes on.

  Returns:
    `LanguageModel`, for `generate` and `stream`, or for its parts.

  Raises:
    FileNotFoundError: for a path or draft that is not there.
    TypeError: for a mesh that is none.
    ValueError: for files, settings or axes of a mesh that do not fit, naming
      them.

  Example:
    model = ldjax.load("demo")
    print(ldjax.generate(model, "Why is the sky blue?").text)
  """
  mesh = None if mesh is None else _sharding.check_mesh(mesh)
  on_cpu = _platform(mesh) == "cpu"
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
  jax.eval_shape(functools.partial(init_cache, 1))  # checks the sizes
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
  return LanguageModel(
    name=checkpoint.name,
    config=config,
    tokenizer=tokenizer,
    target=target,
    params=decoding.DecoderParams(
      checkpoint.params, _drafts.borrow(drafts, checkpoint.params)
    ),
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
    prefill_chunks=(16, 64) if on_cpu else (64, 512),
    mesh=mesh,
    feature_layers=feature_layers,
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
