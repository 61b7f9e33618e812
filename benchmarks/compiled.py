"""Compiles kernels and decode steps for devices that are not here.

    python benchmarks/compiled.py tpu            # the wheel libtpu
    python benchmarks/compiled.py cuda           # jax's CUDA plugin and ptxas
    python benchmarks/compiled.py tpu --only kernels    # without decode steps
    python benchmarks/compiled.py tpu --bytes    # table of bytes
    python benchmarks/compiled.py tpu --formula  # against `profile.step_work`

The compilers are the real ones; arrays are shapes only, and nothing runs. A
line of JSON a program says what stands in it: copies of an array as large as
the cache's pages, arrays of the size of all logits, what is aliased, and bytes
moved (see `traffic.py`).
"""

import argparse
import dataclasses
import functools
import glob
import importlib.util
import json
import os
import pathlib
import re
import sys
import time
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import jax.numpy as jnp
import numpy as np
import traffic
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding

from ldjax import (
  _sharding,
  decoding,
  memory,
  models,
  pallas_kernels,
  profile,
  sampling,
)

# What XLA needs to know of an H100 where there is none.
_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
"""

_COMMON: dict[str, Any] = {"max_position_embeddings": 8192}
MODELS = {
  "SmolLM2-135M": models.TransformerConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    tie_word_embeddings=True,
    **_COMMON,
  ),
  "Qwen3-0.6B": models.TransformerConfig(
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    qk_norm=True,
    tie_word_embeddings=True,
    **_COMMON,
  ),
  "Llama-3.1-8B": models.TransformerConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    **_COMMON,
  ),
}
_PAGE_SIZE = 16


def missing(platform: str) -> str | None:
  """What is not installed that a platform needs; None if all is there."""
  if platform == "tpu":
    found = importlib.util.find_spec("libtpu")
    return None if found else "the wheel libtpu is not installed"
  if importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
    return "the wheels jax-cuda13-plugin and jax-cuda13-pjrt are not installed"
  return None if _ptxas() else "there is no ptxas (wheel nvidia-cuda-nvcc)"


def _ptxas() -> str | None:
  site = pathlib.Path(jax.__file__).parent.parent
  folders = [
    *map(os.path.dirname, glob.glob(f"{site}/nvidia/*/bin/ptxas")),
    *os.environ.get("PATH", "").split(os.pathsep),
    "/usr/local/cuda/bin",
  ]
  for folder in folders:
    if os.path.exists(os.path.join(folder, "ptxas")):
      return folder
  return None


def devices(platform: str, name: str) -> list[Any]:
  """Devices to compile for."""
  if platform == "tpu":
    import libtpu

    os.environ["TPU_LIBRARY_PATH"] = os.path.join(
      os.path.dirname(libtpu.__file__), "libtpu.so"
    )
    topology = topologies.get_topology_desc(platform="tpu", topology_name=name)
  else:
    folder = _ptxas()
    assert folder is not None
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
    topology = topologies.get_topology_desc(
      platform="cuda", target_config=_H100, topology="1x1x1"
    )
  return list(topology.devices)


def _placed(tree: Any, sharding: Any) -> Any:
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
  )


def _as_loaded(params: Any, device: Any) -> Any:
  """Shapes of the target's parameters with the layouts that `load` gives."""
  rows = Format(Layout((0, 1)), SingleDeviceSharding(device))

  def one(path, x):
    keys = [key.key for key in path]
    if not _sharding.by_rows(keys, x.shape):
      return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows)

  return jax.tree_util.tree_map_with_path(one, params)


def _copies(text: str, least: int) -> list[str]:
  """Copies of at least `least` numbers in a program."""
  found = []
  for dims in re.findall(r"= \w+\[([\d,]+)\]\S* copy\(", text):
    shape = [int(n) for n in dims.split(",")]
    if np.prod(shape) >= least:
      found.append(dims)
  return found


@dataclasses.dataclass(frozen=True)
class Program:
  """What stands in a compiled program."""

  name: str
  seconds: float
  kernels: int
  """Custom calls of Pallas."""
  copies: tuple[str, ...]
  """Shapes of copies as large as a layer's pages."""
  logits: bool
  """Whether there is an array of all logits, fp32, whatever branch is taken."""
  aliased: int
  """Arguments that are updated in place."""
  bytes_accessed: float
  """As XLA's cost analysis has it."""
  moved: int
  """To and from memory, of a TPU's program; see `traffic.py`."""
  temporary: int


