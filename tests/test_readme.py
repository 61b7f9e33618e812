"""What the README and the pages show works: Python runs, commands parse."""

import functools
import itertools
import json
import pathlib
import re
import shlex
from typing import NamedTuple

import pytest
import typer.testing

import ldjax
from ldjax import checkpoints, cli

_REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
_PROGRAMS = ("ldjax", "lightdecoding-cli")
_SHELLS = ("bash", "console", "sh", "shell")
_FENCE = re.compile(
  r"^ *(`{3,}|~{3,}) *([\w+-]*)[^\n]*\n(.*?)^ *\1 *$", re.M | re.S
)
_FOLDERS = (
  "benchmarks/",
  "docs/",
  "examples/",
  "ldjax/",
  "notebooks/",
  "tests/",
  ".ci/",
)
_PAGES = [
  "README.md",
  *(
    str(path.relative_to(_REPOSITORY))
    for path in sorted((_REPOSITORY / "docs").rglob("*.md"))
  ),
]
# A figure with a unit, as "25 tokens/s", "1.8×" or "47 ms".
_MEASURED = re.compile(r"\d\s*(tokens/s|tok/s|×|x\b|ms\b|s\b|GB/s|MiB|GiB|%)")
_UNIT_HEADER = re.compile(
  r"tokens/s|tok/s|speed-?up|accepted|time|\bms\b", re.I
)


class Block(NamedTuple):
  """A fenced block: its language, its text and the line where it starts."""

  language: str
  text: str
  line: int


def _blocks(page: str) -> list[Block]:
  return [
    Block(match[2], match[3], page.count("\n", 0, match.start(3)) + 1)
    for match in _FENCE.finditer(page)
  ]


def _command_lines(block: Block) -> list[list[str]]:
  """The simple commands of a shell block, as words.

  In a `console` block only lines after a `$ ` are commands, the rest is output.
  """
  text = re.sub(r"\\\n\s*(> )?", " ", block.text)
  lines = [line.strip() for line in text.splitlines()]
  if block.language == "console":
    lines = [line[2:] for line in lines if line.startswith("$ ")]
  commands = []
  for line in lines:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.commenters = "#"
    words: list[str] = []
    for word in [*lexer, ";"]:
      if not set(word) <= set("();&|<>"):
        words.append(word)
      elif words:
        while words and re.fullmatch(r"[A-Za-z_]\w*=.*", words[0]):
          words.pop(0)
        if words:
          commands.append(words)
        words = []
  return commands


def _ldjax_arguments(command: list[str]) -> list[str] | None:
  """What stands after the program's name, or None for another program."""
  if command[0] in _PROGRAMS:
    return command[1:]
  if command[0].startswith("python") and command[1:3] == ["-m", "ldjax"]:
    return command[3:]
  return None


@functools.cache
def _help(subcommand: str) -> str:
  """What `ldjax SUBCOMMAND --help` prints; of the program itself if ""."""
  arguments = [*subcommand.split(), "--help"]
  wide = {"COLUMNS": "240", "TERMINAL_WIDTH": "240", "NO_COLOR": "1"}
  done = typer.testing.CliRunner().invoke(
    cli.app, arguments, env={**wide, "TERM": "dumb"}
  )
  assert done.exit_code == 0, f"ldjax {arguments}: {done.output}"
  return re.sub(r"\x1b\[[0-9;]*m", "", done.output)


def _unknown_flags(arguments: list[str], text: str) -> list[str]:
  flags = [
    word.split("=")[0] for word in arguments if re.match(r"--?[A-Za-z]", word)
  ]
  return [
    flag
    for flag in flags
    if not re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", text)
  ]


def _sections(page: str) -> list[str]:
  """A page cut at its headings; a `#` in a block is not a heading."""
  hidden = _FENCE.sub(lambda m: re.sub(r"^#", "\x00", m[0], flags=re.M), page)
  parts = re.split(r"^(?=#{1,6} )", hidden, flags=re.M)
  return [part.replace("\x00", "#") for part in parts]


def _tables_without_command(page: str) -> list[str]:
  """Headings of sections that show measured figures and no command for them."""
  missing = []
  for section in _sections(page):
    prose = _FENCE.sub("", section)
    rows = [row for row in prose.splitlines() if row.lstrip().startswith("|")]
    headers = [
      row
      for row, below in itertools.pairwise(rows)
      if re.fullmatch(r"[\s|:-]+", below)
    ]
    figures = any(_MEASURED.search(row) for row in rows) or (
      any(_UNIT_HEADER.search(row) for row in headers)
      and any(re.search(r"\|\s*[\d.]+\s*\|", row) for row in rows)
    )
    commands = [
      " ".join(command)
      for block in _blocks(section)
      if block.language in _SHELLS
      for command in _command_lines(block)
    ]
    measures = [c for c in commands if re.search(r"\bbench|benchmarks/", c)]
    if figures and not measures:
      missing.append(section.splitlines()[0])
  return missing


def _page(name: str) -> str:
  path = _REPOSITORY / name
  assert path.is_file(), f"{path} is missing"
  return path.read_text()


