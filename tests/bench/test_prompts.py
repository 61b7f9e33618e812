"""Prompts from JSON lines."""

import json

import pytest

from ldjax import bench


@pytest.fixture
def write(tmp_path):
  def write(text):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(text.encode())
    return file

  return write


def test_forms(write):
  file = write(
    '{"prompt": "one", "text": "no", "turns": ["no"]}\n'
    "\n"
    '{"question_id": 81, "turns": ["two", "no"], "text": "no"}\n'
    "   \n"
    '{"text": "three"}\n'
    '{"turns": [], "text": "four"}\n'
    '{"prompt": "fünf\\nsechs"}'
  )
  assert bench.read_prompts(file) == [
    "one",
    "two",
    "three",
    "four",
    "fünf\nsechs",
  ]
  assert bench.read_prompts(str(file), 2) == ["one", "two"]
  assert len(bench.read_prompts(file, 99)) == 5


def test_windows_line_ends(write):
  assert bench.read_prompts(write('{"text": "a"}\r\n{"text": "b"}\r\n')) == [
    "a",
    "b",
  ]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
def test_only_a_newline_ends_a_line(write, separator):
  # JSON lets these stand in a string as they are.
  prompt = f"one{separator}two"
  text = json.dumps({"prompt": prompt}, ensure_ascii=False)
  assert bench.read_prompts(write(text + "\n")) == [prompt]


@pytest.mark.parametrize(
  ("line", "message"),
  [
    ("{prompt: 1}", "not JSON"),
    ('{"prompt": "cut', "not JSON"),
    ("[1, 2]", "neither 'prompt' nor 'turns' nor 'text'"),
    ('"text"', "neither"),
    ("{}", "neither"),
    ('{"prompt": 3}', "neither"),
    ('{"prompt": ""}', "neither"),
    ('{"turns": "one"}', "neither"),
    ('{"turns": [{"role": "user"}]}', "neither"),
  ],
)
def test_the_line_that_is_wrong_is_named(write, line, message):
  file = write('{"text": "a"}\n\n' + line + "\n")
  with pytest.raises(ValueError, match=message) as caught:
    bench.read_prompts(file)
  assert f"{file}:3:" in str(caught.value)
  # What is not read is not looked at.
  assert bench.read_prompts(file, 1) == ["a"]


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_no_prompts(write, text):
  with pytest.raises(ValueError, match="holds no prompts"):
    bench.read_prompts(write(text))


def test_no_file(tmp_path):
  with pytest.raises(FileNotFoundError):
    bench.read_prompts(tmp_path / "none.jsonl")


def test_the_repository_s_own(request):
  file = request.config.rootpath / "examples" / "prompts.jsonl"
  assert len(bench.read_prompts(file)) >= 5


def test_mt_bench(shared_data):
  assert len(bench.read_prompts(shared_data / "mt_bench.jsonl")) == 80
