"""Every size of tree of a draft for itself, beside the choice among them.

Run: `python benchmarks/tree_size.py mt_bench.jsonl --limit 10`. Interleaved by
prompt, in one process, with equality of the texts checked.
"""

import argparse
import dataclasses

import ldjax
from ldjax import bench


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("prompts")
  parser.add_argument("--model", default="demo")
  parser.add_argument("--limit", type=int, default=10)
  parser.add_argument("--max-new-tokens", type=int, default=64)
  options = parser.parse_args()
  model = ldjax.load(options.model)
  methods = {bench.BASELINE: ldjax.with_draft(model, "none"), "chosen": model}
  for rung in model.ladder[1:]:
    fixed = dataclasses.replace(model, ladder=(rung,), start=0)
    methods[f"always {rung.draft.size}"] = fixed
  report = bench.compare(
    methods,
    bench.read_prompts(options.prompts, options.limit),
    max_new_tokens=options.max_new_tokens,
  )
  print("method           tokens/s  speedup  mean accepted  rounds by size")
  for name, row in report["methods"].items():
    equal, of = row["equal"]
    print(
      f"{name:16} {row['tokens_per_second']:8.1f} {row['speedup']:8.2f}"
      f" {row['mean_accepted']:14.2f}  {row['rounds_by_size']}"
      + ("" if equal == of else f"  {of - equal} texts differ")
    )


if __name__ == "__main__":
  main()