def _python(page: str) -> list[Block]:
  return [b for b in _blocks(page) if b.language in ("python", "py")]


def _stand_in(monkeypatch, folder):
  """The name "demo" is that of a tiny model."""
  load, resolve = ldjax.load, checkpoints.resolve

  def named(path):
    return folder if path == "demo" else path

  monkeypatch.setattr(
    ldjax, "load", lambda path, **options: load(named(path), **options)
  )
  monkeypatch.setattr(
    checkpoints, "resolve", lambda path, *rest: resolve(named(path), *rest)
  )


def _run(name, blocks):
  # A name, so that classes and dataclasses can find their module.
  namespace: dict = {"__name__": "__main__"}
  for block in blocks:
    # Empty lines in front, so that a traceback names the page's own line.
    source = "\n" * (block.line - 1) + block.text
    exec(compile(source, name, "exec"), namespace)


@pytest.mark.slow
@pytest.mark.parametrize(
  "name", [name for name in _PAGES if _python(_page(name))]
)
def test_python_runs(name, request, tiny_folder, monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)
  # Programs of the demo model take long to compile. One page reads its files.
  if name == "docs/guides/checkpoints.md":
    request.getfixturevalue("demo_model")
  else:
    _stand_in(monkeypatch, tiny_folder)
  _run(name, _python(_page(name)))


@pytest.mark.slow
def test_quick_start_runs_on_the_demo_model(demo_model, monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)
  _run("README.md", _python(_page("README.md"))[:1])


@pytest.mark.slow
@pytest.mark.parametrize("name", _PAGES)
def test_commands_parse(name):
  seen = set()
  for block in _blocks(_page(name)):
    if block.language not in _SHELLS:
      continue
    for command in _command_lines(block):
      where = f"{name}:{block.line}: {shlex.join(command)}"
      for word in command:
        if word.startswith(_FOLDERS):
          matching = list(_REPOSITORY.glob(word))
          assert matching, f"{where}: no {word}"
      arguments = _ldjax_arguments(command)
      if arguments is None:
        continue
      first = arguments[0] if arguments else ""
      subcommand = "" if first.startswith("-") else first
      seen.add(subcommand)
      if first == "bench" and not "".join(arguments[1:2]).startswith("-"):
        subcommand = " ".join(arguments[:2])
      unknown = _unknown_flags(arguments, _help(subcommand))
      assert not unknown, f"{where}: no {unknown}"
  if name in ("README.md", "docs/guides/command_line.md"):
    assert {"generate", "demo", "bench"} <= seen


@pytest.mark.parametrize("name", _PAGES)
def test_figures_stand_beside_their_command(name):
  assert not _tables_without_command(_page(name))


def test_the_readme_shows_python():
  assert _python(_page("README.md"))


def test_test_command_is_that_of_ci():
  ci = (_REPOSITORY / ".ci" / "run").read_text().strip().splitlines()
  assert ci[-1] == "pytest -n 2"
  assert "pip install '.[dev]' && pytest -n 2" in _page("README.md")


def test_prompts_of_the_benchmark():
  lines = (_REPOSITORY / "examples" / "prompts.jsonl").read_text().splitlines()
  prompts = [json.loads(line)["prompt"] for line in lines]
  assert len(prompts) == 24
  assert len(set(prompts)) == 24
  assert all(20 <= len(prompt) <= 1500 for prompt in prompts)


_SAMPLE = """# Name

```python
import os
```

```console
$ LD=1 ldjax generate "a; b" --seed 3 | cat   # comment
ldjax this is output --not-a-flag
$ ldjax bench \\
    --prompts=examples/prompts.jsonl && ldjax --version
```

## Figures

| method | tokens/s |
|---|---|
| plain | 21 |

## Measured

```bash
# ldjax bench in a comment is no command
python benchmarks/forward.py
```

| method | tokens/s |
|---|---|
| plain | 21 |

## Options

| flag | default |
|---|---|
| `--seed` | 0 |
| `--draft`, one at a time | 3 |
"""


def test_blocks_and_commands_are_found():
  python, console, bash = _blocks(_SAMPLE)
  assert python == Block("python", "import os\n", 4)
  assert _command_lines(console) == [
    ["ldjax", "generate", "a; b", "--seed", "3"],
    ["cat"],
    ["ldjax", "bench", "--prompts=examples/prompts.jsonl"],
    ["ldjax", "--version"],
  ]
  assert _command_lines(bash) == [["python", "benchmarks/forward.py"]]
  assert _ldjax_arguments(["cat"]) is None
  assert _ldjax_arguments(["python", "-m", "ldjax", "demo"]) == ["demo"]


def test_unknown_flags_are_found():
  text = "--seed INTEGER\n--max-new-tokens INTEGER  -n"
  assert _unknown_flags(["a", "--seed=3", "-n", "4", "-1"], text) == []
  assert _unknown_flags(["--max-new", "3", "--see"], text) == [
    "--max-new",
    "--see",
  ]


def test_figures_without_command_are_found():
  assert _tables_without_command(_SAMPLE) == ["## Figures"]
