"""The command line, `ldjax` and `lightdecoding-cli`: thin."""

import typer

from ldjax.cli import (
  _bench,
  _bench_more,
  _convert,
  _costs,
  _demo,
  _generate,
  _kernels,
  _memory,
  _optimize,
  _profile,
  _train,
)

__all__ = ["app", "main"]

app = typer.Typer(
  help="Lossless speculative decoding for JAX.",
  no_args_is_help=True,
  add_completion=False,
  pretty_exceptions_enable=False,
)
app.command()(_generate.generate)
app.command()(_demo.demo)
_benches = typer.Typer(invoke_without_command=True)
_benches.callback()(_bench.bench)
_benches.command("memory")(_memory.bench_memory)
_benches.command("first-token")(_bench_more.first_token)
_benches.command("last-words")(_bench_more.last_words)
app.add_typer(_benches, name="bench")
app.command("memory")(_memory.report)
app.command()(_costs.costs)
app.command("optimize")(_optimize.optimize_command)
app.command()(_profile.profile)
app.command()(_kernels.kernels)
app.command()(_kernels.tune_kernels)
app.command()(_train.train)
app.command()(_convert.convert)
app.command()(_convert.inspect)


def main() -> None:
  """Runs the command that `sys.argv` asks for."""
  app()
