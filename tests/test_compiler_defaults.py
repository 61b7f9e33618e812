"""Law 1 in programs compiled as users compile them; conftest.py is in haste."""

import os
import pathlib
import subprocess
import sys

import pytest

_REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
_DEFAULTS = (
  "--xla_backend_optimization_level=3 --xla_cpu_use_fusion_emitters=true"
)
# Wide against narrow: trees against single tokens, windows and caps, keys and
# values that are rounded, greedy and sampled.
_TESTS = (
  "tests/decoding/test_lossless.py::test_narrow_cache[bfloat16-random tree]",
  "tests/models/test_lossless.py::"
  "test_no_draft_changes_a_token[Gemma 2-random trees-0.0]",
  "tests/models/test_lossless.py::"
  "test_no_draft_changes_a_token[Gemma 2-random trees-1.0]",
)


@pytest.mark.slow
def test_no_draft_changes_a_token():
  environment = {
    key: value
    for key, value in os.environ.items()
    if not key.startswith("PYTEST_")
  }
  done = subprocess.run(
    [sys.executable, "-m", "pytest", "-q", "-n", "0", *_TESTS],
    capture_output=True,
    text=True,
    cwd=_REPOSITORY,
    env={**environment, "XLA_FLAGS": _DEFAULTS},
    timeout=900,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  assert f"{len(_TESTS)} passed" in done.stdout
