"""`ldjax bench`: methods side by side on a file of prompts."""

import json
import pathlib
from typing import Annotated, Any

import rich.console
import rich.progress
import rich.table
import typer

from ldjax import _settings
from ldjax import bench as bench_lib
from ldjax.cli import _console, _options


def _table(report: dict[str, Any]) -> rich.table.Table:
  table = rich.table.Table(
    title=f"{report['model']} on {report['device']}, {report['prompts']}"
    f" prompts, up to {report['max_new_tokens']} tokens, batch"
    f" {report['batch_size']}"
  )
  for column in (
    "method",
    "tokens/s",
    "speedup",
    "mean accepted",
    "first token s",
    "peak cache MB",
    "equal",
    "near ties",
  ):
    table.add_column(column, justify="left" if column == "method" else "right")
  for name, row in report["methods"].items():
    speedup = row["speedup"]
    table.add_row(
      name,
      f"{row['tokens_per_second']:.1f}",
      "-" if speedup is None else f"{speedup:.2f}",
      f"{row['mean_accepted']:.2f}",
      f"{row['time_to_first_token_s']:.2f}",
      f"{row['peak_cache_bytes'] / 1e6:.1f}",
      f"{row['equal'][0]}/{row['equal'][1]}",
      str(row["near_ties"]),
    )
  return table


def bench(
  context: typer.Context,
  prompts: Annotated[
    pathlib.Path | None,
    typer.Option(
      help="JSON lines with prompt, turns or text; required.",
      show_default=False,
    ),
  ] = None,
  model: Annotated[str, typer.Option(help="As for ldjax generate.")] = "demo",
  methods: Annotated[
    str,
    typer.Option(
      help="Of autoregressive, ngram, ldjax (what generate does by default),"
      " or folders with draft heads; comma-separated."
    ),
  ] = "autoregressive,ngram,ldjax",
  limit: Annotated[
    int | None, typer.Option(help="Prompts to take at most.")
  ] = None,
  batch_size: Annotated[
    int, typer.Option(min=1, help="Prompts to decode together.")
  ] = 1,
  max_new_tokens: _options.MaxNewTokens = 128,
  temperature: _options.Temperature = 0.0,
  top_p: _options.TopP = None,
  top_k: _options.TopK = None,
  min_p: _options.MinP = None,
  seed: _options.Seed = 0,
  as_json: Annotated[
    pathlib.Path | None,
    typer.Option("--json", help="File to write the figures to."),
  ] = None,
) -> None:
  """Compares methods of decoding: speed, acceptance, memory, equality.

  All methods run in one process, interleaved prompt by prompt (or batch by
  batch), after a warm-up. Speedup is the median over prompts of the ratio to
  autoregressive on the same prompt. For memory see ldjax bench memory.
  """
  if context.invoked_subcommand is not None:
    return
  with _console.reported_errors():
    if prompts is None:
      raise typer.BadParameter(
        "give a file, for example examples/prompts.jsonl",
        param_hint="--prompts",
      )
    settings = _settings.Settings(
      max_new_tokens=max_new_tokens,
      temperature=temperature,
      top_k=top_k,
      top_p=top_p,
      min_p=min_p,
      seed=seed,
    )
    texts = bench_lib.read_prompts(prompts, limit)
    if as_json is not None and not as_json.parent.is_dir():
      raise FileNotFoundError(f"{as_json}: there is no folder to write it to")
    names = [name.strip() for name in methods.split(",") if name.strip()]
    if bench_lib.BASELINE not in names:
      names.insert(0, bench_lib.BASELINE)
    loaded = _console.load(model)
    made = bench_lib.make_methods(loaded, names)
    _console.say("Compiling every method and warming up")
    with rich.progress.Progress(console=_console.console) as progress:
      task = progress.add_task("prompts", total=len(texts))
      report = bench_lib.compare(
        made,
        texts,
        settings,
        batch_size=batch_size,
        on_prompt=lambda done: progress.update(task, completed=done),
      )
    rich.console.Console().print(_table(report))
    if as_json is not None:
      as_json.write_text(json.dumps(report, indent=2) + "\n", "utf-8")
      _console.say(f"Wrote {as_json}")
