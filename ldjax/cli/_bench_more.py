"""`ldjax bench first-token` and `ldjax bench last-words`."""

import pathlib
from typing import Annotated, Any

import rich.progress
import typer

from ldjax import bench as bench_lib
from ldjax.cli import _bench, _console, _tables


def first_token(
  model: Annotated[str, typer.Option(help="As for ldjax generate.")] = "demo",
  methods: _bench.Methods = "autoregressive,ldjax",
  rounds: Annotated[
    int, typer.Option(min=1, help="That are measured; the median counts.")
  ] = 5,
  markdown: _bench.Markdown = False,
  as_json: _bench.JsonFile = None,
) -> None:
  """Time to the first token: short, long, and repeated prompts.

  Short is 32 tokens; long 1,024, or what the model holds; repeated is a system
  prompt of 512 tokens that was read before, with another 16 behind it, and new
  is the same when it was not. One request at a time; the methods take turns.
  """
  with _console.reported_errors():
    _bench.check_file(as_json)
    made = _bench.load_methods(model, methods)
    with rich.progress.Progress(console=_console.console) as progress:
      task = progress.add_task("rounds", total=rounds + 1)
      report = bench_lib.first_token(
        made,
        rounds=rounds,
        on_round=lambda done: progress.update(task, completed=done),
      )
    lengths = report["tokens"]
    kinds = ("short", "long", "new", "repeated")
    _tables.show(
      f"{report['model']}: seconds to the first token of {lengths['short']},"
      f" {lengths['long']} and {lengths['system']} tokens",
      ["method", *(f"{kind} s" for kind in kinds), "repeated over new"],
      [
        [name, *(f"{row[kind]:.3f}" for kind in kinds), f"{row['ratio']:.1%}"]
        for name, row in report["methods"].items()
      ],
      markdown=markdown,
    )
    _bench.write_json(as_json, report)


def last_words(
  passages: Annotated[
    pathlib.Path, typer.Option(help="JSON lines with text, as LAMBADA has.")
  ],
  model: Annotated[str, typer.Option(help="As for ldjax generate.")] = "demo",
  methods: _bench.Methods = "autoregressive,ldjax",
  dtypes: Annotated[
    str | None,
    typer.Option(
      help="Of the weights, comma-separated; default as for ldjax generate."
    ),
  ] = None,
  limit: Annotated[
    int | None, typer.Option(help="Passages to take at most.")
  ] = None,
  markdown: _bench.Markdown = False,
  as_json: _bench.JsonFile = None,
) -> None:
  """How often the last word of a passage is the likeliest continuation.

  Speculation changes none: all methods get the same ones, in one dtype.
  """
  with _console.reported_errors():
    texts = bench_lib.read_prompts(passages, limit)
    _bench.check_file(as_json)
    found: dict[str, Any] = {}
    for dtype in (dtypes or "default").split(","):
      wanted = None if dtype == "default" else dtype.strip()
      made = _bench.load_methods(model, methods, wanted)
      _console.say(f"Decoding {len(texts)} passages with {len(made)} methods")
      found[dtype.strip()] = bench_lib.compare_last_words(made, texts)
    _tables.show(
      f"{model}: last words of {len(texts)} passages",
      ["method", "dtype", "right", "as the first method"],
      [
        [name, dtype, f"{row['accuracy']:.1%}", f"{row['same']}/{len(texts)}"]
        for dtype, rows in found.items()
        for name, row in rows.items()
      ],
      markdown=markdown,
    )
    report = {"model": model, "passages": len(texts), "dtypes": found}
    _bench.write_json(as_json, report)
