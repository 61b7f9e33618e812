"""What ldjax does on four devices of a CPU; `test_sharding.py` runs it.

A program, because the number of devices is fixed when JAX starts. It prints
what it found as JSON: `python four_devices.py MODEL HEADS TINY TINY_HEADS`.
"""

import dataclasses
import json
import math
import os
import re
import sys

os.environ["XLA_FLAGS"] = (
  "--xla_force_host_platform_device_count=4"
  " --xla_backend_optimization_level=0"  # these as conftest.py has them
  " --xla_cpu_use_fusion_emitters=false"
)

import jax

import ldjax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

CASES = {
  (1, 4): ("medusa",),
  (2, 2): ("ngram", "medusa"),
  (4, 1): ("ngram",),
}
PROMPTS = [
  "abcabcab",
  "a longer one, which is read in two chunks",
  "x",
  "so so so",
  "aa",
  "the end, the end, the",
]
TEMPERATURES = [0.0, 0.8, 0.8, 0.0, 0.8, 0.0]


def make_mesh(data, tensor):
  return jax.make_mesh((data, tensor), ("data", "tensor"))


def load(folder, **arguments):
  """A model that compiles one prefill, whatever a prompt's length."""
  model = ldjax.load(folder, **arguments)
  return dataclasses.replace(model, prefill_chunks=(16,))


def texts(model, rows, **settings):
  """Tokens of six prompts that take turns in a few rows."""
  settings = {"temperature": TEMPERATURES, "max_new_tokens": 16, **settings}
  done = ldjax.generate(model, PROMPTS, batch_size=rows, seed=3, **settings)
  return [generation.tokens for generation in done]


def count_compilations(function):
  """0, or what is said of programs that were compiled."""
  try:
    with ldjax.testing.assert_no_recompile():
      function()
  except AssertionError as error:
    return str(error)
  return 0


def results(program, operation):
  """Elements of the float arrays that an operation of a program makes."""
  shapes = re.findall(rf"= f32\[([\d,]+)\]\S* {operation}\(", program)
  assert f"{operation}-start(" not in program  # a CPU does not overlap them
  return sorted(math.prod(map(int, shape.split(","))) for shape in shapes)


def shards(array):
  """The distinct parts of an array, and devices that hold one."""
  parts = {str(shard.index) for shard in array.addressable_shards}
  return [len(parts), len(array.sharding.device_set)]


def layout(model, rows):
  """Where parameters and state lie, and what a donated step does to them."""
  decoder, params = model.decoder, model.params
  state = jax.jit(decoder.empty, static_argnums=1)(params, rows)
  step = jax.jit(decoder.step, donate_argnums=1)
  # Its text is read: fused as users have it, unlike the rest here.
  step = step.lower(params, state).compile(
    {"xla_cpu_use_fusion_emitters": True}
  )
  program = step.as_text()
  block = params.target["layers"][0]
  page = state.cache.pages[0]
  local = ",".join(map(str, page.sharding.shard_shape(page.shape)))
  where = [s.data.unsafe_buffer_pointer() for s in page.addressable_shards]
  after, emitted = step(params, state)
  moved = where != [
    s.data.unsafe_buffer_pointer()
    for s in after.cache.pages[0].addressable_shards
  ]
  kept = jax.tree.map(lambda a, b: a.sharding == b.sharding, state, after)
  return {
    "q": shards(block["self_attn"]["q_proj"]["weight"]),
    "o": shards(block["self_attn"]["o_proj"]["weight"]),
    "down": shards(block["mlp"]["down_proj"]["weight"]),
    "norm": shards(block["input_layernorm"]["weight"]),
    "lm_head": shards(params.target["lm_head"]["weight"]),
    "pages": shards(after.cache.pages[0]),
    "references": shards(after.cache.pool.references),
    "tokens": shards(after.tokens),
    "emitted": shards(emitted.tokens),
    "kept": all(jax.tree.leaves(kept)),
    "deleted": all(leaf.is_deleted() for leaf in jax.tree.leaves(state)),
    "moved": moved,
    "pool_copies": len(re.findall(rf"\[{local}\]\S* copy\(", program)),
    "gathered": results(program, "all-gather"),
    "summed": results(program, "all-reduce"),
  }


def preempting(model):
  """The model, and a list that grows when its rows are preempted."""
  seen = []

  def preempt(state, mask):
    seen.append("traced")
    return model.fallback.preempt(state, mask)

  fallback = model.fallback._replace(preempt=preempt)
  return dataclasses.replace(model, fallback=fallback), seen


def main(folder, heads, tiny, tiny_heads):
  found = {"devices": len(jax.devices()), "texts": {}, "layout": {}}
  texts_of, changed = found["texts"], {"top_k": 9, "repetition_penalty": 1.2}
  one = load(folder)
  texts_of["one"] = texts(one, 4)
  texts_of["one, changed"] = texts(one, 4, **changed)
  for sizes, drafts in CASES.items():
    spread = load(folder, mesh=make_mesh(*sizes))
    for name in drafts:
      draft, tree = (heads, "1,2,2") if name == "medusa" else ("ngram", None)
      model = ldjax.with_draft(spread, draft, tree)
      key = f"{sizes[0]}x{sizes[1]} {name}"
      texts_of[key] = texts(model, 4)
      found["layout"][key] = layout(model, 4)

      def again(model=model, key=key):
        texts_of[f"{key}, changed"] = texts(model, 4, **changed)

      found["layout"][key]["compiled"] = count_compilations(again)

  # Three rows on two devices, and one row; no axis divides them.
  model = load(folder, mesh=make_mesh(2, 2))
  texts_of["three rows"] = texts(model, 3)
  only = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
  settings = {"seed": 3, "max_new_tokens": 16}
  with ldjax.stream(load(folder, mesh=only), PROMPTS[0], **settings) as stream:
    list(stream)
  texts_of["one row"] = stream.result.tokens

  # Fewer pages than the rows come to need.
  pages = {"num_pages": 9, "page_size": 8, "max_len": 72}
  scarce, seen = preempting(load(folder, mesh=make_mesh(2, 2), **pages))
  texts_of["scarce"] = texts(scarce, 4)
  found["preempted"] = bool(seen)

  # Three query heads, one key/value head, 262 tokens: little divides.
  odd = {"draft": tiny_heads, "tree": "1,2,2"}
  spread = load(tiny, mesh=make_mesh(2, 2), **odd)
  texts_of["odd"] = texts(spread, 4)
  texts_of["odd, one"] = texts(load(tiny, **odd), 4)
  attention = spread.params.target["layers"][0]["self_attn"]
  found["odd q"] = shards(attention["q_proj"]["weight"])

  # A loop in one program of the caller's.
  prompts = [[5, 6, 5, 6], [7], [8, 9, 8], [1, 2]]
  done = ldjax.generate(one, prompts, batch_size=4, max_new_tokens=6)
  texts_of["loop, one"] = [generation.tokens for generation in done]
  texts_of["loop"], _ = ldjax.testing.decode_tokens(
    model.decoder,
    model.params,
    prompts,
    max_new_tokens=6,
    stop_ids=model.eos_token_ids,
  )
  json.dump(found, sys.stdout)


if __name__ == "__main__":
  main(*sys.argv[1:])
