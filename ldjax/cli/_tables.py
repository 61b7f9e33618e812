"""Tables on standard output, for terminals or as Markdown."""

from collections.abc import Sequence

import rich.console
import rich.table


def show(
  title: str,
  columns: Sequence[str],
  rows: Sequence[Sequence[str]],
  *,
  markdown: bool = False,
) -> None:
  """Prints a table whose first column names what a row is of.

  Args:
    title: stands above it; a Markdown table has none.
    columns: their heads.
    rows: an entry a column.
    markdown: whether to print it as Markdown.
  """
  if markdown:
    rules = ["---"] * len(columns)
    for row in (columns, rules, *rows):
      print("|", " | ".join(row), "|")
    return
  table = rich.table.Table(title=title)
  for number, column in enumerate(columns):
    table.add_column(column, justify="right" if number else "left")
  for row in rows:
    table.add_row(*row)
  rich.console.Console().print(table)
