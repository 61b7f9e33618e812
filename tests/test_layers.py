"""The order of the layers, and what a module may be called and how long."""

import ast
import pathlib
import re

import pytest

_PACKAGE = pathlib.Path(__file__).resolve().parent.parent / "ldjax"

# A layer imports only what stands before it, and itself.
_ORDER = (
  "typing",
  "_base",
  "_cache_folder",
  "_compilations",
  "_render",
  "sampling",
  "memory",
  "pallas_kernels",
  "models",
  "decoding",
  "checkpoints",
  "text",
  "_convert",
  "_show",
  "_sharding",
  "_cache",
  "_drafts",
  "assemble",
  "training",
  "optimize",
  "_settings",
  "_request",
  "_generation",
  "_row",
  "_pages",
  "_ladder",
  "_engine",
  "_generate",
  "_ticket",
  "_serve",
  "contrib",
  "_load",
  "_plan_passes",
  "_plan",
  "testing",
  "bench",
  "profile",
  "cli",
)
# Stricter than the order: a user brings a target and a cache of their own.
_NEVER = {"decoding": {"memory", "models", "pallas_kernels"}}
# The package's own face and `python -m ldjax` may import anything.
_FACES = {"__init__", "__main__"}

_MAX_LINES = 400
_LONGER: dict[str, int] = {}  # file, relative to ldjax/: lines, with a reason
_BAD_WORDS = {"manager", "utils", "helper", "posterior"}
_BAD_ENDINGS = ("_v2", "_new", "_old")

_FILES = sorted(
  str(path.relative_to(_PACKAGE)) for path in _PACKAGE.rglob("*.py")
)


def _layer(file: str) -> str:
  return pathlib.PurePath(file).parts[0].removesuffix(".py")


def _imported(source: str, file: str) -> list[tuple[int, str]]:
  """All modules of ldjax that a source imports: (line, dotted name).

  `from a import b` counts as `a.b`, whether b is a module or a name in it.
  Imports inside functions and under `TYPE_CHECKING` count as well.
  """
  package = ["ldjax", *pathlib.PurePath(file).parts[:-1]]
  found = []
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      base = node.module or ""
      if node.level:
        above = package[: len(package) - node.level + 1]
        base = ".".join([*above, base] if base else above)
      names = [f"{base}.{alias.name}" for alias in node.names]
    elif (
      isinstance(node, ast.Call)
      and ast.unparse(node.func).split(".")[-1]
      in ("import_module", "__import__")
      and node.args
      and isinstance(node.args[0], ast.Constant)
    ):
      names = [str(node.args[0].value)]
    else:
      continue
    found += [
      (node.lineno, name) for name in names if name.split(".")[0] == "ldjax"
    ]
  return found


def _violations(source: str, file: str) -> list[str]:
  """Every import in a source that the order of the layers forbids."""
  layer = _layer(file)
  if layer in _FACES:
    return []
  allowed = set(_ORDER[: _ORDER.index(layer) + 1]) - _NEVER.get(layer, set())
  wrong = []
  for line, name in _imported(source, file):
    parts = name.split(".")[1:]
    if not parts:
      wrong.append(f"{file}:{line} imports the whole of ldjax")
    elif parts[0] not in allowed:
      wrong.append(f"{file}:{line} imports {name}, {layer} may not")
    elif parts[0] != layer and any(p.startswith("_") for p in parts[1:]):
      wrong.append(f"{file}:{line} imports {name}, private to {parts[0]}")
  return wrong


def test_there_is_something_to_check():
  assert len(_FILES) > 10


@pytest.mark.parametrize("file", _FILES)
def test_layer(file):
  assert _layer(file) in {*_ORDER, *_FACES}, "add it to the order of the layers"
  assert not _violations((_PACKAGE / file).read_text(), file)


@pytest.mark.parametrize("file", _FILES)
def test_length(file):
  lines = len((_PACKAGE / file).read_text().splitlines())
  assert lines <= _LONGER.get(file, _MAX_LINES)


@pytest.mark.parametrize("file", _FILES)
def test_name(file):
  for part in pathlib.PurePath(file).with_suffix("").parts:
    assert not part.endswith(_BAD_ENDINGS)
    assert not _BAD_WORDS & set(re.split(r"_+", part))


@pytest.mark.parametrize(
  ("file", "source"),
  [
    ("sampling/_draw.py", "import ldjax.memory"),
    ("sampling/_draw.py", "import ldjax"),
    ("sampling/_draw.py", "from ldjax import load"),
    ("sampling/_draw.py", "from .. import memory"),
    ("sampling/_draw.py", "from ..memory import PagePool"),
    ("sampling/_draw.py", "def f():\n  from ldjax import memory"),
    ("sampling/_draw.py", "importlib.import_module('ldjax.cli')"),
    ("typing.py", "from . import _base"),
    ("decoding/_tree.py", "from ldjax.models import transformer"),
    ("decoding/_tree.py", "from ldjax import memory"),
    ("decoding/_tree.py", "from ldjax import pallas_kernels"),
    ("decoding/_tree.py", "from ldjax.sampling import _noise"),
    ("pallas_kernels/tree/_reference.py", "from ... import models"),
  ],
)
def test_a_forbidden_import_is_found(file, source):
  assert len(_violations(source, file)) == 1


@pytest.mark.parametrize(
  ("file", "source"),
  [
    ("decoding/_tree.py", "import jax\nfrom jax import numpy"),
    ("decoding/_tree.py", "from ldjax import _base, sampling"),
    ("decoding/_tree.py", "from ldjax._base import Scores"),
    ("decoding/_tree.py", "from ldjax.decoding import _state"),
    ("decoding/_tree.py", "from . import _state"),
    ("pallas_kernels/tree/_reference.py", "from .. import dispatch"),
    ("cli/__init__.py", "from ldjax import _generate, bench"),
    ("__init__.py", "import ldjax.cli"),
  ],
)
def test_an_allowed_import_passes(file, source):
  assert not _violations(source, file)
