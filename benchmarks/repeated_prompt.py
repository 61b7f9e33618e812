"""Time to the first token with a system prompt that was read before.

Requests come one after the other: the same long system prompt and another short
question each time. The first one has to read all of it; later ones begin with
its pages. For comparison the same requests run without sharing. Medians, in one
process, in turn.

  python benchmarks/repeated_prompt.py --system-tokens 512
"""

import argparse
import json
import statistics

import ldjax
from ldjax import _engine, _request

_QUESTIONS = ("Why?", "Name a river.", "Is it so?", "What is 7 times 8?")


def first_token(model, engine, tokens) -> float:
  """Seconds to the first token of a request that runs alone."""
  settings = ldjax.Settings(max_new_tokens=2)
  [request] = _request.make_requests(model, tokens, settings)
  engine.submit(request)
  result = None
  while not engine.idle:
    for event in engine.advance():
      result = event.generation or result
  return result.time_to_first_token_s


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--model", default="demo")
  parser.add_argument("--system-tokens", type=int, default=512)
  parser.add_argument("--rounds", type=int, default=5)
  parser.add_argument("--json", action="store_true")
  args = parser.parse_args()
  model = ldjax.load(args.model)
  words = model.tokenizer.encode("You are careful, and answer in one line. ")
  system = (words * args.system_tokens)[: args.system_tokens]
  prompts = [
    system + model.tokenizer.encode(question) for question in _QUESTIONS
  ]
  found: dict[str, list[float]] = {"first": [], "later": [], "unshared": []}
  for turn in range(args.rounds + 1):
    shared = _engine.Engine(model, 1)
    alone = _engine.Engine(model, 1, share=False)
    for i, tokens in enumerate(prompts):
      with_pages = first_token(model, shared, tokens)
      without = first_token(model, alone, tokens)
      if turn:  # the first turn compiles
        found["later" if i else "first"].append(with_pages)
        found["unshared"].append(without)
    shared.close()
    alone.close()
  report = {
    "system_tokens": args.system_tokens,
    **{name: statistics.median(values) for name, values in found.items()},
  }
  report["ratio"] = report["later"] / report["first"]
  if args.json:
    print(json.dumps(report))
    return
  print(
    f"system prompt of {args.system_tokens} tokens: first token after"
    f" {report['first']:.3f} s the first time, {report['later']:.3f} s later"
    f" ({report['ratio']:.1%}), {report['unshared']:.3f} s without sharing"
  )


if __name__ == "__main__":
  main()
