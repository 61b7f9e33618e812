"""Sphinx: the options of a command as a table, from the command itself."""

from typing import Any

import typer
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import docutils

from ldjax import cli


def _default(parameter: Any) -> str:
  if parameter.required:
    return "required"
  value = parameter.default
  shown = value is not None and not callable(value) and parameter.show_default
  return f"`{value}`" if shown and value is not False else ""


def _rows(command: str) -> list[tuple[str, str, str]]:
  found: Any = typer.main.get_command(cli.app)
  for word in command.split():
    found = found.commands[word]
  rows = [("option", "default", "what it does")]
  for parameter in found.params:
    if parameter.name == "help":
      continue
    options = [*parameter.opts, *parameter.secondary_opts]
    if parameter.param_type_name == "argument":
      options = [parameter.name.upper()]
    text = (getattr(parameter, "help", None) or "").replace("|", "\\|")
    rows.append(
      (", ".join(f"`{each}`" for each in options), _default(parameter), text)
    )
  return rows


class CommandOptions(docutils.SphinxDirective):
  """Lists the arguments and options of one of ldjax's commands."""

  required_arguments = 1
  final_argument_whitespace = True

  def run(self) -> list[nodes.Node]:
    rows = _rows(self.arguments[0])
    rows.insert(1, ("---", "---", "---"))
    return self.parse_text_to_nodes(
      "\n".join(f"| {' | '.join(row)} |" for row in rows)
    )


def setup(app: Sphinx) -> dict[str, Any]:
  """Registers the directive; its table is Markdown, for use in a .md page."""
  app.add_directive("command-options", CommandOptions)
  return {"version": "1", "parallel_read_safe": True}
