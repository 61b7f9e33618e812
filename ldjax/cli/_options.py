"""Options that several commands share, each with its one help text."""

import pathlib
from typing import Annotated, TypeAlias

import typer

MaxNewTokens: TypeAlias = Annotated[int, typer.Option(help="Tokens at most.")]
MinNewTokens: TypeAlias = Annotated[
  int, typer.Option(help="Tokens before the text may end.")
]
Temperature: TypeAlias = Annotated[float, typer.Option(help="0 is greedy.")]
TopK: TypeAlias = Annotated[
  int | None, typer.Option(help="Most likely tokens to draw from.")
]
TopP: TypeAlias = Annotated[
  float | None, typer.Option(help="Share of probability to draw from.")
]
MinP: TypeAlias = Annotated[
  float | None,
  typer.Option(help="Least share of the likeliest token's probability."),
]
RepetitionPenalty: TypeAlias = Annotated[
  float | None,
  typer.Option(help="Divides the logits of tokens that were there."),
]
PresencePenalty: TypeAlias = Annotated[
  float | None, typer.Option(help="Comes off tokens that were emitted.")
]
FrequencyPenalty: TypeAlias = Annotated[
  float | None, typer.Option(help="Comes off once for each time.")
]
Stop: TypeAlias = Annotated[
  list[str] | None,
  typer.Option(help="A string that ends the text; may be given several times."),
]
Seed: TypeAlias = Annotated[int, typer.Option(help="Same seed, same text.")]
CacheDtype: TypeAlias = Annotated[
  str | None,
  typer.Option(
    help="Of keys and values: float32, bfloat16, float16, int8 or"
    " float8_e4m3fn; default that of the weights."
  ),
]
Plan: TypeAlias = Annotated[
  pathlib.Path | None,
  typer.Option(help="A plan that ldjax optimize wrote for this model."),
]
