"""What a compiled forward pass is made of: kernels started, memory reused."""

import dataclasses
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ldjax import assemble, models

# What starts no work of its own in a compiled program.
_FREE = frozenset(
  {
    "after-all",
    "bitcast",
    "constant",
    "get-tuple-element",
    "parameter",
    "partition-id",
    "replica-id",
    "tuple",
  }
)
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?\S+ = (\(.*?\)|\S+) ([\w-]+)\(")
_ARRAY = re.compile(r"([a-z]+\d*\w*)\[([\d,]*)\]")
_BITS = re.compile(r"\d+")


class ProgramCounts(NamedTuple):
  """Figures of a compiled program."""

  kernels: int
  """Instructions of the entry computation that start work: fusions, products,
  loops, copies."""
  intermediate_bytes: int
  """Of everything that they write, were each given memory of its own."""
  temporary_bytes: int
  """That the program takes for it, by the compiler's memory analysis."""
  aliased_bytes: int
  """Of results that lie where donated arguments lay."""

  @property
  def reused(self) -> float:
    """The share of the intermediates that needs no memory of its own."""
    if not self.intermediate_bytes:
      return 0.0
    return max(0.0, 1 - self.temporary_bytes / self.intermediate_bytes)


def _bytes(shape: str) -> int:
  total = 0
  for kind, dims in _ARRAY.findall(shape):
    bits = _BITS.search(kind)
    count = 1
    for dim in filter(None, dims.split(",")):
      count *= int(dim)
    # pred is a byte a number; s4 is half of one.
    total += -(-count * int(bits[0]) // 8) if bits else count
  return total


def count_program(compiled: Any) -> ProgramCounts:
  """Counts a program by its text and by the compiler's own figures.

  Args:
    compiled: as `jax.jit(f).lower(...).compile()` gives it.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> f = jax.jit(lambda x: jnp.sum(jnp.sin(x) @ jnp.cos(x)))
    >>> counts = count_program(f.lower(jnp.ones((8, 8))).compile())
    >>> counts.kernels > 0
    True
  """
  _, _, entry = compiled.as_text().partition("\nENTRY")
  body, _, _ = entry.partition("\n}")
  kernels = written = 0
  for line in body.splitlines():
    match = _INSTRUCTION.match(line)
    if match is None or match[2] in _FREE:
      continue
    kernels += 1
    written += _bytes(match[1])
  memory = compiled.memory_analysis()
  return ProgramCounts(
    kernels=kernels,
    intermediate_bytes=written,
    temporary_bytes=int(memory.temp_size_in_bytes),
    aliased_bytes=int(memory.alias_size_in_bytes),
  )


def _forward(
  config: models.TransformerConfig, params: Any, dtype: Any, size: int
) -> Any:
  """The compiled pass over a tree of a model of which there is no weight."""
  target, _ = models.functionalize(models.abstract_model(config, dtype))
  init_cache = assemble.cache_factory(
    config, max_len=256, page_size=16, dtype=dtype
  )

  def run(params, tokens, positions, parents, cache):
    output = target.forward(params, tokens, positions, parents, cache.view())
    return output.hidden, output.block_kv

  nodes = jax.ShapeDtypeStruct((1, size), jnp.int32)
  cache = jax.eval_shape(lambda: init_cache(1))
  return jax.jit(run).lower(params, nodes, nodes, nodes, cache).compile()


def block_kernels(
  config: models.TransformerConfig, params: Any, *, size: int = 8
) -> int:
  """How many kernels one decoder block of a model is, compiled here.

  What a model of three layers has more than one of two, so that what stands
  before and behind the blocks is left out.

  Args:
    config: of a model of at least three layers.
    params: of the target; only shapes and dtypes are read, and of the first
      three layers.
    size: T, nodes of the tree that it reads.

  Returns:
    Kernels, fusions and loops of a block.

  Raises:
    ValueError: for a model of fewer layers.

  Example:
    kernels = ldjax.optimize.block_kernels(model.config, model.params.target)
  """
  if config.num_layers < 3:
    raise ValueError(
      f"the model has {config.num_layers} layers; at least 3 are needed to tell"
      " a block from what stands around it"
    )
  dtype = params["embed_tokens"]["weight"].dtype
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params
  )
  counts = []
  for layers in (2, 3):
    fewer = dataclasses.replace(
      config,
      num_layers=layers,
      windows=config.windows[:layers],
      nope_layers=tuple(i for i in config.nope_layers if i < layers),
    )
    kept = {i: shapes["layers"][i] for i in range(layers)}
    program = _forward(fewer, {**shapes, "layers": kept}, dtype, size)
    counts.append(count_program(program).kernels)
  return counts[1] - counts[0]


def step_program(
  model: assemble.LanguageModel, *, batch: int = 1
) -> ProgramCounts:
  """Counts the compiled step of a model's draft, its state donated.

  Args:
    model: from `load`.
    batch: B, rows that run together.

  Example:
    print(ldjax.optimize.step_program(model).reused)
  """
  params = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
    model.params,
  )
  state = jax.eval_shape(lambda p: model.fallback.empty(p, batch), params)
  step = jax.jit(model.decoder.step, donate_argnums=1)
  return count_program(step.lower(params, state).compile())
