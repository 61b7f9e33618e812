"""The command line on a tiny model; the demo model in slow tests."""

import importlib
import json
import re
import tomllib

import jax
import pytest
import typer.testing

import ldjax
from ldjax import _drafts, assemble, checkpoints, cli
from ldjax.cli import _console

KEYS = [
  "text",
  "tokens",
  "logprobs",
  "rounds",
  "round_tokens",
  "mean_accepted",
  "tokens_per_second",
  "time_to_first_token_s",
  "finish_reason",
]


@pytest.fixture(autouse=True)
def own_compilation_cache(monkeypatch, tmp_path):
  """Keeps the commands from the user's cache, and the process from theirs."""
  before = jax.config.jax_compilation_cache_dir
  monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "xla"))
  monkeypatch.setenv("COLUMNS", "200")
  monkeypatch.setenv("NO_COLOR", "1")
  yield
  assert jax.config.jax_compilation_cache_dir == before


@pytest.fixture
def run():
  """Runs a command and returns its result; fails on any traceback."""

  def run(*arguments, code=0):
    result = typer.testing.CliRunner().invoke(
      cli.app, [str(argument) for argument in arguments]
    )
    assert result.exit_code == code, (result.output, result.exception)
    if result.exception is not None:
      assert isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    return result

  return run


@pytest.fixture
def error(run):
  """Runs a command that refuses; returns the one line that it says."""

  def error(*arguments):
    result = run(*arguments, code=2)
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    return lines[0].removeprefix("error: ")

  return error


class TestGenerate:
  def test_streams_the_text_then_says_how_it_went(self, run, tiny, tiny_folder):
    want = ldjax.generate(tiny, "hello", max_new_tokens=12)
    result = run(
      "generate", "hello", "--model", tiny_folder, "--max-new-tokens", 12
    )
    assert result.stdout == want.text + "\n"
    last = result.stderr.strip().splitlines()[-1]
    for part in (
      f"mean accepted {want.mean_accepted:.2f} (tokens emitted over"
      f" {want.rounds} rounds)",
      "first token after",
      "ended by length",
    ):
      assert part in last
    assert re.match(r"12 tokens, [\d.]+ tokens/s, mean", last)

  def test_every_setting_reaches_the_text(self, run, tiny, tiny_folder):
    settings = {
      "max_new_tokens": 12,
      "min_new_tokens": 2,
      "temperature": 1.0,
      "top_k": 50,
      "top_p": 0.9,
      "min_p": 0.01,
      "repetition_penalty": 1.1,
      "presence_penalty": 0.2,
      "frequency_penalty": 0.3,
      "seed": 5,
    }
    free = ldjax.generate(tiny, "hello", **settings)
    stop = free.pieces[-2] or free.pieces[-1]
    want = ldjax.generate(tiny, "hello", **settings, stop=stop, logprobs=True)
    flags = [
      part
      for name, value in settings.items()
      for part in (f"--{name.replace('_', '-')}", value)
    ]
    result = run(
      *("generate", "hello", "--model", tiny_folder, "--json"),
      *flags,
      *("--stop", stop, "--stop", "never there"),
    )
    fields = json.loads(result.stdout)
    assert fields["tokens"] == list(want.tokens)
    assert fields["text"] == want.text
    assert fields["finish_reason"] == want.finish_reason == "stop"
    assert fields["round_tokens"] == list(want.round_tokens)
    assert fields["logprobs"] == pytest.approx(want.logprobs, abs=1e-5)

  def test_rounds_are_shown(self, run, tiny, tiny_folder):
    want = ldjax.generate(tiny, "hello", max_new_tokens=6)
    result = run(
      *("generate", "hello", "--model", tiny_folder, "--show-rounds"),
      *("--max-new-tokens", 6),
    )
    assert "│" in want.show()
    assert result.stderr.count("│") == want.show().count("│")

  def test_json_is_one_object(self, run, tiny, tiny_folder):
    want = ldjax.generate(
      tiny, "hello", max_new_tokens=12, temperature=1.0, seed=5, chat=False
    )
    result = run(
      "generate",
      "hello",
      "--model",
      tiny_folder,
      "--json",
      "--no-chat",
      "--max-new-tokens",
      12,
      "--temperature",
      1.0,
      "--seed",
      5,
    )
    assert result.stdout.count("\n") == 1
    fields = json.loads(result.stdout)
    assert list(fields) == KEYS
    assert fields["text"] == want.text
    assert fields["tokens"] == list(want.tokens)
    assert fields["rounds"] == want.rounds
    assert fields["mean_accepted"] == want.mean_accepted
    assert fields["finish_reason"] == "length"
    assert fields["tokens_per_second"] > 0
    assert fields["time_to_first_token_s"] > 0

  @pytest.mark.slow
  def test_every_draft_gives_the_same(self, run, tiny_folder, tiny_heads):
    drafts = (
      ("none",),
      ("ngram",),
      ("ngram", "--tree", "chain:3"),
      (tiny_heads, "--tree", "1,2,2"),
    )
    objects = []
    for draft, *tree in drafts:
      result = run(
        "generate",
        "hello",
        "--model",
        tiny_folder,
        "--json",
        "--max-new-tokens",
        12,
        "--draft",
        draft,
        *tree,
      )
      objects.append(json.loads(result.stdout))
    assert len({tuple(each["tokens"]) for each in objects}) == 1
    assert objects[0]["mean_accepted"] == 1.0
    assert all(each["mean_accepted"] > 1 for each in objects[1:])

  def test_options_reach_the_model(self, run, tiny_folder, monkeypatch):
    loaded = []
    load = assemble.load

    def spy(*arguments, **settings):
      loaded.append(load(*arguments, **settings))
      return loaded[-1]

    monkeypatch.setattr(assemble, "load", spy)
    result = run(
      "generate",
      "hello",
      "--model",
      tiny_folder,
      "--tree",
      "chain:2",
      "--max-len",
      77,
      "--max-new-tokens",
      0,
      "--json",
    )
    (model,) = loaded
    assert (model.draft_name, model.draft.size) == ("ngram", 3)
    assert model.max_len == 77
    fields = json.loads(result.stdout)
    assert (fields["tokens"], fields["rounds"]) == ([], 0)
    assert (fields["text"], fields["finish_reason"]) == ("", "length")

  def test_chat_and_no_chat(self, run, tiny, tiny_folder):
    for option, chat in (("--chat", True), ("--no-chat", False)):
      want = ldjax.generate(tiny, "abc", max_new_tokens=6, chat=chat)
      result = run(
        "generate",
        "abc",
        "--model",
        tiny_folder,
        option,
        "--max-new-tokens",
        6,
        "--json",
      )
      assert json.loads(result.stdout)["tokens"] == list(want.tokens)


