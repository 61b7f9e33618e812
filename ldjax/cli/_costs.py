"""`ldjax costs`: what a round costs here, and the speed that it allows."""

from collections.abc import Iterator
from typing import Annotated

import rich.console
import rich.table
import typer

from ldjax import optimize
from ldjax.cli import _console


def _tables(curve: optimize.CostCurve) -> Iterator[rich.table.Table]:
  table = rich.table.Table(
    title=f"A round by size of tree, {curve.batch} rows on {curve.device}"
  )
  for column in ("nodes", "step ms", "of it draft ms", "over one node"):
    table.add_column(column, justify="right")
  for size in curve.sizes:
    table.add_row(
      str(size),
      f"{1e3 * curve.at(size):.1f}",
      f"{1e3 * curve.draft_at(size):.1f}",
      f"{curve.ratio(size):.2f}",
    )
  yield table
  table = rich.table.Table(
    title="The best chain, by how often a drafted token is right"
  )
  for column in (
    "right",
    "nodes",
    "speed-up",
    "nodes",
    "if drafting were free",
  ):
    table.add_column(column, justify="right")
  for best in optimize.chain_ceiling(curve):
    table.add_row(
      f"{best.acceptance:.2f}",
      str(best.size),
      f"{best.speedup:.2f}",
      str(best.free_size),
      f"{best.free_speedup:.2f}",
    )
  yield table


def costs(
  model: Annotated[str, typer.Option(help="As for ldjax generate.")] = "demo",
  draft: Annotated[str, typer.Option(help="As for ldjax generate.")] = "auto",
  batch: Annotated[int, typer.Option(help="Rows that run together.")] = 1,
  rounds: Annotated[
    int, typer.Option(help="Steps at each size; the median counts.")
  ] = 15,
) -> None:
  """Measures what a round costs by the size of its tree, and keeps it.

  From then on decoding chooses the size of its trees by it. The second table is
  the ceiling: the best speed over plain decoding that a draft of some accuracy
  can bring here.
  """
  with _console.reported_errors():
    loaded = _console.load(model, draft)
    curve = optimize.measure_costs(
      loaded, batch=batch, rounds=rounds, progress=_console.say
    )
    for table in _tables(curve):
      rich.console.Console().print(table)
