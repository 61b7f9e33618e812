"""`ldjax generate`: one prompt, streamed."""

import json
from typing import Annotated

import typer

from ldjax import _generate, _settings
from ldjax.cli import _console, _options


def generate(
  prompt: Annotated[str, typer.Argument(help="What to answer.")],
  model: Annotated[
    str,
    typer.Option(
      help="A .gguf file, a Hugging Face folder, org/name on the hub, or demo."
    ),
  ] = "demo",
  draft: Annotated[
    str,
    typer.Option(
      help="auto (what comes with ldjax for the model, else ngram), none,"
      " ngram, or the folder of a draft."
    ),
  ] = "auto",
  tree: Annotated[
    str,
    typer.Option(
      help="What the draft proposes: auto (the size that pays, chosen as it"
      " goes), root, chain:N, ranks a depth such as 1,7,6, or a published"
      " Medusa tree such as mc_sim_7b_63."
    ),
  ] = "auto",
  max_new_tokens: _options.MaxNewTokens = 128,
  min_new_tokens: _options.MinNewTokens = 0,
  max_len: Annotated[
    int | None,
    typer.Option(help="Tokens of prompt and answer together at most."),
  ] = None,
  cache_dtype: _options.CacheDtype = None,
  plan: _options.Plan = None,
  temperature: _options.Temperature = 0.0,
  top_p: _options.TopP = None,
  top_k: _options.TopK = None,
  min_p: _options.MinP = None,
  repetition_penalty: _options.RepetitionPenalty = None,
  presence_penalty: _options.PresencePenalty = None,
  frequency_penalty: _options.FrequencyPenalty = None,
  stop: _options.Stop = None,
  seed: _options.Seed = 0,
  chat: Annotated[
    bool | None,
    typer.Option(
      "--chat/--no-chat",
      help="Put the prompt into the chat template; default if there is one.",
    ),
  ] = None,
  show_rounds: Annotated[
    bool, typer.Option(help="Show the text again, a bar where a round ended.")
  ] = False,
  as_json: Annotated[
    bool, typer.Option("--json", help="Print one JSON object, no stream.")
  ] = False,
) -> None:
  """Answers a prompt: streams the text, then says how it went.

  Tokens/s counts the tokens after the first over the time after the first;
  mean accepted is tokens emitted over rounds (1 without a draft).
  """
  with _console.reported_errors():
    settings = _settings.Settings(
      max_new_tokens=max_new_tokens,
      min_new_tokens=min_new_tokens,
      temperature=temperature,
      top_k=top_k,
      top_p=top_p,
      min_p=min_p,
      repetition_penalty=repetition_penalty,
      presence_penalty=presence_penalty,
      frequency_penalty=frequency_penalty,
      stop=stop or (),
      logprobs=as_json,
      seed=seed,
      chat=chat,
    )
    loaded = _console.load(model, draft, tree, max_len, cache_dtype, plan)
    stream = _generate.stream(loaded, prompt, settings, progress=_console.say)
    for piece in stream:
      if not as_json:
        print(piece, end="", flush=True)
    result = stream.result
    if as_json:
      fields = {
        "text": result.text,
        "tokens": list(result.tokens),
        "logprobs": list(result.logprobs or ()),
        "rounds": result.rounds,
        "round_tokens": list(result.round_tokens),
        "mean_accepted": result.mean_accepted,
        "tokens_per_second": result.tokens_per_second,
        "time_to_first_token_s": result.time_to_first_token_s,
        "finish_reason": result.finish_reason,
      }
      print(json.dumps(fields, ensure_ascii=False))
      return
    print()
    if show_rounds:
      _console.say(result.show())
    _console.say(
      f"{len(result.tokens)} tokens, {result.tokens_per_second:.1f} tokens/s,"
      f" mean accepted {result.mean_accepted:.2f} (tokens emitted over"
      f" {result.rounds} rounds), first token after"
      f" {result.time_to_first_token_s:.2f} s, ended by {result.finish_reason}"
    )