def describe(name: str, lowered: Any, *, pool: int, vocab: int) -> Program:
  """Compiles, and says what came of it.

  Args:
    name: of the program.
    lowered: what to compile.
    pool: numbers of a layer's pages.
    vocab: V.
  """
  begin = time.perf_counter()
  compiled = lowered.compile()
  seconds = time.perf_counter() - begin
  text = compiled.as_text()
  header = text.split("\n", 1)[0]
  cost = compiled.cost_analysis() or {}
  found = traffic.Traffic(text, vocab)
  return Program(
    name=name,
    seconds=round(seconds, 1),
    kernels=len(
      re.findall(r'custom_call_target="(?:tpu_custom_call|mosaic_gpu)', text)
    ),
    copies=tuple(_copies(text, pool)),
    logits=found.must_hold_logits(),
    aliased=len(re.findall(r"(?:may|must)-alias", header)),
    bytes_accessed=float(cost.get("bytes accessed", 0.0)),
    moved=found.moved() if "S(1)" in text else 0,
    temporary=compiled.memory_analysis().temp_size_in_bytes,
  )


def attention(
  platform: str,
  device: Any,
  config: models.TransformerConfig,
  *,
  batch: int,
  nodes: int,
  columns: int,
  dtype: Any,
  window: bool = False,
) -> Any:
  """`prefix_attention` alone, lowered."""
  pages = batch * columns
  shapes: list[Any] = [
    ((batch, nodes, config.num_heads, config.head_dim), dtype),
    (
      (pages, config.num_kv_heads, _PAGE_SIZE, 2 * config.head_dim),
      dtype,
    ),
    ((batch, columns), jnp.int32),
    ((batch,), jnp.int32),
    ((batch, nodes), jnp.int32),
  ]
  arguments = [jax.ShapeDtypeStruct(*each) for each in shapes]

  def attend(query, pages, table, length, start):
    return pallas_kernels.prefix_attention(
      query,
      pages,
      table,
      length,
      scale=0.125,
      start=start if window else None,
      soft_cap=30.0 if window else None,
    )

  placed = _placed(arguments, SingleDeviceSharding(device))
  return jax.jit(attend).trace(*placed).lower(lowering_platforms=(platform,))


def scoring(
  platform: str,
  device: Any,
  config: models.TransformerConfig,
  *,
  rows: int,
  dtype: Any,
) -> Any:
  """`score` alone with the drawn token, lowered; E padded to 128."""
  width = -(-config.hidden_size // 128) * 128
  given = sampling.make_sampling(rows)
  shapes: Any = [
    ((rows, width), dtype),
    ((config.vocab_size, width), dtype),
    ((rows,), jnp.int32),
  ]
  arguments = [jax.ShapeDtypeStruct(*each) for each in shapes]
  given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given)

  def run(hidden, weight, position, given):
    return pallas_kernels.score(
      hidden, weight, k=8, sampling=given, position=position
    )

  placed = _placed((*arguments, given), SingleDeviceSharding(device))
  return jax.jit(run).trace(*placed).lower(lowering_platforms=(platform,))


def _empty_cache(batch: int, **sizes: Any) -> memory.PagedKVCache:
  return memory.PagedKVCache.create(batch=batch, **sizes)


def decode_step(
  platform: str,
  device: Any,
  config: models.TransformerConfig,
  *,
  batch: int,
  nodes: int,
  max_len: int,
  dtype: Any = jnp.bfloat16,
  cache_dtype: Any = None,
) -> Any:
  """A whole round on donated state, lowered."""
  target, params = models.functionalize(models.abstract_model(config, dtype))
  init_cache = functools.partial(
    _empty_cache,
    max_len=max_len,
    num_layers=config.num_layers,
    num_kv_heads=config.num_kv_heads,
    head_dim=config.head_dim,
    page_size=_PAGE_SIZE,
    dtype=dtype if cache_dtype is None else cache_dtype,
  )
  draft = decoding.root_only() if nodes == 1 else decoding.ngram(nodes - 1)
  assert draft.size == nodes, draft.size
  decoder = decoding.speculative(target, draft, init_cache, max_len=max_len)
  weights = decoding.DecoderParams(params)
  state = jax.eval_shape(lambda w: decoder.empty(w, batch), weights)
  weights, state = _placed((weights, state), SingleDeviceSharding(device))
  if platform == "tpu":
    weights = weights._replace(target=_as_loaded(weights.target, device))
  step = jax.jit(decoder.step, donate_argnums=1)
  return step.trace(weights, state).lower(lowering_platforms=(platform,))


