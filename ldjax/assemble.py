"""From files to a model that decodes: target, draft and cache together."""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from ldjax import _sharding, checkpoints, decoding, memory, models, text

Progress: TypeAlias = Callable[[str], None]
Tree: TypeAlias = (
  decoding.TokenTree | str | Sequence[int] | Sequence[Sequence[int]]
)

Draft: TypeAlias = str | os.PathLike[str] | decoding.DraftFn | None

_MAX_LEN = 2048
_NGRAM_DEPTH = 3


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
  draft: decoding.DraftFn
  """The draft as pure functions."""
  draft_name: str
  """What `load` was given: `"ngram"`, `"none"` or a folder."""
  params: decoding.DecoderParams
  """Weights of target and draft."""
  decoder: decoding.Decoder
  """Decodes with the draft."""
  fallback: decoding.Decoder
  """The same with a root-only tree, on the same state."""
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
    dtype: of keys and values.

  Example:
    >>> import ldjax
    >>> config = ldjax.testing.tiny_model().config
    >>> init_cache = cache_factory(config, max_len=64)
    >>> init_cache(2).pool.num_pages
    8
  """
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


def parse_tree(tree: Tree) -> decoding.TokenTree:
  """Reads a tree from the notations that people use.

  Args:
    tree: a `TokenTree`; `"root"`; `"chain:3"`; the name of a published Medusa
      tree; Medusa's older ranks a depth, `"1,7,6"` or `[1, 7, 6]`; or a list
      of paths.

  Raises:
    ValueError: for anything else, with what would do.

  Example:
    >>> parse_tree("chain:3").size, parse_tree("1,2,2").size
    (4, 7)
  """
  if isinstance(tree, decoding.TokenTree):
    return tree
  if not isinstance(tree, str):
    return decoding.TokenTree.medusa(tree)
  if tree == "root":
    return decoding.TokenTree.root_only()
  kind, _, argument = tree.partition(":")
  if kind == "chain" and argument.isdecimal():
    return decoding.TokenTree.chain(int(argument))
  ranks = [part.strip() for part in tree.split(",")]
  if all(rank.isdecimal() for rank in ranks):
    return decoding.TokenTree.medusa([int(rank) for rank in ranks])
  try:
    return decoding.TokenTree.medusa(tree)
  except ValueError as error:
    raise ValueError(
      f"tree {tree!r} is not understood: give 'root', 'chain:N', ranks a depth"
      f" such as '1,7,6', or a published name ({error})"
    ) from None


def _ngram(tree: Tree | None) -> decoding.DraftFn:
  if tree is None:
    return decoding.ngram(_NGRAM_DEPTH)
  topology = parse_tree(tree)
  if topology != decoding.TokenTree.chain(topology.depth):
    raise ValueError(
      f"the n-gram draft proposes a chain, not a tree of {topology.size} nodes"
      f" and depth {topology.depth}; give tree='chain:N'"
    )
  if not topology.depth:
    return decoding.root_only()
  return decoding.ngram(topology.depth)


def _medusa(
  folder: pathlib.Path,
  tree: Tree | None,
  config: models.TransformerConfig,
  dtype: Any,
  progress: Progress | None,
  mesh: jax.sharding.Mesh | None,
) -> tuple[decoding.DraftFn, Any, bool]:
  if not folder.exists():
    raise FileNotFoundError(
      f"draft {str(folder)!r} is neither 'none' nor 'ngram' nor an existing"
      " folder with Medusa heads"
    )
  heads, params = checkpoints.read_medusa(
    folder,
    vocab_size=config.vocab_size,
    dtype=dtype,
    progress=progress,
    place=_place(mesh, config),
  )
  for field in ("hidden_size", "vocab_size"):
    have, want = getattr(heads, field), getattr(config, field)
    if have != want:
      raise ValueError(
        f"{folder}: the draft's {field} is {have}, the target's is {want}; it"
        " was made for another model"
      )
  topology = parse_tree(f"chain:{heads.num_heads}" if tree is None else tree)
  fn, _ = models.functionalize_heads(models.abstract_heads(heads, dtype))
  return decoding.medusa(fn, topology), params, heads.shared_output


def _draft(
  draft: Draft,
  tree: Tree | None,
  config: models.TransformerConfig,
  dtype: Any,
  progress: Progress | None,
  mesh: jax.sharding.Mesh | None,
) -> tuple[decoding.DraftFn, Any, bool]:
  """The draft, its weights, and whether it borrows the output matrix."""
  if isinstance(draft, decoding.DraftFn):
    if tree is not None:
      raise ValueError("a DraftFn has a tree of its own; leave out tree")
    return draft, (), False
  if draft == "ngram":
    return _ngram(tree), (), False
  if draft in (None, "none"):
    if tree is not None and parse_tree(tree).depth:
      raise ValueError(f"draft 'none' takes no tree, but tree is {tree!r}")
    return decoding.root_only(), (), False
  folder = pathlib.Path(str(draft))
  return _medusa(folder, tree, config, dtype, progress, mesh)


def _borrow(
  config: models.TransformerConfig, target_params: Any, draft_params: Any
) -> Any:
  """Draft parameters with the target's output matrix among them."""
  name = "embed_tokens" if config.tie_word_embeddings else "lm_head"
  return {**draft_params, "output": {"weight": target_params[name]["weight"]}}


