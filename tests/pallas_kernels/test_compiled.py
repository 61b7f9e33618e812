"""What the compilers for TPU and CUDA make of the kernels and of a round.

Each compiles in a process of its own: its libraries want to be the only ones.
"""

import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

_SCRIPT = (
  pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "compiled.py"
)


def _wanted(platform):
  names = {"tpu": ("libtpu",), "cuda": ("jax_plugins", "nvidia")}[platform]
  for name in names:
    if importlib.util.find_spec(name) is None:
      pytest.skip(f"no compiler for {platform}: install ldjax[aot-{platform}]")


def _programs(platform, only):
  _wanted(platform)
  done = subprocess.run(
    [sys.executable, str(_SCRIPT), platform, "--only", only],
    capture_output=True,
    text=True,
    timeout=900,
    check=False,
  )
  if done.returncode == 3:
    pytest.skip(done.stdout.strip())
  assert done.returncode == 0, done.stderr[-4000:]
  lines = [x for x in done.stdout.splitlines() if x.startswith("{")]
  return [json.loads(line) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_kernels(platform):
  programs = _programs(platform, "kernels")
  assert len(programs) == 18
  for program in programs:
    name = program["name"]
    # Nothing as large as the pool, or as the output matrix, is moved about.
    assert not program["copies"], program
    # XLA on a GPU: fp32 attention, and scoring.
    has_kernel = platform == "tpu" or (
      name.startswith("attention") and "float32" not in name
    )
    assert program["kernels"] == has_kernel, program
    if name.startswith("score"):
      assert not program["logits"], program


_STEPS = [
  ("SmolLM2-135M", 30),
  ("Qwen3-0.6B", 28),
  ("Llama-3.1-8B", 32),
]


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize(("model", "layers"), _STEPS)
def test_a_round_of_32_nodes(platform, model, layers):
  (program,) = _programs(platform, model)
  # Every layer's pages are updated in place, as is the rest of the state.
  assert program["aliased"] >= layers
  assert not program["copies"]
  # On a TPU `score` draws, and all logits stand in a branch of their own.
  on_tpu = platform == "tpu"
  assert program["kernels"] == layers + on_tpu
  assert program["logits"] == (not on_tpu)
