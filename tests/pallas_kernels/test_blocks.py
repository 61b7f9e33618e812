"""Sizes of steps: told, measured, guessed."""

import json
import pathlib

import jax
import pytest

from ldjax import models, optimize, pallas_kernels
from ldjax.pallas_kernels import _blocks

_PROBLEM = pallas_kernels.PrefixProblem(
  head_dim=64,
  kv_heads=3,
  page_size=16,
  rows=96,
  query_dtype="bfloat16",
  page_dtype="bfloat16",
)


@pytest.fixture
def folder(monkeypatch, tmp_path):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  _blocks._read.cache_clear()
  yield tmp_path
  _blocks._read.cache_clear()


def test_told_then_measured_then_guessed(folder, monkeypatch):
  kind = jax.devices()[0].device_kind
  monkeypatch.setattr(_blocks, "device_kind", lambda platform: kind)
  guess = _blocks.guess_prefix(_PROBLEM)
  assert _blocks.choose_prefix(_PROBLEM, "tpu", None) == guess
  measured = pallas_kernels.PrefixBlocks(step_pages=3, kv_heads=1)
  path = pallas_kernels.write_tuned(
    kind, {"prefix_attention": {_PROBLEM.key: measured}}
  )
  assert path.is_relative_to(folder)
  assert json.loads(path.read_text())["device"] == kind
  assert _blocks.choose_prefix(_PROBLEM, "tpu", None) == measured
  told = pallas_kernels.PrefixBlocks(step_pages=7)
  assert _blocks.choose_prefix(_PROBLEM, "tpu", told) == told
  # A second measurement adds to the first.
  score = pallas_kernels.ScoreProblem(width=128, rows=3, dtype="float32")
  tile = pallas_kernels.ScoreBlocks(vocab_tile=256)
  pallas_kernels.write_tuned(kind, {"score": {score.key: tile}})
  assert _blocks.choose_prefix(_PROBLEM, "tpu", None) == measured
  assert _blocks.choose_score(score, "tpu", None) == tile


def test_another_platform_is_guessed(folder):
  assert _blocks.device_kind("no such platform") is None


def test_a_broken_file_is_named(folder, monkeypatch):
  monkeypatch.setattr(_blocks, "device_kind", lambda platform: "odd kind/1")
  path = _blocks.tuned_path("odd kind/1")
  path.parent.mkdir(parents=True)
  path.write_text('{"prefix_attention": {"x": {"step_pages": 0}}}')
  with pytest.warns(UserWarning, match="tune-kernels"):
    found = _blocks.choose_prefix(_PROBLEM, "tpu", None)
  assert found == _blocks.guess_prefix(_PROBLEM)


@pytest.mark.parametrize("value", [0, -1, 1.5])
def test_sizes_below_one(value):
  with pytest.raises(ValueError, match=f"step_pages is {value}"):
    pallas_kernels.PrefixBlocks(step_pages=value)


def test_heads_and_rows_are_split_evenly():
  blocks = pallas_kernels.PrefixBlocks(step_pages=1, query_rows=64, kv_heads=8)
  assert [blocks.head_block(n) for n in (1, 3, 8, 9, 32)] == [1, 3, 8, 3, 8]
  assert blocks.query_tile(96, 16) == 48
  assert blocks.query_tile(5, 8) == 8


def test_the_fastest_sizes_are_kept():
  """With a clock that likes one candidate of each."""
  config = models.TransformerConfig(
    vocab_size=300,
    hidden_size=24,
    intermediate_size=40,
    num_layers=1,
    num_heads=6,
    num_kv_heads=2,
    head_dim=64,
    max_position_embeddings=64,
  )
  calls = []

  def timer(function, arguments):
    text = function.trace(*arguments).lower(lowering_platforms=("tpu",))
    assert "tpu_custom_call" in text.as_text()
    calls.append(len(calls))
    return {2: 0.1, 9: 0.2}.get(calls[-1], 1.0)

  found = optimize.tune_kernels(
    config, length=512, timer=timer, say=lambda line: None
  )
  (prefix,) = found["prefix_attention"].values()
  (score,) = found["score"].values()
  assert prefix == pallas_kernels.PrefixBlocks(step_pages=8, kv_heads=2)
  assert score == pallas_kernels.ScoreBlocks(vocab_tile=512)


def test_the_guide_shows_the_limits():
  """A row a backend, with its dtypes and sizes."""
  guide = pathlib.Path(__file__).parents[2] / "docs" / "guides" / "kernels.md"
  rows = [
    [cell.strip(" `") for cell in line.split("|")[1:-1]]
    for line in guide.read_text("utf-8").splitlines()
    if line.startswith(("| `prefix_attention`", "| `score`"))
  ]
  assert len(rows) == len(pallas_kernels.LIMITS)
  for row, entry in zip(rows, pallas_kernels.LIMITS, strict=True):
    assert row[:2] == [entry.kernel, entry.implementation]
    assert row[3] == ", ".join(entry.dtypes)
    if entry.implementation != "xla" and not entry.same_dtype:
      assert row[4] == (", ".join(entry.page_dtypes) or "–")
    for size in (*(entry.head_dims or ()), *(entry.page_sizes or ())):
      assert str(size) in row[5]
    assert row[7] == entry.since


def test_commands(capsys):
  from ldjax import cli

  with pytest.raises(SystemExit) as done:
    cli.app(["kernels"], standalone_mode=True)
  assert done.value.code in (0, None)
  assert "mosaic_gpu" in capsys.readouterr().out
  with pytest.raises(SystemExit) as done:
    cli.app(["tune-kernels"], standalone_mode=True)
  assert done.value.code in (0, None)
  assert "nothing to tune" in capsys.readouterr().err
