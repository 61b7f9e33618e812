"""What a package makes public, and which of it nobody has explained.

Plain Python, so that the tests can ask without building the site.
"""

import ast
import functools
import importlib
import inspect
import itertools
import pkgutil
import re
import textwrap
import types
from collections.abc import Iterator
from typing import Any

# The command line has a page of its own, made from its options.
_ELSEWHERE = {"cli"}


def packages(root: types.ModuleType) -> list[str]:
  """The root and every public package below it, as dotted names."""
  found = [root.__name__]
  for module in pkgutil.walk_packages(root.__path__, f"{root.__name__}."):
    parts = module.name.split(".")[1:]
    private = any(part.startswith("_") for part in parts)
    if module.ispkg and not private and parts[0] not in _ELSEWHERE:
      found.append(module.name)
  return found


@functools.cache
def _tree(module: str) -> ast.Module:
  return ast.parse(inspect.getsource(importlib.import_module(module)))


def _literals(body: list[ast.stmt]) -> dict[str, str]:
  """Names assigned in `body` with a string literal right below them."""
  found = {}
  for statement, below in itertools.pairwise(body):
    match below:
      case ast.Expr(ast.Constant(str(text))):
        pass
      case _:
        continue
    match statement:
      case ast.AnnAssign(ast.Name(name)) | ast.Assign([ast.Name(name)]):
        found[name] = inspect.cleandoc(text)
  return found


def constant_text(module: str, name: str) -> str:
  """The literal below a constant, where it is defined; "" if there is none."""
  body = _tree(module).body
  for statement in body:
    if isinstance(statement, ast.ImportFrom) and statement.module:
      for alias in statement.names:
        if (alias.asname or alias.name) == name:
          return constant_text(statement.module, alias.name)
  return _literals(body).get(name, "")


def field_texts(cls: type) -> dict[str, str]:
  """The literals below the fields of one class, its bases left out."""
  tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
  return _literals(tree.body[0].body)  # type: ignore[attr-defined]


def _written(value: Any) -> bool:
  """Whether somebody wrote the docstring."""
  text = value.__doc__ or ""
  # What dataclass and NamedTuple write when there is none.
  return bool(text.strip()) and not text.startswith(
    f"{getattr(value, '__name__', '')}("
  )


def _mentions(text: str, name: str) -> bool:
  """Whether a class's docstring has an entry, or a code span, for a field."""
  return bool(
    re.search(rf"^\s+{name}(?: \(.*\))?:\s", text, re.M)
    or re.search(rf"`{name}[(`]", text)
  )


def _members(cls: type, root: str) -> Iterator[tuple[type, str, Any]]:
  """Public fields, methods and properties that a class of ours defines."""
  for owner in cls.__mro__:
    if owner.__module__.partition(".")[0] != root:
      continue
    own = vars(owner)
    for name in {**own.get("__annotations__", {}), **own}:
      if not name.startswith("_") or name == "__call__":
        yield owner, name, own.get(name)


def _explained(cls: type, name: str, root: str) -> bool:
  """Whether a class of ours has a docstring for a method or property."""
  return any(
    (getattr(vars(owner).get(name), "__doc__", None) or "").strip()
    for owner in cls.__mro__
    if owner.__module__.partition(".")[0] == root
  )


def _undocumented_members(cls: type, full: str) -> Iterator[str]:
  root = cls.__module__.partition(".")[0]
  for owner, name, value in _members(cls, root):
    method = getattr(value, "__func__", value)
    if isinstance(method, property | functools.cached_property):
      explained = _explained(cls, name, root)
    elif inspect.isfunction(method):
      # One that a decorator added is explained where the decorator is.
      ours = method.__module__.partition(".")[0] == root
      explained = not ours or _explained(cls, name, root)
    else:
      explained = name in field_texts(owner) or _mentions(
        owner.__doc__ or "", name
      )
    if not explained:
      yield f"{full}.{name}"


def undocumented(package: types.ModuleType) -> list[str]:
  """Public names without documentation, as dotted names.

  Fields, methods and properties of public classes count. A field is explained
  by a literal below it or in its class's docstring.
  """
  missing = []
  for name in package.__all__:
    value = getattr(package, name)
    full = f"{package.__name__}.{name}"
    if inspect.ismodule(value):
      continue  # it has a page of its own
    if inspect.isclass(value):
      if not _written(value):
        missing.append(full)
      missing.extend(_undocumented_members(value, full))
    elif callable(value):
      if not _written(value):
        missing.append(full)
    elif not constant_text(package.__name__, name):
      missing.append(full)
  return missing
