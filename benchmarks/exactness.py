"""Whether a draft, a batch, or rows that come and go change any text.

    python benchmarks/exactness.py --prompts FILE.jsonl [--limit N]
      [--batch-size 8] [--only-batched] [--draft ngram]
      [--temperature T --top-p P]

Decodes every prompt plainly and alone, then with the draft alone, then with
the draft in ragged batches whose rows are admitted and released on the way,
and compares token by token. A first difference is a near tie only if the
target's margin there is under 1e-3; near ties are counted, never hidden.
"""

import argparse
import json
import pathlib
import time

import rich.progress

import ldjax
from ldjax import bench


def main() -> None:
  """Compares and prints one JSON object; exit code 1 on a real difference."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--prompts", type=pathlib.Path, required=True)
  parser.add_argument("--model", default="demo")
  parser.add_argument("--draft", default="ngram")
  parser.add_argument("--tree")
  parser.add_argument("--limit", type=int)
  parser.add_argument("--max-new-tokens", type=int, default=128)
  parser.add_argument("--batch-size", type=int, default=8)
  parser.add_argument("--temperature", type=float, default=0.0)
  parser.add_argument("--top-p", type=float)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument(
    "--only-batched",
    action="store_true",
    help="leave out the draft alone, which ldjax bench compares too",
  )
  arguments = parser.parse_args()

  prompts = bench.read_prompts(arguments.prompts, arguments.limit)
  model = ldjax.load(
    arguments.model, draft=arguments.draft, tree=arguments.tree
  )
  plain = ldjax.with_draft(model, "none")
  settings = {
    "max_new_tokens": arguments.max_new_tokens,
    "temperature": arguments.temperature,
    "top_p": arguments.top_p,
    "seed": arguments.seed,
  }
  wanted = [
    ldjax.generate(plain, prompt, **settings)
    for prompt in rich.progress.track(prompts, "plain, alone")
  ]
  runs = {}
  if not arguments.only_batched:
    runs["alone"] = [
      ldjax.generate(model, prompt, **settings)
      for prompt in rich.progress.track(prompts, "with the draft, alone")
    ]
  start = time.perf_counter()
  runs["batched"] = ldjax.generate(
    model, prompts, batch_size=arguments.batch_size, **settings
  )
  seconds = time.perf_counter() - start

  report = {"prompts": len(prompts), "draft": model.draft_name, **settings}
  different = 0
  for name, results in runs.items():
    unequal = [
      (prompt, want, got)
      for prompt, want, got in zip(prompts, wanted, results, strict=True)
      if want.tokens != got.tokens
    ]
    ties = sum(
      bench.is_near_tie(
        model,
        prompt,
        want.tokens,
        got.tokens,
        ldjax.Settings(**settings),
      )
      for prompt, want, got in unequal
    )
    different += len(unequal) - ties
    report[name] = {
      "equal": [len(prompts) - len(unequal), len(prompts)],
      "near_ties": ties,
      "mean_accepted": sum(len(run.tokens) for run in results)
      / sum(run.rounds for run in results),
    }
  report["batched"]["batch_size"] = arguments.batch_size
  report["batched"]["tokens_per_second"] = (
    sum(len(run.tokens) for run in runs["batched"]) / seconds
  )
  print(json.dumps(report, indent=2))
  if different:
    raise SystemExit(f"{different} texts differ by more than a near tie")


if __name__ == "__main__":
  main()
