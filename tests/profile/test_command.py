"""`ldjax profile` around a report that is made up."""

import json

import pytest
import typer.testing

from ldjax import cli, profile


@pytest.fixture
def run(monkeypatch):
  monkeypatch.setenv("COLUMNS", "300")
  monkeypatch.setenv("NO_COLOR", "1")

  def run(*words):
    return typer.testing.CliRunner().invoke(
      cli.app, ["profile", *map(str, words)]
    )

  return run


@pytest.fixture
def prompts(tmp_path):
  file = tmp_path / "prompts.jsonl"
  file.write_text('{"prompt": "hello"}\n{"text": "x"}\n{"text": "y"}\n')
  return file


def test_all_that_is_asked_for_is_written(
  run, report, prompts, tiny_folder, tmp_path, monkeypatch
):
  report["advice"] = profile.advise(report)
  asked = {}

  def made_up(model, texts, settings, **options):
    asked.update(options, texts=texts, tokens=settings.max_new_tokens)
    asked["draft"] = model.draft.size
    return report

  monkeypatch.setattr(profile, "profile", made_up)
  monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "xla"))
  out, page = tmp_path / "out.json", tmp_path / "page.html"
  result = run(
    *("--prompts", prompts, "--limit", 2, "--model", tiny_folder),
    *("--draft", "ngram", "--tree", "chain:2", "--max-new-tokens", 9),
    *("--batch-size", 2, "--rounds", 3, "--project", "--trace", tmp_path),
    *("--json", out, "--html", page),
  )
  assert result.exit_code == 0, result.output
  assert json.loads(out.read_text()) == report
  assert page.read_text() == profile.to_html(report)
  del asked["progress"]
  assert asked == {
    "texts": ["hello", "x"],
    "tokens": 9,
    "draft": 3,
    "batch_size": 2,
    "rounds": 3,
    "project": True,
    "trace": tmp_path,
  }
  for part in ("What would help most", "30.00 / 20.00", "57.1%", "at most"):
    assert part in result.stdout
  assert f"Wrote {page}" in result.stderr


@pytest.mark.parametrize(
  ("words", "message"),
  [
    (["--json", "none/out.json"], "there is no folder to write it to"),
    (["--html", "none/out.html"], "there is no folder to write it to"),
    (["--trace", "FILE"], "is a file; give a folder for --trace"),
    (["--max-new-tokens", "1"], "give at least 2"),
    (["--model", "nowhere.gguf"], "nowhere.gguf"),
  ],
)
def test_errors_are_one_line(run, prompts, tiny_folder, words, message):
  words = [str(prompts) if word == "FILE" else word for word in words]
  result = run("--prompts", prompts, "--model", tiny_folder, *words)
  assert result.exit_code == 2 and result.stdout == ""
  last = result.stderr.strip().splitlines()[-1]
  assert last.startswith("error: ") and message in last


def test_prompts_are_needed(run, tmp_path):
  result = run("--model", "demo")
  assert result.exit_code == 2 and "Usage" in result.stderr
  empty = tmp_path / "empty.jsonl"
  empty.write_text("")
  result = run("--prompts", empty)
  assert result.exit_code == 2 and "holds no prompts" in result.stderr
