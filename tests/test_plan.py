"""`ldjax.plan`: what it refuses at once, and a whole search on a tiny model."""

import json

import jax
import pytest
import typer.testing

import ldjax
from ldjax import _plan, cli, optimize


@pytest.mark.parametrize(
  ("bad", "match"),
  [
    ({"batch_size": 0}, "batch_size is 0"),
    ({"parallelism": 0}, "parallelism is 0"),
    ({"max_kl": -1}, "max_kl is -1"),
    ({"max_kl": float("nan")}, "max_kl is nan"),
    ({"max_changed": 1.5}, "max_changed 1.5"),
    ({"max_len": 9}, "max_len is 9"),
    ({"passes": ["fusion", "magic"]}, "pass 'magic' is not known"),
    ({"prompts": []}, "no prompts"),
    ({"memory_budget": "24 apples"}, "24 apples"),
  ],
)
def test_refused_before_anything_is_read(bad, match, tmp_path):
  with pytest.raises(ValueError, match=match):
    ldjax.plan(tmp_path / "nothing", **bad)


def test_devices_that_are_not_there(monkeypatch, tiny_folder):
  class Chip:
    platform = "tpu"
    device_kind = "TPU v9"

  lines = []
  shape, found = _plan._choose_mesh(tiny_folder, 3, 1, {}, lines.append)
  assert shape is None and found["change"] == "one device"
  assert "xla_force_host_platform_device_count=3" in lines[0]
  monkeypatch.setattr(jax, "local_devices", lambda: [Chip()])
  with pytest.raises(ValueError, match="this machine has 1 TPU v9"):
    _plan._choose_mesh(tiny_folder, 3, 1, {}, lines.append)


@pytest.fixture
def run(monkeypatch, tmp_path):
  """The command line with a compilation cache and measurements of its own."""
  monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "xla"))
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  monkeypatch.setenv("COLUMNS", "200")
  runner = typer.testing.CliRunner()
  return lambda *args: runner.invoke(cli.app, list(map(str, args)))


@pytest.mark.slow
def test_the_command(run, tiny_folder, tmp_path, monkeypatch):
  monkeypatch.setattr(_plan, "_NOT_SLOWER", 0.0)  # who wins is chance here
  path = tmp_path / "plan.json"
  known = "--model-path", tiny_folder, "--memory-budget", "2GB"
  done = run(
    "optimize",
    *known,
    *("--batch-size", 2, "--parallelism", 4, "--max-kl", 0.05),
    *("--max-len", 128, "--draft", "none", "--output", path),
  )
  assert done.exit_code == 0, done.output
  assert "A plan for" in done.output
  plan = optimize.DecodePlan.read(path)
  says = json.loads(path.read_text())["evidence"]
  assert list(says) == [
    "devices",
    "fusion",
    "precision",
    "pages",
    "tree",
    "kept",
  ]
  assert says["precision"]["kl_bound"] <= 0.05
  assert says["pages"]["initial_pages"] == plan.initial_pages
  assert set(says["tree"]["projected_by_batch"]) == {"1", "2"}
  assert plan.batch_size == 2 and plan.max_len == 128
  low, middle, high = plan.tokens_per_second["ratio"]
  assert 0 < low <= middle <= high
  done = run(
    "generate",
    "hello",
    *("--model", tiny_folder, "--plan", path, "--max-new-tokens", 5, "--json"),
  )
  assert done.exit_code == 0, done.output
  assert len(json.loads(done.stdout)["tokens"]) <= 5


def test_no_folder_for_the_plan(run, tiny_folder, tmp_path):
  done = run(
    "optimize", "--model-path", tiny_folder, "--output", tmp_path / "a" / "b"
  )
  assert done.exit_code == 2
  assert "there is no folder to write it to" in done.output
