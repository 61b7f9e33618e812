"""`ldjax generate`: one prompt, streamed."""

import json
from typing import Annotated

import typer

from ldjax import _generate
from ldjax.cli import _console


def generate(
  prompt: Annotated[str, typer.Argument(help="What to answer.")],
  model: Annotated[
    str,
    typer.Option(
      help="A .gguf file, a Hugging Face folder, org/name on the hub, or demo."
    ),
  ] = "demo",
  draft: Annotated[
    str, typer.Option(help="none, ngram, or a folder with Medusa heads.")
  ] = "ngram",
  tree: Annotated[
    str | None,
    typer.Option(
      help="What the draft proposes: root, chain:N, ranks a depth such as"
      " 1,7,6, or a published Medusa tree such as mc_sim_7b_63."
    ),
  ] = None,
  max_new_tokens: Annotated[int, typer.Option(help="Tokens at most.")] = 128,
  max_len: Annotated[
    int | None,
    typer.Option(help="Tokens of prompt and answer together at most."),
  ] = None,
  temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
  top_p: Annotated[
    float | None, typer.Option(help="Share of probability to draw from.")
  ] = None,
  top_k: Annotated[
    int | None, typer.Option(help="Most likely tokens to draw from.")
  ] = None,
  seed: Annotated[int, typer.Option(help="Same seed, same text.")] = 0,
  chat: Annotated[
    bool | None,
    typer.Option(
      "--chat/--no-chat",
      help="Put the prompt into the chat template; default if there is one.",
    ),
  ] = None,
  as_json: Annotated[
    bool, typer.Option("--json", help="Print one JSON object, no stream.")
  ] = False,
) -> None:
  """Answers a prompt: streams the text, then says how it went.

  Tokens/s counts the tokens after the first over the time after the first;
  mean accepted is tokens emitted over rounds (1 without a draft).
  """
  with _console.reported_errors():
    loaded = _console.load(model, draft, tree, max_len)
    stream = _generate.stream(
      loaded,
      prompt,
      max_new_tokens=max_new_tokens,
      temperature=temperature,
      top_k=top_k,
      top_p=top_p,
      seed=seed,
      chat=chat,
      progress=_console.say,
    )
    for piece in stream:
      if not as_json:
        print(piece, end="", flush=True)
    result = stream.result
    if as_json:
      fields = {
        "text": result.text,
        "tokens": list(result.tokens),
        "rounds": result.rounds,
        "mean_accepted": result.mean_accepted,
        "tokens_per_second": result.tokens_per_second,
        "time_to_first_token_s": result.time_to_first_token_s,
        "finish_reason": result.finish_reason,
      }
      print(json.dumps(fields, ensure_ascii=False))
      return
    print()
    _console.say(
      f"{len(result.tokens)} tokens, {result.tokens_per_second:.1f} tokens/s,"
      f" mean accepted {result.mean_accepted:.2f} (tokens emitted over"
      f" {result.rounds} rounds), first token after"
      f" {result.time_to_first_token_s:.2f} s, ended by {result.finish_reason}"
    )
