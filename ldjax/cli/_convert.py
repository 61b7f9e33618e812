"""`ldjax convert` and `ldjax inspect`: other formats, and what one holds."""

import pathlib
from typing import Annotated, Any, cast

import rich.console
import rich.table
import rich.text
import typer

from ldjax import _convert, checkpoints
from ldjax.cli import _console


def _show(found: checkpoints.Contents) -> None:
  table = rich.table.Table(title=rich.text.Text(str(found.path)))
  table.add_column("what")
  table.add_column("value")
  for key, value in found.rows().items():
    table.add_row(key, rich.text.Text(value))
  rich.console.Console().print(table)


def inspect(
  path: Annotated[
    str,
    typer.Argument(
      help="A model, a draft, a folder with a config.json, or as for generate.",
      show_default=False,
    ),
  ],
) -> None:
  """Says what a checkpoint holds, without reading its weights."""
  with _console.reported_errors():
    here = pathlib.Path(path)
    where = here if here.exists() else checkpoints.resolve(path, _console.say)
    _show(checkpoints.inspect(where))


def convert(
  src: Annotated[
    str,
    typer.Argument(help="As for ldjax generate --model.", show_default=False),
  ],
  dst: Annotated[
    pathlib.Path, typer.Argument(help="Folder to make.", show_default=False)
  ],
  to: Annotated[
    str,
    typer.Option(
      help="orbax or hf for models; medusa or vllm for Medusa heads; ldjax for"
      " any published draft."
    ),
  ] = "orbax",
  dtype: Annotated[
    str | None,
    typer.Option(
      help="float32, bfloat16 or float16; default the files' own, float32 for"
      " GGUF."
    ),
  ] = None,
  target: Annotated[
    str | None,
    typer.Option(
      help="The model that a draft was made for, with --to ldjax.",
    ),
  ] = None,
  force: Annotated[
    bool, typer.Option("--force", help="Replace what is there.")
  ] = False,
) -> None:
  """Converts a checkpoint, tensor by tensor, and reads it back.

  It is written beside its place and moved there at the end; interrupted, it
  leaves nothing.
  """
  with _console.reported_errors():
    form = cast(Any, to)
    _show(
      _convert.convert(
        src,
        dst,
        to=form,
        dtype=dtype,
        target=target,
        force=force,
        progress=_console.say,
      )
    )
