"""`ldjax kernels` and `ldjax tune-kernels`."""

from typing import Annotated

import jax
import rich.console
import rich.table
import typer

from ldjax import checkpoints, optimize, pallas_kernels
from ldjax.cli import _console


def _takes(entry: pallas_kernels.Limits) -> str:
  """Sizes that a backend takes, in words."""
  words = []
  if entry.head_dims is not None:
    words.append(f"H {', '.join(map(str, entry.head_dims))}")
  if entry.page_sizes is not None:
    words.append(f"Z {', '.join(map(str, entry.page_sizes))}")
  elif entry.least_page_size > 1:
    words.append(f"Z from {entry.least_page_size}")
  if entry.most_page_numbers is not None:
    words.append(f"Z times H up to {entry.most_page_numbers}")
  return "; ".join(words) or "any"


def _chosen(entry: pallas_kernels.Limits) -> str:
  """When a backend is chosen unasked, in words."""
  if entry.implementation == "xla":
    return "where no other is"
  words = []
  if entry.chosen_fused_multiple > 1:
    words.append(f"2H a multiple of {entry.chosen_fused_multiple}")
  if entry.chosen_page_multiple > 1:
    words.append(f"Z of {entry.chosen_page_multiple}")
  return ", ".join(words) or "where it fits"


def kernels() -> None:
  """Shows which kernels there are and what each of them takes."""
  table = rich.table.Table(title=f"Kernels, with jax {jax.__version__}")
  for column in (
    "kernel",
    "implementation",
    "devices",
    "queries",
    "pages",
    "sizes",
    "chosen unasked",
    "jax from",
  ):
    table.add_column(column, overflow="fold")
  for entry in pallas_kernels.LIMITS:
    pages = ", ".join(entry.page_dtypes)
    if entry.same_dtype:
      pages = "as the queries"
    table.add_row(
      entry.kernel,
      entry.implementation,
      entry.devices,
      ", ".join(entry.dtypes),
      pages or "–",
      _takes(entry),
      _chosen(entry),
      entry.since,
    )
  rich.console.Console(width=160).print(table)


def tune_kernels(
  model: Annotated[
    str, typer.Option(help="Whose shapes to measure; as for ldjax generate.")
  ] = "demo",
  batch: Annotated[int, typer.Option(help="Rows that run together.")] = 1,
  nodes: Annotated[int, typer.Option(help="Nodes of a round's tree.")] = 32,
  length: Annotated[int, typer.Option(help="Positions of each row.")] = 1024,
) -> None:
  """Measures block sizes of the kernels on this device, and keeps them."""
  with _console.reported_errors():
    device = jax.devices()[0]
    if device.platform != "tpu":
      _console.say(
        f"nothing to tune: only the TPU kernels have sizes to choose, and this"
        f" device is {device.device_kind} ({device.platform})"
      )
      return
    config = checkpoints.read_config(checkpoints.resolve(model, _console.say))
    sizes = optimize.tune_kernels(
      config, batch=batch, nodes=nodes, length=length, say=_console.say
    )
    path = pallas_kernels.write_tuned(device.device_kind, sizes)
    _console.say(f"kept in {path}")
