"""Every example in a docstring runs, and every public name has a docstring."""

import contextlib
import dataclasses
import doctest
import importlib
import inspect
import io
import pathlib
import re
import types
from typing import Any

import pytest

import ldjax

_PACKAGE = pathlib.Path(__file__).resolve().parent.parent / "ldjax"


def _dotted(path: pathlib.Path) -> str:
  parts = path.relative_to(_PACKAGE.parent).with_suffix("").parts
  return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


_MODULES = sorted(
  _dotted(path) for path in _PACKAGE.rglob("*.py") if path.name != "__main__.py"
)


def _examples(module: types.ModuleType) -> list[doctest.DocTest]:
  tests = doctest.DocTestFinder(exclude_empty=True).find(module)
  return [test for test in tests if test.examples]


def _fault(name: str, value: Any) -> str:
  """What is wrong with the docstring of a public value; "" if nothing is."""
  known = inspect.isroutine(value) or inspect.isclass(value)
  if not known and not hasattr(value, "__wrapped__"):
    return ""  # a constant or an alias: its comment stands beside it
  text = value.__doc__ or ""
  # What dataclass and NamedTuple write when there is none.
  if not text.strip() or text.startswith(f"{value.__name__}("):
    return f"{name} has no docstring"
  first = inspect.cleandoc(text).splitlines()[0]
  if not first.endswith((".", "?", "!")):
    return f"{name}: the first line is not one whole sentence"
  if not inspect.isclass(value):
    parameters = inspect.signature(value).parameters
    if "see `Settings`" in text:  # where each of them is explained
      settings = {field.name for field in dataclasses.fields(ldjax.Settings)}
      parameters = [name for name in parameters if name not in settings]
    for parameter in parameters:
      if not re.search(rf"\b{re.escape(parameter)}\b", text):
        return f"{name} does not speak of its argument {parameter}"
  return ""


@pytest.mark.slow
@pytest.mark.parametrize("name", _MODULES)
def test_examples_run(name, monkeypatch, tmp_path):
  module = importlib.import_module(name)
  tests = _examples(module)
  for test in tests:
    for example in test.examples:
      where = f"{test.name}: {example.source.strip()}"
      assert "fetch_demo" not in example.source, f"{where} needs the demo model"
      assert not example.options.get(doctest.SKIP), f"{where} never runs"
  if not tests:
    return
  monkeypatch.chdir(tmp_path)
  runner = doctest.DocTestRunner(
    optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
  )
  report = io.StringIO()
  with contextlib.redirect_stdout(report):
    for test in tests:
      runner.run(test, out=report.write)
  assert runner.failures == 0, report.getvalue()


@pytest.mark.parametrize("name", _MODULES)
def test_public_names_are_explained(name):
  module = importlib.import_module(name)
  assert module.__doc__, f"{name} has no docstring"
  public = list(getattr(module, "__all__", []))
  assert len(set(public)) == len(public)
  faults = [_fault(f"{name}.{each}", getattr(module, each)) for each in public]
  assert not [fault for fault in faults if fault]


def test_every_package_says_what_is_public():
  for name in _MODULES:
    module = importlib.import_module(name)
    if hasattr(module, "__path__"):
      assert hasattr(module, "__all__"), name


def test_faults_are_found():
  def bare(x):
    return x

  def broken(x):
    """Gives x back, in a first line that goes
    on in the second."""
    return x

  def silent(x, row):
    """Gives x back."""
    return x

  def good(x, row):
    """Gives x back, whatever the row."""
    return x

  assert _fault("bare", bare) == "bare has no docstring"
  assert "first line" in _fault("broken", broken)
  assert "argument row" in _fault("silent", silent)
  assert _fault("good", good) == ""
  assert _fault("constant", 3) == ""
