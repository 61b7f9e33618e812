"""`ldjax bench` and its subcommands: tables, Markdown, refusals."""

import json

import pytest
import typer.testing

from ldjax import bench, cli
from ldjax.cli import _bench, _tables


def test_tables(capsys):
  columns, rows = ["method", "tokens/s"], [["one", "2.5"], ["two", "-"]]
  _tables.show("a title", columns, rows, markdown=True)
  assert capsys.readouterr().out.splitlines() == [
    "| method | tokens/s |",
    "| --- | --- |",
    "| one | 2.5 |",
    "| two | - |",
  ]
  _tables.show("a title", columns, rows)
  text = capsys.readouterr().out
  assert "a title" in text and "tokens/s" in text and "2.5" in text


def test_a_row_of_the_comparison(capsys):
  row = {
    "draft": "ngram",
    "tokens_per_second": 12.345,
    "speedup": None,
    "over": {"medusa2": 3.1749},
    "mean_accepted": 1.5,
    "time_to_first_token_s": 0.126,
    "peak_cache_bytes": 5_250_000,
    "flops_per_token": 1.5e9,
    "bytes_per_token": None,
    "equal": [2, 3],
    "near_ties": 1,
  }
  report = {
    "model": "m",
    "device": "cpu",
    "prompts": 3,
    "max_new_tokens": 4,
    "batch_size": 1,
    "methods": {"ngram": row},
  }
  _bench._show(report, markdown=True)
  head, _, line = capsys.readouterr().out.splitlines()
  cells = dict(
    zip(
      head.strip("| ").split(" | "), line.strip("| ").split(" | "), strict=True
    )
  )
  assert cells == {
    "method": "ngram",
    "tokens/s": "12.3",
    "speedup": "-",
    "over medusa2": "3.17",
    "mean accepted": "1.50",
    "first token s": "0.13",
    "peak cache MB": "5.2",
    "GFLOP/token": "1.50",
    "GB/token": "-",
    "equal": "2/3",
    "near ties": "1",
  }


def _run(*arguments, code=0):
  result = typer.testing.CliRunner().invoke(cli.app, [*map(str, arguments)])
  assert result.exit_code == code, result.output
  return result


@pytest.mark.slow
def test_first_token(tiny_folder, tmp_path):
  out = tmp_path / "out.json"
  result = _run(
    *("bench", "first-token", "--model", tiny_folder, "--rounds", 1),
    *("--methods", "autoregressive", "--markdown", "--json", out),
  )
  [line] = result.stdout.splitlines()[2:]
  assert line.startswith("| autoregressive | ")
  assert set(json.loads(out.read_text())["methods"]) == {"autoregressive"}


@pytest.mark.slow
def test_last_words(tiny_folder, tmp_path):
  passages = tmp_path / "passages.jsonl"
  passages.write_text('{"text": "one two"}\n{"text": "three four"}\n')
  result = _run(
    *("bench", "last-words", "--model", tiny_folder, "--passages", passages),
    *("--methods", "autoregressive", "--dtypes", "float32", "--markdown"),
  )
  assert result.stdout.splitlines()[2:] == [
    "| autoregressive | float32 | 0.0% | 2/2 |"
  ]


def test_files_are_looked_at_before_the_work(
  tiny_folder, tmp_path, monkeypatch
):
  monkeypatch.setattr(bench, "make_methods", lambda *_, **__: pytest.fail())
  none = tmp_path / "none"
  for command in (
    ("first-token", "--json", none / "out.json"),
    ("last-words", "--passages", none),
  ):
    result = _run("bench", *command, "--model", tiny_folder, code=2)
    assert str(none) in result.stderr.replace("\n", "")
