"""`ldjax memory` and `ldjax bench memory`: what fits, and what pages save."""

import functools
import json
import pathlib
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import rich.console
import rich.progress
import rich.table
import rich.text
import typer

from ldjax import assemble, checkpoints, memory
from ldjax import bench as bench_lib
from ldjax.cli import _bench, _console, _options


def _size(count: float) -> str:
  return (
    f"{count / 2**30:.2f} GiB"
    if count >= 2**30
    else (f"{count / 2**20:.1f} MiB")
  )


def report(
  model: Annotated[str, typer.Option(help="As for ldjax generate.")] = "demo",
  budget: Annotated[
    str,
    typer.Option(
      help="For weights and cache: an amount like 24GB, or a share of the"
      " device's memory like 0.75."
    ),
  ] = "0.75",
  max_len: Annotated[
    int, typer.Option(min=2, help="Tokens of the longest sequence.")
  ] = 2048,
  batch_size: Annotated[
    int, typer.Option(min=1, help="Sequences that run together.")
  ] = 8,
  page_size: Annotated[int, typer.Option(min=2, help="Positions a page.")] = 16,
  dtype: Annotated[
    str | None,
    typer.Option(help="Of the weights; default as for ldjax generate."),
  ] = None,
  cache_dtype: _options.CacheDtype = None,
  as_json: Annotated[
    bool, typer.Option("--json", help="Print one JSON object.")
  ] = False,
) -> None:
  """Says how many sequences fit into a budget; loads and allocates nothing.

  The weights are the target's; a draft's come on top.
  """
  with _console.reported_errors():
    contents = checkpoints.inspect(checkpoints.resolve(model, _console.say))
    if contents.config is None:
      raise ValueError(f"{model} holds a draft alone; give a model")
    on_cpu = jax.default_backend() == "cpu"
    weights = jnp.dtype(dtype or ("float32" if on_cpu else "bfloat16"))
    held = memory.cache_dtype(cache_dtype or weights)
    init_cache = assemble.cache_factory(
      contents.config, max_len=max_len, page_size=page_size, dtype=held
    )
    cache = jax.eval_shape(functools.partial(init_cache, 1))
    found = memory.memory_report(
      budget_bytes=memory.parse_budget(budget, memory.device_memory()),
      parameter_bytes=contents.parameters * weights.itemsize,
      sequence_bytes=cache.held_bytes(max_len),
      page_bytes=cache.page_bytes,
    )
    if as_json:
      print(json.dumps(found._asdict()))
      return
    table = rich.table.Table(title=rich.text.Text(f"{model} in {budget}"))
    table.add_column("what")
    table.add_column("value", justify="right")
    for name, value in (
      ("budget", _size(found.budget_bytes)),
      (f"weights ({weights.name})", _size(found.parameter_bytes)),
      (
        f"a page of {page_size} positions ({held.name})",
        _size(found.page_bytes),
      ),
      ("pages that fit", f"{found.pages:,}"),
      (f"a sequence of {max_len} tokens", _size(found.sequence_bytes)),
      (f"{batch_size} of them", _size(batch_size * found.sequence_bytes)),
      (f"sequences of {max_len} tokens that fit", f"{found.sequences:,}"),
    ):
      table.add_row(name, value)
    rich.console.Console().print(table)
    if found.sequences < batch_size:
      _console.say(
        f"Not all {batch_size} fit at that length: shorter ones still may, and"
        " rows give way where they do not; or give a larger budget, a smaller"
        " batch, or --cache-dtype int8"
      )


def _show(found: dict[str, Any]) -> None:
  table = rich.table.Table(
    title=f"{found['requests']} requests of up to {found['longest']} tokens,"
    f" {found['page_size']} positions a page, {found['cache_dtype']}"
  )
  for column in ("cache", "bytes", "rows at once", "rounds", "preempted"):
    table.add_column(column, justify="left" if column == "cache" else "right")
  for name, key in (
    ("preallocated", "preallocated"),
    ("pages, same work", "same_work"),
    ("pages, same bytes", "same_bytes"),
  ):
    row = found[key]
    table.add_row(
      name,
      _size(row["bytes"]),
      f"{row['rows']:.1f}",
      str(row["steps"]),
      str(row.get("preempted", "-")),
    )
  rich.console.Console().print(table)
  _console.say(
    f"waste {found['waste']:.1%}, fragmentation {found['fragmentation']:.1%},"
    f" {found['concurrency_ratio']:.2f} times the sequences in the same bytes,"
    f" {found['peak_reduction']:.1%} fewer bytes for the same work"
  )


def bench_memory(
  prompts: Annotated[
    pathlib.Path | None,
    typer.Option(
      help="JSON lines whose prompts' lengths to take; default a fixed trace of"
      " lengths around 80 tokens."
    ),
  ] = None,
  model: Annotated[str, typer.Option(help="As for ldjax generate.")] = "demo",
  requests: Annotated[
    int, typer.Option(min=1, help="Requests of the trace.")
  ] = 500,
  rows: Annotated[
    int, typer.Option(min=1, help="Sequences of the preallocated cache.")
  ] = 32,
  page_size: Annotated[int, typer.Option(min=2, help="Positions a page.")] = 16,
  cache_dtype: _options.CacheDtype = None,
  seed: Annotated[int, typer.Option(help="Of the lengths.")] = 0,
  as_json: _bench.JsonFile = None,
) -> None:
  """Pages against preallocation, on the real pool; the model computes nothing.

  Each request emits 16 to 512 tokens. Preallocated is a cache that gives each
  sequence the length of the longest. The trace runs with as many rows in
  pages, for the bytes that the same work takes, and in pages of the same bytes,
  for the rows that run at once.
  """
  with _console.reported_errors():
    _bench.check_file(as_json)
    loaded = _console.load(model, draft="none")
    lengths = None
    if prompts is not None:
      texts = bench_lib.read_prompts(prompts, requests)
      lengths = [len(loaded.tokenizer.encode(text)) for text in texts]
    trace = bench_lib.memory_trace(lengths, count=requests, seed=seed)
    with rich.progress.Progress(console=_console.console) as progress:
      task = progress.add_task("requests", total=3 * requests)
      found = bench_lib.compare_memory(
        loaded,
        trace,
        rows=rows,
        page_size=page_size,
        cache_dtype=cache_dtype,
        on_request=lambda done: progress.update(task, advance=1),
      )
    _show(found)
    _bench.write_json(as_json, found)
