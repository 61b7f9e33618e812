"""`ldjax optimize`: looks at model and machine and writes a decode plan."""

import pathlib
from collections.abc import Mapping
from typing import Annotated, Any

import rich.console
import rich.table
import typer

from ldjax import _plan, bench, optimize
from ldjax.cli import _console


def _ratio(found: Mapping[str, Any]) -> str:
  ratio = found.get("step_ratio")
  if isinstance(ratio, Mapping):
    return ", ".join(f"{name}: {value:.2f}" for name, value in ratio.items())
  return "" if ratio is None else f"{ratio:.2f}"


def _notes(name: str, found: Mapping[str, Any]) -> str:
  if "why" in found:
    return str(found["why"])
  if name == "fusion" and "before" in found:
    before, after = found["before"], found["after"]
    says = (
      f"temporary MB {before['temporary_bytes'] / 1e6:.1f} ->"
      f" {after['temporary_bytes'] / 1e6:.1f}, intermediates reused"
      f" {before['reused']:.0%} -> {after['reused']:.0%}"
    )
    if "block_kernels" in before:
      says = (
        f"kernels a block {before['block_kernels']} ->"
        f" {after['block_kernels']}, {says}"
      )
    return says
  if name == "precision":
    return (
      f"KL {found['kl']:.4f} (bound {found['kl_bound']:.4f} of"
      f" {found['max_kl']}), greedy tokens changed {found['changed']:.1%},"
      f" MB {found['parameter_bytes'][0] / 1e6:.0f} ->"
      f" {found['parameter_bytes'][1] / 1e6:.0f}"
    )
  if name == "pages":
    return (
      f"{found['initial_pages']} pages at first, up to {found['num_pages']};"
      f" {found['rule']}"
    )
  if name == "tree":
    return "; ".join(
      f"{batch} rows: {rate['nodes']} nodes,"
      f" {rate['tokens_per_second']:.0f} tokens/s projected"
      for batch, rate in found["projected_by_batch"].items()
    )
  return ""


def _table(plan: optimize.DecodePlan) -> rich.table.Table:
  table = rich.table.Table(title=f"A plan for {plan.name}")
  for column in ("pass", "change", "faster steps", "measured"):
    table.add_column(column)
  for name, found in plan.evidence.items():
    if isinstance(found, Mapping):
      table.add_row(
        name, str(found["change"]), _ratio(found), _notes(name, found)
      )
  return table


def optimize_command(
  model_path: Annotated[
    str, typer.Option("--model-path", "--model", help="As for ldjax generate.")
  ] = "demo",
  draft: Annotated[str, typer.Option(help="As for ldjax generate.")] = "auto",
  batch_size: Annotated[int, typer.Option(help="Rows to decode together.")] = 1,
  memory_budget: Annotated[
    str,
    typer.Option(help="For weights and cache, a device: 24GB, or a share."),
  ] = "0.75",
  parallelism: Annotated[
    int, typer.Option(help="Devices to lay the model over.")
  ] = 1,
  max_kl: Annotated[
    float,
    typer.Option(
      help="KL divergence, nats a token, that fewer bits may cost; 0: none."
    ),
  ] = 0.0,
  max_changed: Annotated[
    float, typer.Option(help="Share of greedy tokens that may change.")
  ] = 1.0,
  max_len: Annotated[
    int | None,
    typer.Option(help="Tokens of prompt and answer together at most."),
  ] = None,
  passes: Annotated[
    str, typer.Option(help="Which passes to make, comma-separated.")
  ] = ",".join(_plan.PASSES),
  prompts: Annotated[
    pathlib.Path | None,
    typer.Option(
      help="JSON lines to measure with; some of ldjax's own otherwise."
    ),
  ] = None,
  output: Annotated[
    pathlib.Path, typer.Option(help="Where to write the plan.")
  ] = pathlib.Path("plan.json"),
) -> None:
  """Tries what makes a model decode faster here, and writes a plan.

  Each pass is measured and kept only if it gains; at the end the whole runs
  against the defaults. Use it with --plan plan.json, or
  ldjax.load(..., plan="plan.json").
  """
  with _console.reported_errors():
    folder = output.absolute().parent
    if not folder.is_dir():
      raise FileNotFoundError(f"{output}: there is no folder to write it to")
    given: dict[str, Any] = {}
    if prompts is not None:
      given["prompts"] = bench.read_prompts(prompts, None)
    _console.keep_compilations()
    plan = _plan.plan(
      model_path,
      draft=draft,
      batch_size=batch_size,
      memory_budget=memory_budget,
      parallelism=parallelism,
      max_kl=max_kl,
      max_changed=max_changed,
      max_len=max_len,
      passes=[each.strip() for each in passes.split(",") if each.strip()],
      progress=_console.say,
      **given,
    )
    plan.save(output)
    rich.console.Console().print(_table(plan))
    speed = plan.tokens_per_second
    low, middle, high = speed["ratio"]
    kept = "" if plan.evidence["kept"] else " (so the defaults stay)"
    _console.say(
      f"Tokens/s: {speed['default']:.1f} by default, {speed['plan']:.1f} with"
      f" these changes: {middle:.2f} times, 95% between {low:.2f} and"
      f" {high:.2f}{kept}. Wrote {output}"
    )
