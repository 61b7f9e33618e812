"""`ldjax train`: a draft from the target's own answers."""

import pathlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import rich.console
import rich.progress
import rich.table
import typer

from ldjax import _request, assemble, bench, optimize, training
from ldjax.cli import _console

_LOG_SECONDS = 30


@contextmanager
def _bar(columns: tuple[str, ...]) -> Iterator[rich.progress.Progress]:
  with rich.progress.Progress(
    rich.progress.TextColumn("{task.description}"),
    rich.progress.BarColumn(),
    rich.progress.MofNCompleteColumn(),
    rich.progress.TimeRemainingColumn(),
    *(rich.progress.TextColumn(f"{{task.fields[{name}]}}") for name in columns),
    console=_console.console,
  ) as progress:
    yield progress


def _log() -> Callable[[str], None]:
  """Shows a line now and then where a bar cannot be: in a file or a pipe."""
  last = time.monotonic()

  def log(line: str) -> None:
    nonlocal last
    now = time.monotonic()
    if not _console.console.is_terminal and now >= last + _LOG_SECONDS:
      last = now
      _console.say(line)

  return log


def _write_texts(
  model: assemble.LanguageModel,
  folder: pathlib.Path,
  prompts: list[str] | None,
  tokens: int,
  max_new_tokens: int,
  seed: int,
  batch: int,
) -> training.Corpus:
  ids = None
  if prompts is not None:
    ids = [_request.encode_prompt(model.tokenizer, text) for text in prompts]
  log = _log()
  with _bar(()) as progress:
    task = progress.add_task("tokens of text", total=tokens)

    def tell(done: int) -> None:
      progress.update(task, completed=min(done, tokens))
      log(f"{done:,} of {tokens:,} tokens of text")

    return training.write_texts(
      model,
      folder,
      tokens=tokens,
      prompts=ids,
      max_new_tokens=max_new_tokens,
      seed=seed,
      batch=batch,
      on_tokens=tell,
    )


def _train(
  model: assemble.LanguageModel,
  corpus: training.Corpus,
  kind: str,
  out: pathlib.Path,
  vocab_size: int,
  depth: int,
  config: training.TrainConfig,
) -> training.TrainedDraft:
  shape = training.draft_config(
    kind,
    model.config,
    vocab_size=min(vocab_size, model.config.vocab_size),
    depth=depth,
  )
  log = _log()
  with _bar(("loss", "accuracy")) as progress:
    task = progress.add_task(
      "updates", total=config.steps, loss="", accuracy=""
    )

    def tell(report: training.StepReport) -> None:
      right = " ".join(f"{x:.2f}" for x in report.losses.accuracy)
      loss = f"loss {report.losses.total:.3f}"
      accuracy = f"right by depth {right}"
      progress.update(task, completed=report.step, loss=loss, accuracy=accuracy)
      log(f"update {report.step} of {config.steps}, {loss}, {accuracy}")

    return training.train_draft(model, corpus, shape, out, config, tell)


def _tables(
  draft: training.TrainedDraft, curve: optimize.CostCurve | None
) -> Iterator[rich.table.Table]:
  found = draft.calibration
  table = rich.table.Table(
    title="Accepted on held-out text, by depth and rank of the guess"
  )
  table.add_column("depth", justify="right")
  ranks = min(4, found.acceptance.shape[1])
  for rank in range(ranks):
    table.add_column(f"rank {rank + 1}", justify="right")
  table.add_column("places", justify="right")
  for depth, row in enumerate(found.acceptance):
    table.add_row(
      str(depth + 1),
      *(f"{value:.3f}" for value in row[:ranks]),
      str(found.places[depth]),
    )
  yield table
  table = rich.table.Table(title="Expected of the best tree of each size")
  for column in ("nodes", "tokens a round", "speed-up here"):
    table.add_column(column, justify="right")
  for size in (2, 4, 8, 16, 32):
    tokens = found.expected_tokens(size)
    gain = "-" if curve is None else f"{tokens / curve.ratio(size):.2f}"
    table.add_row(str(size), f"{tokens:.2f}", gain)
  yield table


def train(
  kind: Annotated[
    str, typer.Argument(help="medusa, hydra, recurrent or eagle.")
  ],
  out: Annotated[
    pathlib.Path,
    typer.Option(help="Folder for the draft, its texts and checkpoints."),
  ],
  model: Annotated[str, typer.Option(help="As for ldjax generate.")] = "demo",
  prompts: Annotated[
    pathlib.Path | None,
    typer.Option(
      help="JSON lines with prompt, turns or text; without, the model asks"
      " itself."
    ),
  ] = None,
  tokens: Annotated[
    int, typer.Option(help="Tokens of answers to train on.")
  ] = 1_000_000,
  corpus: Annotated[
    pathlib.Path | None,
    typer.Option(help="Folder of texts; default a folder in --out."),
  ] = None,
  vocab_size: Annotated[
    int, typer.Option(help="Tokens that the draft can guess, the commonest.")
  ] = 8192,
  depth: Annotated[int, typer.Option(help="Tokens ahead.")] = 4,
  steps: Annotated[int, typer.Option(help="Updates.")] = 3000,
  batch: Annotated[int, typer.Option(help="Windows an update.")] = 16,
  window: Annotated[int, typer.Option(help="Tokens a window.")] = 128,
  learning_rate: Annotated[float, typer.Option(help="At its highest.")] = 1e-3,
  max_new_tokens: Annotated[
    int, typer.Option(help="Tokens of an answer at most.")
  ] = 256,
  rows: Annotated[int, typer.Option(help="Texts written together.")] = 32,
  seed: Annotated[int, typer.Option(help="Of texts and training.")] = 0,
) -> None:
  """Trains a draft for a model: its own answers, then updates, then a report.

  All of it goes on where it was when Ctrl-C came. The draft is for
  `ldjax generate --draft OUT` and `ldjax.load(draft=OUT)`.
  """
  with _console.reported_errors():
    # What can be refused is refused before hours of work.
    config = training.TrainConfig(
      steps=steps,
      batch=batch,
      window=window,
      learning_rate=learning_rate,
      seed=seed,
    )
    if kind not in training.KINDS:
      raise ValueError(
        f"no draft is called {kind!r}; there are {', '.join(training.KINDS)}"
      )
    asked = None if prompts is None else bench.read_prompts(prompts)
    loaded = _console.load(model, "none")
    _console.say(
      f"Writes {tokens:,} tokens of answers, makes {steps:,} updates; Ctrl-C"
      " keeps what is done"
    )
    texts = _write_texts(
      loaded,
      out / "corpus" if corpus is None else corpus,
      asked,
      tokens,
      max_new_tokens,
      seed,
      rows,
    )
    _, have = texts.counts()
    if have < tokens:
      _console.say(f"The prompts gave {have:,} tokens")
    draft = _train(loaded, texts, kind, out, vocab_size, depth, config)
    curve = optimize.load_costs(assemble.with_draft(loaded, out))
    for table in _tables(draft, curve):
      rich.console.Console().print(table)
    _console.say(f"Wrote {out}")
