# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Sampling is exact
#
# The token at a position is the maximum of the target's logits plus noise that
# is a function of (seed, position, token id). No draft, tree or batch can
# change it. Here this is checked as an equality, then as a law of probability;
# then we look at what a temperature does to the number of accepted tokens.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import ldjax
from ldjax import decoding, memory, sampling, testing

# %% [markdown]
# ## Equal with any draft and any batch
#
# Three prompts at three temperatures: one by one without a draft, then all
# together with drafts that guess three and seven tokens.

# %%
model = ldjax.load("demo", max_len=192)
prompts = [
  "The cat sat on the mat. The dog sat on the mat. Go on like that.",
  "Why is the sky blue?",
  "Write a list of five animals.",
]
temperatures = [0.0, 0.7, 1.0]
asked = [prompt for prompt in prompts for _ in temperatures]
settings = {
  "temperature": temperatures * len(prompts),
  "top_p": 0.95,
  "max_new_tokens": 24,
  "seed": 11,
}

plain = ldjax.with_draft(model, "none")
wanted = ldjax.generate(plain, asked, batch_size=1, **settings)
for tree, batch_size in (("chain:3", 4), ("chain:7", 1)):
  drafted = ldjax.with_draft(model, "ngram", tree=tree)
  got = ldjax.generate(drafted, asked, batch_size=batch_size, **settings)
  equal = sum(a.tokens == b.tokens for a, b in zip(wanted, got, strict=True))
  rounds = sum(each.rounds for each in got)
  print(
    f"{tree}, batches of {batch_size}: {equal} of {len(asked)} equal,"
    f" {rounds} rounds instead of {sum(each.rounds for each in wanted)}"
  )
  assert equal == len(asked)

# %% [markdown]
# ## Equal with any tree
#
# `random_tree_draft` proposes a tree of a new random shape with random tokens
# in each round and row. Whatever it proposes, the text stays.

# %%
tiny = testing.tiny_model()
rows = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]]
tiny_settings = sampling.make_sampling(
  4, temperature=[0.0, 0.5, 1.0, 2.0], seed=5
)


def emitted(draft):
  decoder = decoding.speculative(
    tiny.target, draft, tiny.init_cache, max_len=tiny.max_len
  )
  tokens, state = testing.decode_tokens(
    decoder,
    decoding.DecoderParams(tiny.params),
    rows,
    sampling=tiny_settings,
    max_new_tokens=32,
  )
  return tokens, int(state.rounds.sum())


reference, rounds = emitted(decoding.root_only())
print("no tree", rounds, "rounds")
for size, depth in ((5, 2), (16, 4), (48, 5)):
  tokens, rounds = emitted(testing.random_tree_draft(size, depth, 31))
  print(
    f"random trees of {size:2} nodes: {rounds} rounds, equal:",
    tokens == reference,
  )
  assert tokens == reference

# %% [markdown]
# ## The right law
#
# Two wrong texts can be equal too. So draw one continuation for each of 6000
# seeds from a target whose law is known, under random trees, and count the
# second token: it is drawn inside a tree.

# %%
V, seeds = 8, 6000
chance = np.array([0.30, 0.22, 0.16, 0.12, 0.09, 0.06, 0.03, 0.02])
logits = jnp.log(jnp.asarray(chance, jnp.float32))


def forward(params, tokens, positions, parents, view):
  hidden = jnp.zeros((*tokens.shape, 1))
  nothing = jnp.zeros((*tokens.shape, 1, 2), view.pages[0].dtype)
  return decoding.TargetOutput(hidden, hidden, (nothing,))


def score(params, hidden):
  return decoding.Scores(
    jnp.broadcast_to(params[None, None], (*hidden.shape[:2], V))
  )


def init_cache(batch):
  return memory.PagedKVCache.create(
    batch=batch, max_len=8, num_layers=1, num_kv_heads=1, head_dim=1
  )


decoder = decoding.speculative(
  decoding.TargetFn(forward, score),
  testing.random_tree_draft(8, 3, V),
  init_cache,
  max_len=8,
  chunk=1,
)
state = jax.jit(decoder.init)(
  decoding.DecoderParams(logits),
  jnp.zeros((seeds, 1), jnp.int32),
  jnp.ones((seeds,), jnp.int32),
  sampling=sampling.make_sampling(
    seeds, temperature=1.0, seed=list(range(seeds))
  ),
  max_new_tokens=4,
)
_, first_round = jax.jit(decoder.step)(decoding.DecoderParams(logits), state)
counted = np.bincount(np.asarray(first_round.tokens[:, 0]), minlength=V)
print("accepted more than one token in", int((first_round.count > 1).sum()))

# %%
figure, axes = plt.subplots(figsize=(6, 3))
axes.bar(np.arange(V) - 0.2, chance, 0.4, label="the target's law")
axes.bar(
  np.arange(V) + 0.2,
  counted / seeds,
  0.4,
  yerr=2 * np.sqrt(chance * (1 - chance) / seeds),
  label="emitted in a tree (bars: 2 standard deviations)",
)
axes.set(xlabel="token", ylabel="share")
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## Acceptance against temperature
#
# What a temperature does change is how much is accepted: the more random the
# text, the less of it a draft can foresee. An n-gram draft on two prompts:

# %%
steps = [0.0, 0.3, 0.6, 0.9, 1.2, 1.5]
figure, axes = plt.subplots(figsize=(6, 3))
drafted = ldjax.with_draft(model, "ngram")
for prompt in prompts[:2]:
  runs = ldjax.generate(
    drafted,
    [prompt] * len(steps),
    temperature=steps,
    max_new_tokens=48,
    seed=3,
    batch_size=4,
  )
  axes.plot(steps, [run.mean_accepted for run in runs], "o-", label=prompt)
axes.set(xlabel="temperature", ylabel="tokens a round", ylim=(0.9, None))
axes.legend(frameon=False, loc="upper right")
plt.show()

# %% [markdown]
# A draft with probabilities of its own can do better by taking the same noise
# as the target. Below, target and draft differ by small random logits; the
# curves are how often one guess is right, over 4000 positions.

# %%
positions = jnp.arange(4000, dtype=jnp.int32)
rng = np.random.default_rng(0)
logits = jnp.asarray(rng.normal(0, 2.5, (4000, 64)), jnp.float32)
guess = logits + jnp.asarray(rng.normal(0, 0.7, (4000, 64)), jnp.float32)


@jax.jit
def agree(logits, guess, settings, own_noise):
  drawn = sampling.draw(logits, settings, positions)
  coupled = sampling.draw(guess, settings, positions)
  own = sampling.draw(guess, own_noise, positions)
  return (
    jnp.mean(drawn == coupled),
    jnp.mean(drawn == jnp.argmax(guess, -1)),
    jnp.mean(drawn == own),
  )


grid = np.linspace(0.1, 2.0, 12)
shares = []
for temperature in grid:
  one, two = (
    sampling.make_sampling(len(positions), temperature=temperature, seed=seed)
    for seed in (1, 2)
  )
  shares.append(agree(logits, guess, one, two))
shares = np.array(shares)
figure, axes = plt.subplots(figsize=(6, 3))
for column, label in enumerate(
  ("the target's noise", "its favourite", "noise of its own")
):
  axes.plot(grid, shares[:, column], label=f"draft takes {label}")
axes.set(xlabel="temperature", ylabel="share accepted", ylim=(0, 1))
axes.legend(frameon=False)
plt.show()
