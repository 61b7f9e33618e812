"""The site's checks find what they should, and the notebooks are in step."""

import importlib
import json
import pathlib
import re
import subprocess
import sys
import textwrap

import pytest

import ldjax

_REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
_DOCS = _REPOSITORY / "docs"
_NOTEBOOKS = sorted((_REPOSITORY / "notebooks").glob("*.ipynb"))
_DIRECTIVE = re.compile(r"^\.\. public-api:: ([\w.]+)$", re.M)


@pytest.fixture
def public_names(monkeypatch):
  monkeypatch.syspath_prepend(str(_DOCS / "_ext"))
  return importlib.import_module("public_names")


def test_every_public_name_is_explained(public_names):
  for name in public_names.packages(ldjax):
    assert public_names.undocumented(importlib.import_module(name)) == []


def test_every_package_has_a_page(public_names):
  described = [
    name
    for page in (_DOCS / "api").glob("*.rst")
    for name in _DIRECTIVE.findall(page.read_text())
  ]
  assert sorted(described) == sorted(public_names.packages(ldjax))


_FAKE = '''
"""A package for the check."""

import dataclasses
import functools
from typing import NamedTuple

from fakery import _constants
from fakery._constants import BARE, EXPLAINED

__all__ = [
  "BARE", "EXPLAINED", "Base", "Fine", "Pair", "Record", "Silent", "fine",
  "silent",
]


def fine():
  """Is explained."""


def silent():
  pass


class Base:
  """Is explained, its method is not."""

  def inherited(self):
    pass


class Fine(Base):
  """Is explained.

  Args:
    size: in the docstring.
  """

  size: int = 3
  other: int = 4
  """Below."""
  _private: int = 5

  def inherited(self):
    """Is explained."""

  @classmethod
  def make(cls):
    """Is explained."""

  @functools.cached_property
  def cached(self):
    pass


class Silent:
  pass


class Pair(NamedTuple):
  """Has `one(x)` in its docstring."""

  one: int
  two: int


@dataclasses.dataclass
class Record:
  field: int
  """Below."""

  @property
  def area(self):
    return 0

  @staticmethod
  def unit():
    pass

  def __call__(self):
    pass
'''

_MISSING = [
  "BARE",
  "Base.inherited",
  "Fine.cached",
  "Pair.two",
  "Record",
  "Record.area",
  "Record.unit",
  "Record.__call__",
  "Silent",
  "silent",
]


@pytest.fixture
def fakery(tmp_path):
  """A folder with a package of which half is unexplained."""
  package = tmp_path / "fakery"
  package.mkdir()
  (package / "__init__.py").write_text(_FAKE)
  (package / "_constants.py").write_text(
    '"""Constants."""\n\nBARE = 1\nEXPLAINED = 2\n"""Is two."""\n'
  )
  return tmp_path


def test_what_is_unexplained_is_found(public_names, fakery, monkeypatch):
  monkeypatch.syspath_prepend(str(fakery))
  package = importlib.import_module("fakery")
  found = public_names.undocumented(package)
  assert sorted(found) == sorted(f"fakery.{name}" for name in _MISSING)
  assert public_names.packages(package) == ["fakery"]


@pytest.mark.slow
def test_the_build_fails_for_them(fakery):
  pytest.importorskip("sphinx")
  source = fakery / "docs"
  source.mkdir()
  paths = [str(_DOCS / "_ext"), str(fakery)]
  (source / "conf.py").write_text(
    textwrap.dedent(f"""
    import sys
    sys.path[:0] = {paths!r}
    extensions = [
      "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon",
      "public_api",
    ]
    autosummary_generate = False
    default_role = "public-name"
    public_root = "fakery"
    """)
  )

  def build(index: str) -> subprocess.CompletedProcess[str]:
    (source / "index.rst").write_text(index)
    command = ["-m", "sphinx", "-W", "--keep-going", "-q", "-E"]
    return subprocess.run(
      [sys.executable, *command, str(source), str(fakery / "site")],
      capture_output=True,
      text=True,
      check=False,
      cwd=fakery,
    )

  done = build("Fakery\n======\n\n.. public-api:: fakery\n")
  assert done.returncode == 1, done.stderr
  for name in _MISSING:
    assert f"fakery.{name} is public and has no documentation" in done.stderr
  assert done.stderr.count("WARNING") == len(_MISSING)
  page = (fakery / "site" / "index.html").read_text()
  assert "Is two." in page and "Below." in page

  done = build("Fakery\n======\n\nNothing.\n")
  assert done.returncode == 1
  assert "package fakery is public and has no page" in done.stderr


def test_notebooks_are_there():
  scripts = sorted((_REPOSITORY / "notebooks").glob("*.py"))
  assert [path.stem for path in scripts] == [path.stem for path in _NOTEBOOKS]
  assert len(scripts) >= 3


@pytest.mark.parametrize("path", _NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_its_script_without_outputs(path):
  jupytext = pytest.importorskip("jupytext")
  script = jupytext.read(path.with_suffix(".py"), fmt="py:percent")
  notebook = json.loads(path.read_text())

  def source(cell) -> tuple[str, str]:
    return cell["cell_type"], "".join(cell["source"])

  assert [source(cell) for cell in notebook["cells"]] == [
    source(cell) for cell in script.cells
  ]
  for cell in notebook["cells"]:
    assert not cell.get("outputs"), "clear the outputs"
    assert cell.get("execution_count") is None
