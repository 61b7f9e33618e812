"""What all commands share: progress on stderr, errors without a traceback."""

import contextlib
import os
from collections.abc import Iterator

import jax
import rich.console
import rich.text
import typer

from ldjax import _load, assemble

console = rich.console.Console(stderr=True, highlight=False)


def say(line: str) -> None:
  """Shows a line of progress on stderr."""
  # As text: a path or an error may look like markup.
  console.print(rich.text.Text(line, "dim"), soft_wrap=True)


def keep_compilations() -> None:
  """Turns on JAX's persistent compilation cache, unless it is set already."""
  if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    jax.config.update(
      "jax_compilation_cache_dir", os.path.join(base, "ldjax", "xla")
    )


@contextlib.contextmanager
def reported_errors() -> Iterator[None]:
  """Turns errors of input into one line and exit code 2."""
  try:
    yield
  except KeyboardInterrupt:
    console.print("interrupted")
    raise typer.Exit(130) from None
  except (ImportError, OSError, ValueError) as error:
    line = " ".join(str(error).splitlines())
    console.print(
      rich.text.Text.assemble(("error:", "bold red"), " ", line), soft_wrap=True
    )
    raise typer.Exit(2) from None


def load(
  model: str,
  draft: str = "auto",
  tree: str = "auto",
  max_len: int | None = None,
  cache_dtype: str | None = None,
  plan: str | os.PathLike[str] | None = None,
  dtype: str | None = None,
) -> assemble.LanguageModel:
  """Loads a model with a spinner that says what goes on."""
  keep_compilations()
  with console.status(rich.text.Text(f"Loading {model}")) as status:
    return _load.load(
      model,
      draft=draft,
      tree=tree,
      max_len=max_len,
      cache_dtype=cache_dtype,
      plan=plan,
      dtype=dtype,
      progress=lambda line: status.update(
        rich.text.Text(f"Loading {model}: {line}")
      ),
    )
