"""Sphinx: one page a package from its `__all__`, and nothing left unexplained.

`.. public-api:: ldjax.decoding` documents all that `ldjax.decoding` exports;
a public name without documentation, or a package without a page, is a
warning, which `sphinx-build -W` makes an error. A code span in a docstring
links to the public name that it holds, if it holds one.
"""

import ast
import functools
import importlib
import inspect
import re
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import public_names
from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util import docutils, logging

_log = logging.getLogger(__name__)

_OBJECT = "py:obj"


@functools.cache
def _exports(root: str) -> dict[str, Any]:
  """Every exported function and class by its full public name."""
  found = {}
  for name in public_names.packages(importlib.import_module(root)):
    package = importlib.import_module(name)
    for each in package.__all__:
      value = getattr(package, each)
      if callable(value):
        found[f"{name}.{each}"] = value
  return found


@functools.cache
def _by_suffix(root: str) -> dict[str, str]:
  """`speculative`, `decoding.speculative`, ... to the full name, if unique."""
  found: dict[str, str | None] = {}
  for full, value in _exports(root).items():
    parts = full.split(".")
    for start in range(len(parts)):
      suffix = ".".join(parts[start:])
      other = found.get(suffix, full)
      same = other is not None and _exports(root)[other] is value
      found[suffix] = full if same else None
  return {suffix: full for suffix, full in found.items() if full}


def _name_role(name, rawtext, text, lineno, inliner, options=None, content=()):
  """A code span of a docstring: a link where it names something public."""
  del name, lineno, options, content
  literal = nodes.literal(rawtext, text, classes=["code"])
  root = inliner.document.settings.env.config.public_root
  full = _by_suffix(root).get(text.removesuffix("()"))
  if full is None:
    return [literal], []
  link = addnodes.pending_xref(
    rawtext,
    literal,
    refdomain="py",
    reftype="obj",
    reftarget=full,
    refexplicit=True,
    refwarn=True,
  )
  return [link], []


def _resolve_private(app, env, node, contnode):
  """Sends a reference to a name's private module to its public one."""
  root = app.config.public_root
  target = node.get("reftarget", "")
  if node.get("refdomain") != "py" or not target.startswith(f"{root}."):
    return None
  value: Any = importlib.import_module(root)
  for part in target.split(".")[1:]:
    value = getattr(value, part, None)
  if isinstance(value, TypeVar):
    return contnode
  for full, exported in _exports(root).items():
    if exported is value:
      return env.domains.python_domain.resolve_xref(
        env, node["refdoc"], app.builder, "obj", full, node, contnode
      )
  return None


def _is_code(lines: list[str]) -> bool:
  """Whether an example without prompts is Python all the same."""
  text = inspect.cleandoc("\n".join(lines))
  if not text or text.startswith(">>>"):
    return False
  try:
    tree = ast.parse(text)
  except SyntaxError:
    return False
  return not isinstance(tree.body[0], ast.Expr) or "(" in text


def _mark_code(app, what, name, value, options, lines: list[str]) -> None:
  """Makes a code block of an `Example:` that shows code without prompts."""
  del app, what, name, value, options
  for start, line in enumerate(lines):
    if line.strip() != "Example:":
      continue
    indent = len(line) - len(line.lstrip())
    end = start + 1
    while end < len(lines) and (
      not lines[end].strip()
      or len(lines[end]) - len(lines[end].lstrip()) > indent
    ):
      end += 1
    body = lines[start + 1 : end]
    if _is_code(body):
      margin = " " * (indent + 2)
      lines[start + 1 : end] = [
        f"{margin}.. code-block:: python",
        "",
        *(f"  {each}" if each.strip() else "" for each in body),
        "",
      ]
    return


def _skip(app, what, name, value, skip, options) -> bool | None:
  """Leaves out what decorators add and NamedTuple's texts for bare fields."""
  del app, what, skip, options
  if name == "replace" and value.__module__.startswith("flax"):
    return True
  text = getattr(value, "__doc__", None) or ""
  if re.fullmatch(r"Alias for field number \d+", text):
    return True
  return None


