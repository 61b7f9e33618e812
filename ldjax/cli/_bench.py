"""`ldjax bench`: methods side by side on a file of prompts."""

import json
import pathlib
from typing import Annotated, Any

import rich.progress
import typer

from ldjax import _settings
from ldjax import bench as bench_lib
from ldjax.cli import _console, _options, _tables

Methods = Annotated[
  str,
  typer.Option(
    help="Of autoregressive, ngram, ldjax (what generate does by default),"
    " ldjax:medusa, medusa2, medusa2-tuned, transformers, transformers-lookup,"
    " or folders with draft heads; comma-separated."
  ),
]
Markdown = Annotated[
  bool, typer.Option("--markdown", help="Print the table as Markdown.")
]
JsonFile = Annotated[
  pathlib.Path | None,
  typer.Option("--json", help="File to write the figures to."),
]


def check_file(as_json: pathlib.Path | None) -> None:
  """Finds out before the work whether a file can be written.

  Args:
    as_json: the file.

  Raises:
    FileNotFoundError: if there is no folder for it.
  """
  if as_json is not None and not as_json.parent.is_dir():
    raise FileNotFoundError(f"{as_json}: there is no folder to write it to")


def write_json(as_json: pathlib.Path | None, report: dict[str, Any]) -> None:
  """Writes a report where one is wanted.

  Args:
    as_json: the file.
    report: what to write.
  """
  if as_json is not None:
    as_json.write_text(json.dumps(report, indent=2) + "\n", "utf-8")
    _console.say(f"Wrote {as_json}")


def load_methods(
  model: str, methods: str, dtype: str | None = None
) -> dict[str, bench_lib.Method]:
  """Loads a model and puts the methods around it, the baseline among them.

  Args:
    model: as for `ldjax generate`.
    methods: names, comma-separated.
    dtype: of the weights.
  """
  names = [name.strip() for name in methods.split(",") if name.strip()]
  if bench_lib.BASELINE not in names:
    names.insert(0, bench_lib.BASELINE)
  return bench_lib.make_methods(
    _console.load(model, dtype=dtype), names, path=model, progress=_console.say
  )


def _number(value: float | None, scale: float = 1.0, places: int = 2) -> str:
  return "-" if value is None else f"{value / scale:.{places}f}"


def _show(report: dict[str, Any], markdown: bool) -> None:
  others = list(next(iter(report["methods"].values()))["over"])
  columns = [
    "method",
    "tokens/s",
    "speedup",
    *(f"over {name}" for name in others),
    "mean accepted",
    "first token s",
    "peak cache MB",
    "GFLOP/token",
    "GB/token",
    "equal",
    "near ties",
  ]
  rows = [
    [
      name,
      _number(row["tokens_per_second"], places=1),
      _number(row["speedup"]),
      *(_number(row["over"][other]) for other in others),
      _number(row["mean_accepted"]),
      _number(row["time_to_first_token_s"]),
      _number(row["peak_cache_bytes"], 1e6, 1),
      _number(row["flops_per_token"], 1e9),
      _number(row["bytes_per_token"], 1e9),
      f"{row['equal'][0]}/{row['equal'][1]}",
      str(row["near_ties"]),
    ]
    for name, row in report["methods"].items()
  ]
  for name, row in report["methods"].items():
    _console.say(f"{name}: draft {row['draft']}")
  _tables.show(
    f"{report['model']} on {report['device']}, {report['prompts']} prompts, up"
    f" to {report['max_new_tokens']} tokens, batch {report['batch_size']}",
    columns,
    rows,
    markdown=markdown,
  )


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
  methods: Methods = "autoregressive,ngram,ldjax",
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
  markdown: Markdown = False,
  as_json: JsonFile = None,
) -> None:
  """Compares methods of decoding: speed, acceptance, memory, work, equality.

  All methods run in one process, interleaved prompt by prompt (or batch by
  batch), after a warm-up. Speedup is the median over prompts of the ratio to
  autoregressive on the same prompt. See also ldjax bench memory, first-token
  and last-words.
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
    check_file(as_json)
    made = load_methods(model, methods)
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
    _show(report, markdown)
    write_json(as_json, report)
