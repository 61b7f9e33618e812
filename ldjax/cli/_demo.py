"""`ldjax demo`: the same prompt plainly and speculatively."""

from typing import Annotated

import rich.columns
import rich.console
import rich.panel
import rich.text
import typer

from ldjax import _generate, assemble
from ldjax.cli import _console

_PROMPT = (
  "Correct the spelling and return the whole text: Their are many raisons to"
  " lern a langage. A langage opens doors. A langage lets you meat new people."
)


def demo(
  prompt: Annotated[
    str, typer.Argument(help="What to answer.", show_default=False)
  ] = _PROMPT,
  max_new_tokens: Annotated[int, typer.Option(help="Tokens at most.")] = 64,
) -> None:
  """Shows that speculative decoding gives the same text, and how fast.

  Fetches SmolLM2-135M-Instruct once (94 MB, checked by sha256), answers a
  prompt plainly and with the draft that comes with ldjax, and compares the two.
  """
  with _console.reported_errors():
    model = _console.load("demo")
    plain = assemble.with_draft(model, "none")
    results = []
    for method in (plain, model):
      # Twice: the first run compiles, the second is what is shown.
      for run in range(2):
        with _console.console.status(
          f"Answering with draft {method.draft_name}"
          + (" (warm-up)" if not run else "")
        ):
          result = _generate.generate(
            method,
            prompt,
            max_new_tokens=max_new_tokens,
            progress=_console.say,
          )
      results.append(result)
    panels = [
      rich.panel.Panel(
        rich.text.Text(result.text),
        title=title,
        subtitle=f"{result.tokens_per_second:.1f} tokens/s, {result.rounds}"
        " rounds",
        width=58,
      )
      for title, result in zip(("plain", "speculative"), results, strict=True)
    ]
    out = rich.console.Console(highlight=False)
    out.print(rich.text.Text(prompt, "bold"))
    out.print(rich.columns.Columns(panels))
    one, two = results
    equal = one.tokens == two.tokens
    out.print(
      f"The texts are {'equal' if equal else 'NOT equal'}:"
      f" {len(two.tokens)} tokens in {two.rounds} rounds instead of"
      f" {one.rounds}, mean accepted {two.mean_accepted:.2f} (tokens emitted"
      f" over rounds), {two.tokens_per_second / one.tokens_per_second:.2f}"
      " times the tokens/s of plain decoding."
      if one.tokens_per_second
      else "One token was emitted; there is nothing to compare."
    )
    if not equal:
      raise typer.Exit(1)
