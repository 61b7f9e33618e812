"""The anonymous memory that converting takes, over what was there before.

Run: `python benchmarks/convert_memory.py --layers 24`. It writes a random model
of about 2 GB in a temporary folder, converts it in a process of its own, and
prints the peak.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import jax
import numpy as np

from ldjax import models
from ldjax.checkpoints import _write

_PROGRAM = """
import pathlib, sys, threading, time
import ldjax

def anonymous():
  for line in pathlib.Path("/proc/self/status").read_text().splitlines():
    if line.startswith("RssAnon"):
      return int(line.split()[1]) / 1024

before, peak, done = anonymous(), 0.0, False

def watch():
  global peak
  while not done:
    peak = max(peak, anonymous())
    time.sleep(0.01)

thread = threading.Thread(target=watch)
thread.start()
ldjax.convert(sys.argv[1], sys.argv[2], to=sys.argv[3])
done = True
thread.join()
print(f"{peak - before:.0f}")
"""


def _config(layers: int) -> dict[str, object]:
  return {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": layers,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
  }


def _write_model(folder: pathlib.Path, layers: int) -> tuple[int, int]:
  """Writes the model; bytes in all, and of the largest tensor."""
  from ldjax import checkpoints

  folder.mkdir()
  (folder / "config.json").write_text(json.dumps(_config(layers)))
  shapes = models.abstract_params(checkpoints.read_config(folder))
  leaves = jax.tree_util.tree_leaves_with_path(shapes)
  rng = np.random.default_rng(0)
  half = np.dtype(np.float16)

  def source(shape: tuple[int, ...]) -> _write.Source:
    return _write.Source(
      shape, half, lambda: rng.random(shape, np.float32).astype(half)
    )

  sources = {
    "model." + ".".join(str(part.key) for part in path): source(leaf.shape)
    for path, leaf in leaves
  }
  _write.write_safetensors(folder / "model.safetensors", sources)
  sizes = [2 * leaf.size for _, leaf in leaves]
  return sum(sizes), max(sizes)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--layers", type=int, default=24)
  options = parser.parse_args()
  with tempfile.TemporaryDirectory() as name:
    work = pathlib.Path(name)
    total, largest = _write_model(work / "model", options.layers)
    for to in ("orbax", "hf"):
      done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, work / "model", work / to, to],
        capture_output=True,
        text=True,
        check=True,
      )
      print(
        f"{to}: {total / 2**20:.0f} MiB of weights, largest tensor"
        f" {largest / 2**20:.0f} MiB, peak of anonymous memory over the start"
        f" {done.stdout.strip()} MiB"
      )


if __name__ == "__main__":
  main()
