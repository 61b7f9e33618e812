# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Train a draft
#
# A draft learns from what its target writes. Here the target is a random model
# of two layers, so that everything takes seconds; for a real one it is the same
# code, or `ldjax train`.

# %%
import pathlib
import tempfile

import matplotlib.pyplot as plt
import numpy as np

import ldjax
from ldjax import bench, decoding, testing, training

folder = pathlib.Path(tempfile.mkdtemp())
target = ldjax.load(
  testing.write_tiny_model(folder / "target"), draft="none", max_len=96
)

# %% [markdown]
# ## The target writes
#
# Answers to prompts, decoded many at a time, kept with the target's *features*:
# its last hidden state at every token. With `prompts=None` a chat model asks
# itself.

# %%
prompts = [[65 + i % 26, 97 + i % 7, 97 + i % 11] for i in range(200)]
corpus = training.write_texts(
  target,
  folder / "corpus",
  tokens=100_000,
  prompts=prompts,
  max_new_tokens=48,
)
texts, tokens = corpus.counts()
print(len(texts), "texts,", tokens, "tokens of answers")

# %% [markdown]
# ## Train
#
# A recurrent draft: one small cell, run once for each token ahead. It guesses
# only the 200 commonest tokens. Ctrl-C would keep what is done, and the same
# call would go on from there.

# %%
config = training.draft_config(
  "recurrent", target.config, vocab_size=200, depth=4
)
history = []
draft = training.train_draft(
  target,
  corpus,
  config,
  folder / "draft",
  training.TrainConfig(
    steps=400, batch=8, window=48, learning_rate=5e-3, save_every=400
  ),
  on_step=history.append,
)

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3))
left.plot([each.losses.total for each in history])
left.set(xlabel="update", ylabel="loss")
accuracy = np.array([each.losses.accuracy for each in history])
for depth, line in enumerate(accuracy.T, start=1):
  smooth = np.convolve(line, np.ones(20) / 20, "valid")
  right.plot(smooth, label=f"{depth} ahead")
right.set(xlabel="update", ylabel="best guess right")
right.legend()
plt.show()

# %% [markdown]
# ## What it is worth
#
# On texts that were held out: how often the guess of each rank was the target's
# token, where the tokens before were guessed too.

# %%
acceptance = draft.calibration.acceptance
for depth, row in enumerate(acceptance, start=1):
  print(depth, "ahead, by rank", np.round(row[:4], 3))

# %% [markdown]
# From these numbers follows the best tree of each size, and how many tokens a
# round it should bring.

# %%
sizes = (1, 2, 4, 8, 16)
expected = [
  decoding.expected_length(decoding.best_tree(acceptance, size), acceptance)
  for size in sizes
]
decoding.best_tree(acceptance, 8)

# %% [markdown]
# ## Decode with it
#
# The text is that of plain decoding; only the number of rounds is another.

# %%
unseen = [[90 - i, 99, 100 + i] for i in range(4)]
plain = ldjax.generate(target, unseen, max_new_tokens=48)
measured, speed = [], []
for size in sizes:
  tree = decoding.best_tree(acceptance, size)
  model = ldjax.with_draft(target, draft.folder, tree=tree)
  ldjax.generate(model, unseen, max_new_tokens=8)  # compiles
  answers = ldjax.generate(model, unseen, max_new_tokens=48, batch_size=1)
  assert [a.tokens for a in answers] == [a.tokens for a in plain]
  measured.append(np.mean([a.mean_accepted for a in answers]))
  speed.append(np.median([a.tokens_per_second for a in answers]))

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3))
left.plot(sizes, expected, "o-", label="expected")
left.plot(sizes, measured, "s-", label="measured, greedy")
left.set(xlabel="nodes", ylabel="tokens a round", xscale="log")
left.legend()
right.plot(sizes, np.array(speed) / speed[0], "o-")
right.set(xlabel="nodes", ylabel="tokens/s over plain decoding", xscale="log")
plt.show()

# %% [markdown]
# A tree costs what a wider pass costs, so more nodes are not always faster: on
# a CPU less so than on an accelerator. `ldjax bench` measures it on prompts of
# your own.

# %%
report = bench.compare(
  bench.make_methods(
    ldjax.with_draft(target, draft.folder), ["autoregressive", "ldjax"]
  ),
  ["abc", "xyz"],
  max_new_tokens=32,
)
for name, row in report["methods"].items():
  print(name, f"{row['mean_accepted']:.2f} tokens a round", row["equal"])
