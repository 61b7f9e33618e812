"""`ldjax profile`: where the time goes, and what would help."""

import json
import pathlib
from typing import Annotated

import rich.box
import rich.console
import rich.table
import rich.text
import typer

from ldjax import _settings, bench
from ldjax import profile as profile_lib
from ldjax.cli import _console, _options


def _show(table: profile_lib.Table) -> rich.table.Table:
  shown = rich.table.Table(
    title=rich.text.Text(table.title),
    caption=rich.text.Text(table.note) if table.note else None,
    title_justify="left",
    caption_justify="left",
    box=rich.box.SIMPLE_HEAD,
  )
  for column in table.columns:
    shown.add_column(column, overflow="fold")
  for row in table.rows:
    shown.add_row(*map(rich.text.Text, row))
  return shown


def profile(
  prompts: Annotated[
    pathlib.Path,
    typer.Option(
      help="JSON lines with prompt, turns or text.", show_default=False
    ),
  ],
  model: Annotated[str, typer.Option(help="As for ldjax generate.")] = "demo",
  draft: Annotated[str, typer.Option(help="As for ldjax generate.")] = "auto",
  tree: Annotated[str, typer.Option(help="As for ldjax generate.")] = "auto",
  cache_dtype: _options.CacheDtype = None,
  limit: Annotated[
    int | None, typer.Option(min=1, help="Prompts to take at most.")
  ] = None,
  max_new_tokens: _options.MaxNewTokens = 64,
  batch_size: Annotated[
    int, typer.Option(min=1, help="Prompts to decode together.")
  ] = 1,
  rounds: Annotated[
    int,
    typer.Option(
      min=1, help="Times that each part and step is measured by itself."
    ),
  ] = 15,
  project: Annotated[
    bool,
    typer.Option(
      "--project", help="Adds a projection to devices that are not here."
    ),
  ] = False,
  as_json: Annotated[
    pathlib.Path | None,
    typer.Option("--json", help="File to write the report to."),
  ] = None,
  as_html: Annotated[
    pathlib.Path | None,
    typer.Option("--html", help="File for a page with plots."),
  ] = None,
  trace: Annotated[
    pathlib.Path | None,
    typer.Option(help="Folder for a trace of JAX's profiler."),
  ] = None,
) -> None:
  """Says where the time of decoding goes, and what would help most.

  The prompts are decoded as ldjax generate does it and with each size of tree
  alone; then the parts of a round, the machine's ceilings, the host and the
  cache are measured. Every gain that is promised says its arithmetic.
  """
  with _console.reported_errors():
    for file in (as_json, as_html):
      if file is not None and not file.parent.is_dir():
        raise FileNotFoundError(f"{file}: there is no folder to write it to")
    if trace is not None and trace.exists() and not trace.is_dir():
      raise NotADirectoryError(f"{trace}: is a file; give a folder for --trace")
    settings = _settings.Settings(max_new_tokens=max_new_tokens)
    texts = bench.read_prompts(prompts, limit)
    loaded = _console.load(model, draft, tree, cache_dtype=cache_dtype)
    report = profile_lib.profile(
      loaded,
      texts,
      settings,
      batch_size=batch_size,
      rounds=rounds,
      project=project,
      trace=trace,
      progress=_console.say,
    )
    out = rich.console.Console(highlight=False)
    for table in profile_lib.tables(report):
      out.print(_show(table))
    for file, text in (
      (as_json, json.dumps(report, indent=2) + "\n"),
      (as_html, profile_lib.to_html(report) if as_html else ""),
    ):
      if file is not None:
        file.write_text(text, "utf-8")
        _console.say(f"Wrote {file}")
    if trace is not None:
      _console.say(f"Wrote a trace to {trace}")
