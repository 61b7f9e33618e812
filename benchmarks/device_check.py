"""Everything there is to check on a real accelerator, in one go.

    python benchmarks/device_check.py            # on a GPU or TPU, 8 minutes
    python benchmarks/device_check.py --dry      # a minute on a CPU, tiny sizes

1. the suite of the backends, compiled for the device;
2. the kernels against XLA's path over batch, length and size of tree, with the
   share of the device's memory bandwidth where it is told;
3. tokens a second of the demo model, plain and speculative (the same text).

A line of JSON a result. A part that fails is reported, and the next one runs.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import ldjax
from ldjax import pallas_kernels

_ROOT = pathlib.Path(__file__).resolve().parent.parent


def _seconds(function: Callable[..., Any], arguments: Any, repeats: int) -> Any:
  jax.block_until_ready(function(*arguments))
  times = []
  for _ in range(repeats):
    begin = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    times.append(time.perf_counter() - begin)
  return statistics.median(times)


def suite(dry: bool) -> Iterator[dict[str, Any]]:
  """The tests; in the dry run one of them."""
  command = [
    sys.executable,
    "-m",
    "pytest",
    "-q",
    "-n",
    "0",
    str(_ROOT / "tests/pallas_kernels/test_backends.py"),
    "-k",
    "refusal" if dry else "definition or matrix or pages or queries",
  ]
  begin = time.perf_counter()
  try:
    done = subprocess.run(
      command,
      cwd=_ROOT,
      capture_output=True,
      text=True,
      timeout=200,
      check=False,
    )
    code, text = done.returncode, done.stdout
  except subprocess.TimeoutExpired as error:
    code, text = 124, (error.stdout or b"").decode()
  yield {
    "exit": code,
    "seconds": round(time.perf_counter() - begin, 1),
    "last": text.strip().splitlines()[-25 if code else -1 :],
  }


def kernels(dry: bool) -> Iterator[dict[str, Any]]:
  """Times of one layer's attention, and of scoring."""
  platform = jax.default_backend()
  own = {"gpu": "mosaic_gpu", "tpu": "mosaic_tpu"}.get(platform)
  names = ["xla", *([own] if own else [])]
  heads, kv_heads, head_dim = (4, 2, 64) if dry else (32, 8, 128)
  batches, lengths, sizes = (
    ((1,), (64,), (4,)) if dry else ((1, 8), (512, 4096), (1, 32, 64))
  )
  dtype = jnp.bfloat16
  for batch in batches:
    for length in lengths:
      columns = length // 16
      pages = jnp.ones((batch * columns, kv_heads, 16, 2 * head_dim), dtype)
      table = jnp.arange(batch * columns, dtype=jnp.int32)
      for nodes in sizes:
        arguments = (
          jnp.ones((batch, nodes, heads, head_dim), dtype),
          pages,
          table.reshape(batch, columns),
          jnp.full((batch,), length, jnp.int32),
        )
        row: dict[str, Any] = {"batch": batch, "length": length, "nodes": nodes}
        for name in names:
          attend = jax.jit(
            lambda *x, name=name: pallas_kernels.prefix_attention(
              *x, scale=0.1, implementation=name
            )
          )
          taken = _seconds(attend, arguments, 3 if dry else 20)
          row[f"{name} us"] = round(1e6 * taken, 1)
          row[f"{name} GB/s"] = round(pages.nbytes / taken / 1e9, 1)
        yield row
  rows, width, vocab = (4, 64, 1000) if dry else (32, 4096, 128256)
  arguments = jnp.ones((rows, width), dtype), jnp.ones((vocab, width), dtype)
  for name in ["xla", *(["mosaic_tpu"] if platform == "tpu" else [])]:
    scoring = jax.jit(
      lambda *x, name=name: pallas_kernels.score(*x, k=8, implementation=name)
    )
    taken = _seconds(scoring, arguments, 3 if dry else 20)
    yield {"score": name, "us": round(1e6 * taken, 1)}


def decoding(dry: bool) -> Iterator[dict[str, Any]]:
  """Tokens a second of the demo model."""
  model = ldjax.load("demo")
  tokens = 16 if dry else 256
  prompt = "Write a short story about a lighthouse."
  texts = set()
  for name in ("none", "auto"):
    each = ldjax.with_draft(model, name)
    for _ in range(2):  # the first compiles
      begin = time.perf_counter()
      made = ldjax.generate(each, prompt, max_new_tokens=tokens)
      taken = time.perf_counter() - begin
    texts.add(made.text)
    yield {"draft": name, "tokens/s": round(len(made.tokens) / taken, 1)}
  yield {"same text": len(texts) == 1}


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--dry", action="store_true")
  parser.add_argument("--parts", default="suite,kernels,decoding")
  arguments = parser.parse_args()
  device = jax.devices()[0]
  if device.platform == "cpu" and not arguments.dry:
    print("there is no accelerator here; --dry runs the script on this CPU")
    return 2
  print(json.dumps({"device": device.device_kind, "jax": jax.__version__}))
  parts = {"suite": suite, "kernels": kernels, "decoding": decoding}
  failed = 0
  for name in arguments.parts.split(","):
    try:
      for row in parts[name](arguments.dry):
        failed += bool(row.get("exit"))
        print(json.dumps({"part": name, **row}), flush=True)
    except Exception:
      failed += 1
      print(json.dumps({"part": name, "error": traceback.format_exc()[-2000:]}))
  return int(failed > 0)


if __name__ == "__main__":
  sys.exit(main())