def _draft_name(draft: Draft) -> str:
  if isinstance(draft, decoding.DraftFn):
    return "custom"
  return "none" if draft is None else os.fspath(draft)


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


def _platform(mesh: jax.sharding.Mesh | None) -> str:
  if mesh is None:
    return jax.default_backend()
  return mesh.devices.flat[0].platform


def load(
  path: str | os.PathLike[str] = "demo",
  *,
  draft: Draft = "ngram",
  tree: Tree | None = None,
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
      folder with Medusa heads, or a `DraftFn` of your own (see `with_draft`
      for its weights). The text is the same with any of them.
    tree: what the draft proposes, see `parse_tree`; default three n-gram
      tokens, or a chain as long as there are heads.
    max_len: the most tokens of a sequence, prompt included; default 2,048 or
      what the model was made for, if that is less.
    dtype: of the weights; default float32 on CPU, bfloat16 elsewhere.
    cache_dtype: of keys and values; default that of the weights.
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
    dtype=dtype if cache_dtype is None else jnp.dtype(cache_dtype),
  )
  jax.eval_shape(functools.partial(init_cache, 1))  # checks the sizes
  tokenizer = text.load_tokenizer(file)
  # What can be refused is refused before gigabytes are read.
  draft_fn, draft_params, borrows = _draft(
    draft, tree, config, dtype, progress, mesh
  )
  checkpoint = checkpoints.read(
    file, dtype=dtype, progress=progress, place=_place(mesh, config)
  )
  if borrows:
    draft_params = _borrow(config, checkpoint.params, draft_params)
  target, _ = models.functionalize(models.abstract_model(config, dtype))
  return LanguageModel(
    name=checkpoint.name,
    config=config,
    tokenizer=tokenizer,
    target=target,
    draft=draft_fn,
    draft_name=_draft_name(draft),
    params=decoding.DecoderParams(checkpoint.params, draft_params),
    decoder=_decoder(target, draft_fn, init_cache, max_len, mesh),
    fallback=_decoder(
      target, decoding.root_only(draft_fn), init_cache, max_len, mesh
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
  )


def with_draft(
  model: LanguageModel,
  draft: Draft,
  tree: Tree | None = None,
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
  dtype = jax.tree.leaves(model.params.target)[0].dtype
  draft_fn, weights, borrows = _draft(
    draft, tree, model.config, dtype, None, model.mesh
  )
  if isinstance(draft, decoding.DraftFn):
    weights = draft_params
  if borrows:
    weights = _borrow(model.config, model.params.target, weights)
  sizes = (model.init_cache, model.max_len, model.mesh)

  return dataclasses.replace(
    model,
    draft=draft_fn,
    draft_name=_draft_name(draft),
    params=decoding.DecoderParams(model.params.target, weights),
    decoder=_decoder(model.target, draft_fn, *sizes),
    fallback=_decoder(model.target, decoding.root_only(draft_fn), *sizes),
  )
