"""`ldjax.convert`: a checkpoint with its tokenizer to another format."""

import os
import pathlib
from collections.abc import Callable
from typing import Any, Literal

from ldjax import checkpoints, text


def _write_tokenizer(source: pathlib.Path, folder: pathlib.Path) -> None:
  text.save_tokenizer(text.load_tokenizer(source), folder)


def convert(
  src: str | os.PathLike[str],
  dst: str | os.PathLike[str],
  *,
  to: Literal["orbax", "hf", "ldjax", "medusa", "vllm"] = "orbax",
  dtype: Any = None,
  target: str | os.PathLike[str] | None = None,
  force: bool = False,
  progress: Callable[[str], None] | None = None,
) -> checkpoints.Contents:
  """Converts a checkpoint, one tensor at a time.

  It is written beside `dst`, read back, and then given its place; after an
  error or an interruption nothing is left of it.

  Args:
    src: a model or a draft, whatever `load` takes for them.
    dst: the folder to make.
    to: for models `"orbax"` (loads on any mesh) or `"hf"` (config.json and
      safetensors of transformers; of a Gemma 3 with vision its text alone); for
      Medusa heads, also those of a Medusa-2 model, `"medusa"` or `"vllm"`; for
      published drafts of any kind `"ldjax"`, the format of `ldjax train`.
    dtype: float type to write; None for the files' own, float32 for GGUF.
    target: for `to="ldjax"`, the model that the draft was made for; not needed
      for a Medusa-2 model.
    force: whether to replace what is at `dst`.
    progress: called with lines of text as it goes on.

  Returns:
    What `checkpoints.inspect` finds at `dst`.

  Raises:
    FileExistsError: if `dst` exists and `force` is not set.
    FileNotFoundError: for files that are missing.
    OSError: if what was written reads back otherwise.
    ValueError: for what is damaged, not supported, or can't be held by the
      format.

  Example:
    ldjax.convert("demo", "smollm2", to="hf")
  """
  return checkpoints.convert(
    src,
    dst,
    to=to,
    dtype=dtype,
    target=target,
    write_tokenizer=_write_tokenizer,
    force=force,
    progress=progress,
  )