class TestErrors:
  @pytest.mark.parametrize(
    ("options", "message"),
    [
      (("--draft", "nowhere"), "draft 'nowhere' is neither 'none' nor 'ngram'"),
      (("--draft", "[/nowhere]"), "draft '[/nowhere]' is neither"),
      (("--draft", "[bold]"), "draft '[bold]' is neither"),
      (("--tree", "bush"), "tree 'bush' is not understood"),
      (("--tree", "1,2,2"), "the n-gram draft proposes a chain"),
      (("--draft", "none", "--tree", "chain:1"), "'none' takes no tree"),
      (("--max-new-tokens", "-1"), "max_new_tokens is -1"),
      (("--max-len", "1"), "max_len is 1"),
      (("--max-len", "999"), "this model can have 2 to 256 positions"),
      (("--temperature", "-1"), "temperature is -1.0"),
      (("--temperature", "nan"), "temperature is nan"),
      (("--top-p", "0"), "top_p is 0.0"),
      (("--top-k", "-1"), "top_k is -1"),
      (("--seed", "-1"), "seed is -1"),
    ],
  )
  def test_settings(self, error, tiny_folder, options, message):
    line = error("generate", "hello", "--model", tiny_folder, *options)
    assert message in line

  def test_prompts(self, error, tiny_folder):
    line = error("generate", "", "--no-chat", "--model", tiny_folder)
    assert "the prompt is empty" in line
    line = error("generate", "x" * 300, "--model", tiny_folder)
    assert "305 tokens long, but max_len is 256" in line

  @pytest.mark.parametrize("name", ["nowhere", "[/b]", "no such folder"])
  def test_no_such_model(self, error, name):
    line = error("generate", "hello", "--model", name)
    assert f"{name!r} is no file or folder here" in line

  def test_damaged_model(self, error, tiny_folder, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    line = error("generate", "hello", "--model", tmp_path)
    assert "model_type is missing" in line

  def test_of_bench(self, error, tiny_folder, tmp_path):
    model = ("--model", tiny_folder)
    line = error("bench", "--prompts", tmp_path / "none.jsonl", *model)
    assert "none.jsonl" in line
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"text": "a"}\n[/b]\n')
    assert f"{file}:2: not JSON" in error("bench", "--prompts", file, *model)
    file.write_text('{"text": "a"}\n')
    line = error("bench", "--prompts", file, *model, "--methods", "eagle")
    assert "no method is called 'eagle'" in line

  @pytest.mark.parametrize(
    "arguments",
    [
      ("generate",),
      ("generate", "a", "--max-new-tokens", "many"),
      ("generate", "a", "--nonsense"),
      ("bench",),
      ("nonsense",),
    ],
  )
  def test_usage(self, run, arguments):
    result = run(*arguments, code=2)
    assert "Usage" in result.stderr

  def test_interrupted(self, run, tiny_folder, monkeypatch):
    def interrupt(*_, **__):
      raise KeyboardInterrupt

    monkeypatch.setattr(assemble, "load", interrupt)
    result = run("generate", "hello", "--model", tiny_folder, code=130)
    assert result.stderr.strip() == "interrupted"