def step_program(
  platform: str, device: Any, name: str, *, batch: int, nodes: int, max_len: int
) -> Program:
  """A whole round of one of `MODELS`."""
  config = MODELS[name]
  lowered = decode_step(
    platform, device, config, batch=batch, nodes=nodes, max_len=max_len
  )
  columns = -(-max_len // _PAGE_SIZE)
  pool = batch * columns * config.num_kv_heads * _PAGE_SIZE * 2
  return describe(
    f"step {name} batch {batch} nodes {nodes} length {max_len}",
    lowered,
    pool=pool * config.head_dim,
    vocab=config.vocab_size,
  )


def least_bytes(name: str, batch: int, length: int) -> float:
  """Weights once, and every live page once."""
  config = MODELS[name]
  params = models.abstract_params(config, jnp.bfloat16)
  weights = sum(x.size * 2 for x in jax.tree.leaves(params))
  row = config.num_layers * config.num_kv_heads * 2 * config.head_dim * 2
  return weights + batch * length * row


def _kernels(
  platform: str, device: Any, name: str, config: models.TransformerConfig
) -> Any:
  pool = 8 * 256 * config.num_kv_heads * _PAGE_SIZE * 2 * config.head_dim
  rows = 64
  for dtype in (jnp.bfloat16, jnp.float32):
    for window in (False, True):
      yield describe(
        f"attention {name} {jnp.dtype(dtype).name}"
        f"{' window and cap' if window else ''}",
        attention(
          platform,
          device,
          config,
          batch=8,
          nodes=32,
          columns=256,
          dtype=dtype,
          window=window,
        ),
        pool=pool,
        vocab=config.vocab_size,
      )
    yield describe(
      f"score {name} {jnp.dtype(dtype).name}",
      scoring(platform, device, config, rows=rows, dtype=dtype),
      pool=config.vocab_size * config.hidden_size,
      vocab=config.vocab_size,
    )


def programs(platform: str, only: str | None) -> Any:
  """Compiles one after the other."""
  if platform == "tpu":
    small, large = devices("tpu", "v5e:2x2"), devices("tpu", "v5p:2x2x1")
    place = {"Llama-3.1-8B": large[0]}
  else:
    small, place = devices("cuda", ""), {}
  for name, config in MODELS.items():
    device = place.get(name, small[0])
    if only in (None, "kernels"):
      yield from _kernels(platform, device, name, config)
    if only in (None, name):
      yield step_program(
        platform, device, name, batch=8, nodes=32, max_len=2048
      )


def byte_table(device: Any) -> Any:
  """Rows of the table of bytes."""
  for name in ("SmolLM2-135M", "Qwen3-0.6B"):
    for batch in (1, 8):
      for length in (512, 4096):
        program = step_program(
          "tpu", device, name, batch=batch, nodes=32, max_len=length
        )
        least = least_bytes(name, batch, length)
        yield {
          "model": name,
          "batch": batch,
          "length": length,
          "least_mb": round(least / 1e6, 1),
          "moved_mb": round(program.moved / 1e6, 1),
          "ratio": round(program.moved / least, 2),
          "analysis_mb": round(program.bytes_accessed / 1e6, 1),
        }


def formula_table(device: Any) -> Any:
  """Rows of the table that sets programs against a formula."""
  for name in ("SmolLM2-135M", "Qwen3-0.6B"):
    config = MODELS[name]
    params = models.abstract_params(config, jnp.bfloat16)
    for batch, nodes, length in (
      *((1, 1, 512), (1, 8, 512), (1, 32, 512)),
      *((8, 8, 512), (1, 8, 4096)),
    ):
      shape = {"batch": batch, "nodes": nodes}
      lowered = decode_step("tpu", device, config, **shape, max_len=length)
      cost = lowered.compile().cost_analysis()
      work = profile.step_work(
        config,
        params,
        size=nodes,
        batch=batch,
        context=length,
        cache_dtype="bfloat16",
      )
      yield {
        "model": name,
        **shape,
        "length": length,
        "formula_mb": round(work.bytes / 1e6, 1),
        "bytes_ratio": round(cost["bytes accessed"] / work.bytes, 2),
        "formula_gflop": round(work.flops / 1e9, 3),
        "flops_ratio": round(cost["flops"] / work.flops, 2),
      }


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("platform", choices=["tpu", "cuda"])
  parser.add_argument("--bytes", action="store_true")
  parser.add_argument("--formula", action="store_true")
  parser.add_argument(
    "--only",
    choices=["kernels", *MODELS],
    help="the kernels alone, or one model's decode step alone",
  )
  arguments = parser.parse_args()
  lacking = missing(arguments.platform)
  if lacking:
    print(f"not compiled for {arguments.platform}: {lacking}")
    return 3
  if arguments.bytes:
    rows = byte_table(devices("tpu", "v5e:2x2")[0])
  elif arguments.formula:
    rows = formula_table(devices("tpu", "v5e:2x2")[0])
  else:
    rows = map(dataclasses.asdict, programs(arguments.platform, arguments.only))
  for row in rows:
    print(json.dumps(row), flush=True)
  return 0


if __name__ == "__main__":
  sys.exit(main())
