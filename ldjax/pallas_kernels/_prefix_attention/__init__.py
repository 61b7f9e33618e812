"""Attention of query rows over a paged prefix."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import chex
import jax
from jax import lax

from ldjax import _base, typing
from ldjax.pallas_kernels import _blocks, _limits, _named
from ldjax.pallas_kernels._prefix_attention import _mosaic_tpu, _xla

__all__ = ["prefix_attention", "without_kernels"]

Array = typing.Array


def _problem(query: Array, pages: _base.KV) -> dict[str, Any]:
  return {
    "dtype": query.dtype.name,
    "page_dtype": pages.dtype.name,
    "head_dim": query.shape[-1],
    "page_size": pages.shape[2],
  }


# Traced once a shape, not once a layer.
_TPU = jax.jit(
  _mosaic_tpu.prefix_attention, static_argnames=("scale", "soft_cap", "blocks")
)


def _tpu(
  query: Array,
  pages: _base.KV,
  *rest: Any,
  blocks: _blocks.PrefixBlocks | None,
  **settings: Any,
) -> tuple[Array, Array]:
  kv_heads = pages.shape[1]
  problem = _blocks.PrefixProblem(
    head_dim=query.shape[-1],
    kv_heads=kv_heads,
    page_size=pages.shape[2],
    rows=query.shape[1] * query.shape[2] // kv_heads,
    query_dtype=query.dtype.name,
    page_dtype=pages.dtype.name,
  )
  sizes = _blocks.choose_prefix(problem, "tpu", blocks)
  return _TPU(query, pages, *rest, blocks=sizes, **settings)


def _gpu(
  *arrays: Any, blocks: _blocks.PrefixBlocks | None, **settings: Any
) -> tuple[Array, Array]:
  # Imported when it is wanted: it takes a while, and on jax 0.10 more packages.
  from ldjax.pallas_kernels._prefix_attention import _mosaic_gpu

  del blocks  # its steps have the one size that fits
  return _mosaic_gpu.compiled(*arrays, **settings)


_KERNELS: dict[str, Callable[..., tuple[Array, Array]]] = {
  "mosaic_tpu": _tpu,
  "mosaic_gpu": _gpu,
}


_UNWANTED = contextvars.ContextVar("unwanted kernels", default=False)


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
  """While the block traces, no implementation means "xla".

  For functions whose arrays are split over several devices by automatic
  partitioning, which JAX can't do to a kernel.

  Example:
    >>> with without_kernels():
    ...   pass
  """
  token = _UNWANTED.set(True)
  try:
    yield
  finally:
    _UNWANTED.reset(token)


def kernels_wanted() -> bool:
  """False within `without_kernels`."""
  return not _UNWANTED.get()


def _has_other_gpu() -> bool:
  """Whether a GPU is here that is no Hopper; without any, one is aimed at."""
  if jax.default_backend() != "gpu":
    return False
  return any(
    getattr(device, "compute_capability", None) != "9.0"
    for device in jax.local_devices()
  )


def _best(query: Array, pages: _base.KV) -> tuple[tuple[str, str], ...]:
  """(platform, kernel chosen for it); the others take XLA."""
  if not kernels_wanted():
    return ()
  problem = _problem(query, pages)
  found = []
  for name in _KERNELS:
    entry = _limits.limits("prefix_attention", name)
    if _limits.refusals(entry, **problem) or not _limits.chosen(
      entry, head_dim=problem["head_dim"], page_size=problem["page_size"]
    ):
      continue
    if entry.platform == "cuda" and _has_other_gpu():
      continue
    found.append((entry.platform, name))
  return tuple(found)


Attend: TypeAlias = Callable[..., tuple[Array, Array]]
"""(query, pages, block_table, length, start or None) -> what is returned."""


# Each made once for its settings, so that JAX finds what it traced before.
@functools.lru_cache(maxsize=256)
def _plain(**settings: Any) -> Attend:
  def plain(query, pages, block_table, length, start):
    return _xla.prefix_attention(
      query, pages, block_table, length, start=start, **settings
    )

  return plain


@functools.lru_cache(maxsize=256)
def _kernel(name: str, **settings: Any) -> Attend:
  # Under vmap one after the other: a batched block table is no prefetch.
  @jax.custom_batching.sequential_vmap
  def kernel(query, pages, block_table, length, start):
    return _KERNELS[name](
      query, pages, block_table, length, start=start, **settings
    )

  return kernel


@functools.lru_cache(maxsize=256)
def _by_platform(
  names: tuple[tuple[str, str], ...],
  *,
  blocks: _blocks.PrefixBlocks | None,
  **settings: Any,
) -> Attend:
  plain = _plain(**settings)
  kernels = {
    platform: _kernel(name, blocks=blocks, **settings)
    for platform, name in names
  }

  @jax.custom_jvp
  def attend(*arrays):
    return lax.platform_dependent(*arrays, default=plain, **kernels)

  @attend.defjvp
  def _(primals, tangents):
    return jax.jvp(plain, primals, tangents)

  return attend


def prefix_attention(
  query: Array,
  pages: _base.KV,
  block_table: Array,
  length: Array,
  *,
  scale: float,
  start: Array | None = None,
  soft_cap: float | None = None,
  implementation: str | None = None,
  blocks: _blocks.PrefixBlocks | None = None,
) -> tuple[Array, Array]:
  """Attends T queries of each row to the row's committed prefix.

  All T tree nodes of a row see the same prefix, so no tree mask is needed
  here; `tree_attention` merges the result with the block of nodes.

  Args:
    query: [R, T, N, H].
    pages: [P, K, Z, 2H], keys then values on the last axis; or `QuantizedKV`
      of these, whose scales are multiplied into scores and weights, so that no
      float copy of the pool is made.
    block_table: [R, M] int32, page of each stretch of Z positions.
    length: [R] int32, live positions; whatever lies past them, NaN included,
      changes nothing.
    scale: multiplies the scores.
    start: [R, T] int32, the first position that each query sees, as a sliding
      window sets it; None for position 0. What no query of a row sees changes
      nothing for that row, NaN included, and costs nothing beyond its page.
    soft_cap: scaled scores s become soft_cap * tanh(s / soft_cap); None for no
      cap.
    implementation: None for the best that the device it is compiled for has,
      which is "xla" where no kernel fits; or "xla", "mosaic_tpu",
      "mosaic_gpu". See `LIMITS` for what each takes.
    blocks: sizes of a step of "mosaic_tpu", the only one that has a choice;
      None for those that `ldjax tune-kernels` measured on this kind of device,
      or else a guess. The result does not depend on them.

  Returns:
    Output [R, T, N, H] and log-sum-exp of the scores [R, T, N], both float32.
    A query that sees nothing (a row of length 0, a start at or past the
    length) gives output 0 and log-sum-exp -inf.

  Raises:
    ValueError: for heads that do not divide, and for a named implementation
      that can't do this, with the reason. It is never replaced in silence.

  Example:
    >>> import jax.numpy as jnp
    >>> out, lse = prefix_attention(
    ...   jnp.ones((1, 1, 2, 4)), jnp.full((3, 1, 2, 8), 5.),
    ...   jnp.array([[2, 0]]), jnp.array([3]), scale=0.5)
    >>> out.shape, lse.shape, float(out[0, 0, 0, 0])
    ((1, 1, 2, 4), (1, 1, 2), 5.0)

  Source: Kwon et al. 2023, "Efficient memory management for large language
  model serving with PagedAttention"; Milakov and Gimelshein 2018 for the
  running softmax; the Gemma team 2024 (Gemma 2) for the cap.
  """
  rows, _, heads, head_dim = query.shape
  kv_heads = pages.shape[1]
  if isinstance(pages, _base.QuantizedKV):
    chex.assert_shape(pages.scales, (*pages.shape[:3], 2))
  chex.assert_shape(
    jax.tree.leaves(pages)[0], (None, kv_heads, None, 2 * head_dim)
  )
  chex.assert_shape(block_table, (rows, None))
  chex.assert_shape(length, (rows,))
  if start is not None:
    chex.assert_shape(start, query.shape[:2])
  if heads % kv_heads:
    raise ValueError(
      f"{heads} query heads are no multiple of {kv_heads} key/value heads"
    )
  named = None
  if implementation is not None:
    named = _limits.limits("prefix_attention", implementation)
    _limits.check(named, **_problem(query, pages))
  arrays = (query, pages, block_table, length, start)
  settings: dict[str, Any] = {"scale": scale, "soft_cap": soft_cap}
  if implementation == "xla":
    return _plain(**settings)(*arrays)
  if named is not None:
    kernel = _kernel(named.implementation, blocks=blocks, **settings)
    return _named.only_there(named, kernel)(*arrays)
  names = _best(query, pages)
  return _by_platform(names, blocks=blocks, **settings)(*arrays)