class TestBench:
  @pytest.mark.slow
  def test_writes_the_figures(self, run, tiny_folder, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out [a].json"
    prompts.write_text(
      '{"prompt": "hello"}\n{"turns": ["abc", "d"]}\n{"text": "x"}\n'
    )
    result = run(
      "bench",
      "--model",
      tiny_folder,
      "--prompts",
      prompts,
      "--limit",
      2,
      "--methods",
      "ngram, ldjax",
      "--max-new-tokens",
      10,
      "--json",
      out,
    )
    report = json.loads(out.read_text())
    assert report["prompts"] == 2
    assert report["max_new_tokens"] == 10
    # The baseline comes along unasked.
    assert list(report["methods"]) == ["autoregressive", "ngram", "ldjax"]
    for name, figures in report["methods"].items():
      assert figures["equal"] == [2, 2]
      assert name in result.stdout
    assert "2/2" in result.stdout
    assert f"Wrote {out}" in result.stderr.replace("\n", "")

  def test_a_file_that_cannot_be_written_is_found_before_the_work(
    self, error, tiny_folder, tmp_path, monkeypatch
  ):
    from ldjax import bench

    monkeypatch.setattr(bench, "compare", lambda *_, **__: pytest.fail("work"))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello"}\n')
    line = error(
      "bench",
      "--model",
      tiny_folder,
      "--prompts",
      prompts,
      "--json",
      tmp_path / "none" / "out.json",
    )
    assert str(tmp_path / "none") in line


class TestDemo:
  @pytest.fixture
  def on(self, monkeypatch):
    def on(model):
      monkeypatch.setattr(_console, "load", lambda *_: model)

    return on

  def test_shows_that_the_texts_are_equal(self, run, tiny_folder, monkeypatch):
    monkeypatch.setattr(
      checkpoints, "resolve", lambda path, progress=None: tiny_folder
    )
    # The draft that comes with ldjax is for the real one.
    monkeypatch.setattr(_drafts, "_SHIPPED", {})
    result = run("demo", "hello", "--max-new-tokens", 12)
    assert "The texts are equal: 12 tokens in" in result.stdout
    assert "instead of 12" in result.stdout

  @pytest.mark.slow
  def test_text_is_no_markup(self, run, on, scripted, bigram):
    codes = scripted(bigram()).tokenizer.encode("]a[/b")
    after = dict(zip(codes, codes[1:] + codes[:1], strict=True))
    on(scripted(bigram(after)))
    result = run("demo", "[/b]a", "--max-new-tokens", 20)
    assert "[/b]a[/b]a[/b" in result.stdout
    assert "[/b]a\n" in result.stdout
    assert "The texts are equal" in result.stdout

  @pytest.mark.slow
  def test_says_if_they_are_not(self, run, on, scripted, bigram, monkeypatch):
    model = scripted(bigram())
    on(model)
    other = scripted(bigram({i: 7 for i in range(256)}))
    monkeypatch.setattr(assemble, "with_draft", lambda *_: other)
    result = run("demo", "a", "--max-new-tokens", 8, code=1)
    assert "The texts are NOT equal" in result.stdout

  @pytest.mark.slow
  def test_one_token(self, run, on, scripted, bigram):
    on(scripted(bigram()))
    result = run("demo", "a", "--max-new-tokens", 1)
    assert "nothing to compare" in result.stdout


class TestHelp:
  @pytest.mark.parametrize(
    ("command", "options"),
    [
      ((), ["generate", "demo", "bench"]),
      (
        ("generate",),
        [
          "--model",
          "--draft",
          "--tree",
          "--max-new-tokens",
          "--max-len",
          "--temperature",
          "--top-p",
          "--top-k",
          "--seed",
          "--no-chat",
          "--json",
        ],
      ),
      (("demo",), ["--max-new-tokens"]),
      (
        ("bench",),
        [
          "--prompts",
          "--model",
          "--methods",
          "--limit",
          "--max-new-tokens",
          "--temperature",
          "--top-p",
          "--top-k",
          "--seed",
          "--json",
        ],
      ),
    ],
  )
  def test_names_every_option(self, run, command, options):
    text = run(*command, "--help").stdout
    for option in options:
      assert option in text

  def test_both_names_are_the_same_program(self, request):
    file = request.config.rootpath / "pyproject.toml"
    scripts = tomllib.loads(file.read_text())["project"]["scripts"]
    assert scripts == {
      "ldjax": "ldjax.cli:main",
      "lightdecoding-cli": "ldjax.cli:main",
    }
    for script in scripts.values():
      module, _, name = script.partition(":")
      assert getattr(importlib.import_module(module), name) is cli.main


class TestCompilationCache:
  def test_is_the_users_unless_set(self, monkeypatch, tmp_path):
    settings = {}
    monkeypatch.setattr(
      _console.jax.config,
      "update",
      lambda name, value: settings.update({name: value}),
    )
    _console.keep_compilations()
    assert settings == {}  # the environment says where
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _console.keep_compilations()
    assert settings == {
      "jax_compilation_cache_dir": str(tmp_path / "ldjax" / "xla")
    }


@pytest.mark.slow
class TestDemoModel:
  def test_demo(self, run, demo_model):
    result = run("demo", "--max-new-tokens", 32)
    assert "The texts are equal" in result.stdout

  def test_capital_of_france(self, run, demo_model):
    result = run(
      "generate",
      "What is the capital of France?",
      "--model",
      demo_model,
      "--max-new-tokens",
      24,
      "--json",
    )
    fields = json.loads(result.stdout)
    assert "Paris" in fields["text"]
    assert "<|" not in fields["text"]


def _prompts(folder, count=60):
  file = folder / "prompts.jsonl"
  lines = [json.dumps({"prompt": chr(65 + i % 26) * 3}) for i in range(count)]
  file.write_text("\n".join(lines))
  return file


@pytest.mark.slow
def test_train_writes_a_draft_that_generate_takes(run, tiny_folder, tmp_path):
  out = tmp_path / "draft"
  arguments = (
    *("train", "recurrent", "--model", tiny_folder, "--out", out),
    *("--prompts", _prompts(tmp_path), "--tokens", 900, "--vocab-size", 100),
    *("--steps", 5, "--window", 16, "--batch", 2, "--rows", 8),
    *("--max-new-tokens", 20),
  )
  result = run(*arguments)
  assert "Accepted on held-out text" in result.stdout
  assert "tokens a round" in result.stdout
  assert f"Wrote {out}" in result.stderr
  assert json.loads((out / "report.json").read_text())["tokens"] > 900
  # All is there: nothing is written or trained again.
  before = (out / "checkpoint" / "state.json").stat().st_mtime_ns
  shards = sorted((out / "corpus").iterdir())
  run(*arguments)
  assert (out / "checkpoint" / "state.json").stat().st_mtime_ns == before
  assert sorted((out / "corpus").iterdir()) == shards
  prompt = ("generate", "abc", "--model", tiny_folder, "--max-new-tokens", 9)
  plain = run(*prompt, "--draft", "none", "--json")
  drafted = run(*prompt, "--draft", out, "--json")
  assert (
    json.loads(plain.stdout)["tokens"] == json.loads(drafted.stdout)["tokens"]
  )


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (("lookahead",), "no draft is called 'lookahead'; there are medusa"),
    (("medusa", "--steps", 0), "steps is 0; it must be at least 1"),
    (("medusa", "--prompts", "nowhere.jsonl"), "nowhere.jsonl"),
    (("medusa", "--model", "nowhere"), "nowhere"),
  ],
)
def test_train_refuses_before_any_work(run, tmp_path, arguments, message):
  out = tmp_path / "out"
  result = run("train", *arguments, "--out", out, code=2)
  assert message in result.stderr
  assert not out.exists()


def test_costs_are_measured_and_kept(run, tiny_folder, tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  result = run("costs", "--model", tiny_folder, "--rounds", 2)
  assert "over one node" in result.stdout
  assert "speed-up" in result.stdout
  assert len(list((tmp_path / "ldjax" / "costs").glob("*.json"))) == 1


class TestConvert:
  def test_there_and_inspected(self, run, tiny_folder, tmp_path):
    result = run("convert", tiny_folder, tmp_path / "x", "--to", "hf")
    assert "safetensors" in result.stdout
    assert (tmp_path / "x" / "model.safetensors").is_file()
    shown = run("inspect", tmp_path / "x").stdout
    assert "llama" in shown
    assert "float32" in shown

  def test_errors_are_one_line(self, error, tiny_folder, tmp_path):
    (tmp_path / "x").mkdir()
    line = error("convert", tiny_folder, tmp_path / "x")
    assert "--force" in line
    assert "absent" in error("inspect", tmp_path / "absent")
    assert "known are" in error(
      "convert", tiny_folder, tmp_path / "y", "--to", "onnx"
    )
    assert not (tmp_path / "y").exists()
