# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Convert a checkpoint
#
# Look into a checkpoint, convert it, give it a published draft, and take the
# result back out. The files here are tiny and made on the spot; the calls are
# the same for a real model.

# %%
import json
import pathlib
import tempfile

import jax
import numpy as np
import safetensors.numpy

import ldjax
from ldjax import bench, checkpoints, models, testing

work = pathlib.Path(tempfile.mkdtemp())
source = testing.write_tiny_model(work / "source")
print(sorted(file.name for file in source.iterdir()))

# %% [markdown]
# ## What is it?
#
# `inspect` reads headers, names and shapes, no weights. A folder that holds a
# config.json alone is answered too.

# %%
for key, value in checkpoints.inspect(source).rows().items():
  print(f"{key:24} {value}")

# %% [markdown]
# ## To Orbax, and back to Hugging Face
#
# Each layer becomes an Orbax checkpoint of its own, so that one is in memory at
# a time and `load(mesh=...)` can spread them. Everything written is read back
# and compared before it takes its place.

# %%
ldjax.convert(source, work / "orbax", progress=print)
ldjax.convert(work / "orbax", work / "hf", to="hf")
before = safetensors.numpy.load_file(source / "model.safetensors")
after = safetensors.numpy.load_file(work / "hf" / "model.safetensors")
assert before.keys() == after.keys()
assert all(np.array_equal(before[name], after[name]) for name in before)
print(len(before), "tensors, every bit the same")

# %%
model = ldjax.load(work / "orbax")
plain = ldjax.with_draft(model, "none")
want = ldjax.generate(plain, "hello", max_new_tokens=24)

# %% [markdown]
# ## A Medusa-2 model
#
# Its heads are among its own tensors. Here are two that guess by the target's
# output matrix; `load` finds them, and takes the tree that Medusa's code would
# pick by the model's name, here cut to two heads.

# %%
config = models.MedusaConfig(
  num_heads=2,
  num_layers=1,
  hidden_size=model.config.hidden_size,
  vocab_size=model.config.vocab_size,
  shared_output=True,
)
heads = models.init_draft(config, jax.random.key(0))
checkpoints.write_medusa(work / "heads", config, heads)
tensors = safetensors.numpy.load_file(
  work / "heads" / "medusa_lm_head.safetensors"
)
whole = work / "vicuna-7b-medusa"
ldjax.convert(source, whole, to="hf")
safetensors.numpy.save_file(
  {**before, **{f"medusa_head.{name}": x for name, x in tensors.items()}},
  whole / "model.safetensors",
)
print(checkpoints.inspect(whole).holds)
medusa = ldjax.load(whole)
print([rung.draft.size for rung in medusa.ladder], "nodes")
medusa.draft_name, checkpoints.read_medusa(whole)[0]

# %%
text = ldjax.generate(medusa, "hello", max_new_tokens=24)
assert text.tokens == want.tokens
print("the text is that of plain decoding")

# %% [markdown]
# ## As Medusa-2 itself would decode
#
# One fixed tree in every round, all heads at every node, the whole length of
# the cache from the start: the baseline to compare with.

# %%
theirs = ldjax.load(whole, compat="medusa2")
report = bench.compare(
  {"autoregressive": plain, "medusa2": theirs, "ldjax": medusa},
  ["hello", "one two one two"],
  max_new_tokens=16,
)
print(json.dumps(report["methods"]["medusa2"], indent=2))

# %% [markdown]
# ## Heads back out
#
# To Medusa's own layout, or to vLLM's where the heads have output matrices of
# their own. `ldjax convert` does all of this from the command line.

# %%
ldjax.convert(whole, work / "back", to="medusa")
again, same = checkpoints.read_medusa(work / "back")
assert again == config
jax.tree.map(np.testing.assert_array_equal, same, heads)
print(checkpoints.inspect(work / "back").rows())
