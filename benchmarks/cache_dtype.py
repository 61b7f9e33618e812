"""What a narrower cache changes: logits, greedy texts, and last words.

    python benchmarks/cache_dtype.py --prompts mt_bench.jsonl
      --passages lambada_500.jsonl [--json]

Against the first of `--cache-dtypes`, float32 by default:

- logits: its greedy texts are read again with each cache, and the logits at
  every emitted token compared: the largest difference, the mean KL divergence
  in nats, and how often the likeliest token is the same one;
- texts: each cache decodes by itself; the share of tokens at the same place
  that are the same, and how many whole texts;
- last words: the share of passages whose last word is the likeliest
  continuation, token by token.
"""

import argparse
import functools
import gc
import json
import pathlib

import jax
import numpy as np

import ldjax
from ldjax import bench


def log_softmax(logits):
  shifted = logits - logits.max(-1, keepdims=True)
  return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def compare(logits, wanted):
  """Errors of one text's logits [S, V] against those of the first cache."""
  mine, true = log_softmax(logits), log_softmax(wanted)
  return {
    "max_abs": float(np.abs(logits - wanted).max()),
    "kl": (np.exp(true) * (true - mine)).sum(-1),
    "same": logits.argmax(-1) == wanted.argmax(-1),
  }


def main() -> None:
  """Measures and prints a table or one JSON object."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--model", default="demo")
  parser.add_argument("--prompts", type=pathlib.Path, required=True)
  parser.add_argument("--passages", type=pathlib.Path, required=True)
  parser.add_argument("--limit", type=int, default=20, help="prompts")
  parser.add_argument("--max-new-tokens", type=int, default=64)
  parser.add_argument("--max-len", type=int, default=1024)
  parser.add_argument("--passage-limit", type=int, default=200)
  parser.add_argument(
    "--cache-dtypes",
    nargs="+",
    default=["float32", "bfloat16", "int8", "float8_e4m3fn"],
  )
  parser.add_argument("--json", action="store_true")
  options = parser.parse_args()
  prompts = bench.read_prompts(options.prompts, options.limit)
  passages = bench.read_prompts(options.passages, options.passage_limit)

  rows, texts, references = {}, [], []
  for dtype in options.cache_dtypes:
    model = ldjax.load(
      options.model,
      draft="none",
      cache_dtype=dtype,
      max_len=options.max_len,
    )
    contexts = [
      model.tokenizer.encode(
        model.tokenizer.chat([{"role": "user", "content": prompt}])
      )
      for prompt in prompts
    ]
    cache = jax.eval_shape(functools.partial(model.init_cache, 1))
    emitted = [
      list(result.tokens)
      for result in ldjax.generate(
        model, contexts, max_new_tokens=options.max_new_tokens, batch_size=4
      )
    ]
    if not texts:
      texts = emitted
    errors = []
    for index, (context, text) in enumerate(zip(contexts, texts, strict=True)):
      logits = bench.read_logits(
        model, [*context, *text[:-1]], len(context) - 1
      )
      if len(references) <= index:
        references.append(logits)
      errors.append(compare(logits, references[index]))

    def mean(field, errors=errors):
      return float(np.concatenate([error[field] for error in errors]).mean())

    places = [
      (one, other)
      for mine, theirs in zip(emitted, texts, strict=True)
      for one, other in zip(mine, theirs, strict=False)
    ]
    rows[dtype] = {
      "bytes_per_position": sum(
        x.size * x.dtype.itemsize // (x.shape[0] * x.shape[2])
        for x in jax.tree.leaves(cache.pages)
      ),
      "logits_max_abs": max(error["max_abs"] for error in errors),
      "kl_mean": mean("kl"),
      "likeliest_same": mean("same"),
      "tokens_same": sum(one == other for one, other in places)
      / sum(map(len, texts)),
      "texts_same": sum(
        mine == theirs for mine, theirs in zip(emitted, texts, strict=True)
      ),
      "last_words": sum(bench.last_words(model, passages)) / len(passages),
    }
    del model
    gc.collect()
  report = {
    "model": options.model,
    "prompts": len(prompts),
    "tokens": sum(map(len, texts)),
    "passages": len(passages),
    "cache_dtypes": rows,
  }
  if options.json:
    print(json.dumps(report, indent=2))
    return
  print(
    "cache          bytes/position  logits max  KL mean   likeliest same"
    "  tokens same  texts same  last words"
  )
  for dtype, row in rows.items():
    print(
      f"{dtype:14} {row['bytes_per_position']:14} {row['logits_max_abs']:11.3g}"
      f" {row['kl_mean']:8.2g} {row['likeliest_same']:17.1%}"
      f" {row['tokens_same']:12.1%} {row['texts_same']:11}"
      f" {row['last_words']:11.1%}"
    )


if __name__ == "__main__":
  main()