def _shorten(app, what, name, value, options, signature, returns):
  """Writes a type that is a default by its name."""
  del app, what, name, value, options
  if signature is None:
    return None
  return re.sub(r"<class '([\w.]+)'>", r"\1", signature), returns


def _section(title: str, lines: list[str]) -> Iterator[str]:
  if lines:
    yield from (title, "-" * len(title), "", *lines, "")


def _summary(names: list[str]) -> Iterator[str]:
  if names:
    yield from (".. autosummary::", "  :nosignatures:", "")
    yield from (f"  {name}" for name in names)
    yield ""


def _constant(package: str, name: str, value: Any) -> Iterator[str]:
  yield from (f".. py:data:: {name}", f"  :value: {value!r}", "")
  for line in public_names.constant_text(package, name).splitlines():
    yield f"  {line}"
  yield ""


def _page(package: types.ModuleType) -> Iterator[str]:
  """The reStructuredText of a package's page."""
  exported = {name: getattr(package, name) for name in package.__all__}

  def those(belongs: Callable[[Any], bool]) -> list[str]:
    return [name for name, value in exported.items() if belongs(value)]

  modules = those(inspect.ismodule)
  classes = those(inspect.isclass)
  functions = those(lambda x: callable(x) and not inspect.isclass(x))
  rest = those(lambda x: not callable(x) and not inspect.ismodule(x))
  yield from (f".. py:module:: {package.__name__}", "")
  yield from inspect.getdoc(package).splitlines()  # type: ignore[union-attr]
  yield ""
  yield from _summary(functions)
  yield from _summary(classes)
  if modules:
    links = ", ".join(f":doc:`ldjax.{name} <{name}>`" for name in modules)
    yield from (f"Packages: {links}.", "")
  yield from _section(
    "Functions",
    [
      line
      for name in functions
      for line in (f".. autofunction:: {package.__name__}.{name}", "")
    ],
  )
  yield from _section(
    "Classes",
    [
      line
      for name in classes
      for line in (
        f".. autoclass:: {package.__name__}.{name}",
        "  :members:",
        "  :special-members: __call__",
        "",
      )
    ],
  )
  yield from _section(
    "Constants",
    [
      line
      for name in rest
      for line in _constant(package.__name__, name, exported[name])
    ],
  )


class PublicApi(docutils.SphinxDirective):
  """Documents everything in a package's `__all__`."""

  required_arguments = 1

  def run(self) -> list[nodes.Node]:
    package = importlib.import_module(self.arguments[0])
    for name in public_names.undocumented(package):
      _log.warning(
        "%s is public and has no documentation",
        name,
        location=self.get_location(),
      )
    pages = self.env.metadata.setdefault(self.env.docname, {})
    pages["public-api"] = package.__name__
    return self.parse_text_to_nodes(
      "\n".join(_page(package)), allow_section_headings=True
    )


def _check_pages(app, env) -> None:
  """Warns of public packages that have no page."""
  described = {metadata.get("public-api") for metadata in env.metadata.values()}
  root = importlib.import_module(app.config.public_root)
  for name in public_names.packages(root):
    if name not in described:
      _log.warning("package %s is public and has no page", name)


def setup(app: Sphinx) -> dict[str, Any]:
  """Registers the directive, the role and the checks."""
  app.add_config_value("public_root", "ldjax", "env", types=frozenset({str}))
  app.add_directive("public-api", PublicApi)
  app.add_role("public-name", _name_role)
  app.connect("missing-reference", _resolve_private)
  # Before napoleon takes the section apart.
  app.connect("autodoc-process-docstring", _mark_code, priority=400)
  app.connect("autodoc-process-signature", _shorten)
  app.connect("autodoc-skip-member", _skip)
  app.connect("env-check-consistency", _check_pages)
  return {"version": "1", "parallel_read_safe": True}
