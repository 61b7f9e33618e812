"""What importing ldjax does, and does not do, to the process."""

import importlib.resources
import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

# The libraries below ldjax come first: what they do is not ours to answer for.
_DEPENDENCIES = (
  "chex, flax.nnx, gguf, huggingface_hub, jax, jinja2, optax, orbax.checkpoint,"
  " rich, safetensors, tokenizers, typer"
)
_PROGRAM = f"""
import os, sys
import {_DEPENDENCIES}
if {{everything}}:
  # Ours imports it when a kernel for a GPU is traced, and not before.
  import jax.experimental.pallas.mosaic_gpu
before = dict(os.environ)
import importlib, pkgutil
import ldjax
names = ["ldjax"]
if {{everything}}:
  names += sorted(
    module.name
    for module in pkgutil.walk_packages(ldjax.__path__, "ldjax.")
    # JAX's Mosaic GPU sets a variable; ldjax imports it when it is used.
    if not module.name.endswith(("__main__", "_mosaic_gpu"))
  )
else:
  assert "jax.experimental.pallas.mosaic_gpu" not in sys.modules
for name in names:
  importlib.import_module(name)
changed = {{{{
  key
  for key in before.keys() | os.environ.keys()
  if before.get(key) != os.environ.get(key)
}}}}
assert not changed, f"import changed the environment: {{{{changed}}}}"
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized(), "import started a backend"
"""


def _run(program: str, folder: pathlib.Path) -> subprocess.CompletedProcess:
  # The same ldjax as here, whether installed or found on the path.
  spec = importlib.util.find_spec("ldjax")
  assert spec is not None and spec.origin is not None
  found = str(pathlib.Path(spec.origin).parent.parent)
  return subprocess.run(
    [sys.executable, "-W", "error", "-c", program],
    capture_output=True,
    text=True,
    cwd=folder,
    env={**os.environ, "PYTHONPATH": found},
    timeout=300,
  )


@pytest.mark.parametrize("everything", [False, True], ids=["top", "all"])
def test_import_is_without_effect(everything, tmp_path):
  done = _run(_PROGRAM.format(everything=everything), tmp_path)
  assert done.returncode == 0, done.stderr
  assert done.stdout == ""
  assert done.stderr == ""
  assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_check_would_notice(tmp_path):
  program = _PROGRAM.format(everything=False)
  start = program.replace(
    "import ldjax\n", "import ldjax\njax.numpy.zeros(3)\n"
  )
  assert "started a backend" in _run(start, tmp_path).stderr
  touch = program.replace(
    "import ldjax\n", "import ldjax\nos.environ['LDJAX_PROBE'] = '1'\n"
  )
  assert "changed the environment" in _run(touch, tmp_path).stderr


def test_data_files_are_installed():
  root = importlib.resources.files("ldjax")
  assert (root / "py.typed").is_file()
  assert (root / "decoding" / "medusa_choices.json").is_file()
