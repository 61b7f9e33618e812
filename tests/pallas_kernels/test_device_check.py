"""The script for a real device, on this one."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def _run(*arguments):
  return subprocess.run(
    [sys.executable, str(_ROOT / "benchmarks/device_check.py"), *arguments],
    capture_output=True,
    text=True,
    env={**os.environ, "JAX_PLATFORMS": "cpu"},
    check=False,
  )


@pytest.mark.slow
def test_dry_run():
  done = _run("--dry", "--parts", "suite,kernels")
  assert done.returncode == 0, done.stdout + done.stderr
  rows = [json.loads(line) for line in done.stdout.splitlines()]
  assert [row.get("part") for row in rows] == [
    None,
    "suite",
    "kernels",
    "kernels",
  ]
  assert rows[2]["xla us"] > 0


@pytest.mark.slow
def test_a_cpu_is_no_accelerator():
  done = _run()
  assert done.returncode == 2 and "no accelerator" in done.stdout
