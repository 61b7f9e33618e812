"""`ldjax memory` and `ldjax bench memory`."""

import json

import pytest
import typer.testing

from ldjax import cli

_runner = typer.testing.CliRunner()


@pytest.fixture
def run(monkeypatch):
  monkeypatch.setenv("COLUMNS", "200")

  def run(*words):
    return _runner.invoke(cli.app, [str(word) for word in words])

  return run


def test_report(run, tiny_folder):
  words = ("--model", tiny_folder, "--max-len", 64, "--budget", "10MB")
  result = run("memory", *words)
  assert result.exit_code == 0
  for part in (
    "sequences of 64 tokens that fit",
    "8 of them",
    "9.5 MiB",
    "float32",
  ):
    assert part in result.stdout
  found = json.loads(run("memory", *words, "--json").stdout)
  # 2 layers, 1 head of 8 numbers, keys and values, 16 positions, 4 bytes.
  assert found["page_bytes"] == 2 * 2 * 8 * 16 * 4
  left = 10_000_000 - found["parameter_bytes"]
  assert found["pages"] == left // found["page_bytes"]
  assert found["sequences"] == found["pages"] // 4
  narrow = run("memory", *words, "--json", "--cache-dtype", "int8")
  assert json.loads(narrow.stdout)["sequences"] > 2 * found["sequences"]


def test_nothing_fits(run, tiny_folder):
  result = run("memory", "--model", tiny_folder, "--budget", "1KB")
  assert result.exit_code == 0
  assert "Not all 8 fit at that length" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
  ("words", "message"),
  [
    (("--budget", "lots"), "like 24GB"),
    (("--cache-dtype", "int3"), "int8"),
  ],
)
def test_refused(run, tiny_folder, words, message):
  result = run("memory", "--model", tiny_folder, *words)
  assert result.exit_code == 2
  assert message in " ".join(result.stderr.split())


@pytest.mark.slow
def test_bench(run, tiny_folder, tmp_path):
  out = tmp_path / "out.json"
  words = ("--requests", 12, "--rows", 2, "--json", out)
  result = run("bench", "memory", "--model", tiny_folder, *words)
  assert result.exit_code == 0
  assert "pages, same bytes" in result.stdout
  found = json.loads(out.read_text())
  assert {"waste", "fragmentation", "concurrency_ratio"} <= set(found)


def test_bench_without_prompts(run):
  result = run("bench")
  assert result.exit_code == 2
  assert "Usage" in result.stderr
  assert "--prompts: give a file" in result.stderr
