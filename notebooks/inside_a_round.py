# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Inside a round
#
# One round of speculative decoding by hand, with every array in view; then the
# same under `jit`, `scan` and `vmap`, and with a target of our own.

# %%
import functools

import jax
import jax.numpy as jnp
from flax import nnx

import ldjax
from ldjax import decoding, memory, sampling

# %%
model = ldjax.load("demo", max_len=128)
target, params = model.target, model.params


def text(tokens):
  return model.tokenizer.decode([int(token) for token in tokens])


# %% [markdown]
# ## A prompt becomes a state
#
# `decoder.init` reads the prompt and draws the first token. That token is
# *pending*: emitted, its keys and values not in the cache yet. So the cache is
# always one position behind the text.

# %%
decoder = model.decoder
start = "The cat sat on the mat. The dog sat on the mat. The cow"
prompt = jnp.array([model.tokenizer.encode(start)])
state = jax.jit(decoder.init)(
  params,
  prompt,
  jnp.array([prompt.shape[1]]),
  sampling=sampling.make_sampling(1),
  max_new_tokens=24,
)
length = int(state.length[0])
print("text     ", repr(text(state.tokens[0, :length])))
print("pending  ", repr(text(state.tokens[0, length - 1 : length])))
print("length   ", state.length, " in the cache", state.cache.length)

# %% [markdown]
# ## Draft
#
# A draft sees the text and proposes a tree: `tokens` [B, T] and `parents`
# [B, T]. Node 0 is the root, the pending token. The n-gram draft looks for an
# earlier occurrence of the text's end and proposes what followed it, as a
# chain. Where it finds nothing it proposes -1, which is no node.

# %%
context = decoding.DraftContext(state.tokens, state.length, state.sampling)
candidates, _ = model.draft.propose(params.draft, state.draft, context)
print("tokens ", candidates.tokens, repr(text(candidates.tokens[0, 1:])))
print("parents", candidates.parents)

# %% [markdown]
# Any tree will do, so let us make one by hand. `TokenTree` describes its shape
# by paths of ranks and shows itself.

# %%
tree = decoding.TokenTree.from_paths([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])
tree

# %%
guesses = ["", " on", " down", " the", " a", " mat"]
candidates = decoding.Candidates(
  tokens=jnp.array(
    [[-1] + [model.tokenizer.encode(guess)[-1] for guess in guesses[1:]]]
  ),
  parents=jnp.array([tree.parents]),
)
print("tokens ", candidates.tokens)
print("parents", candidates.parents)

# %% [markdown]
# ## Verify
#
# One forward pass reads all T nodes. A node stands at the committed length plus
# its depth, and sees the committed prefix, its ancestors and itself. The keys
# and values of the nodes come back as a block of their own: nothing is written.

# %%
pending = state.tokens[:, length - 1 : length]
block = jnp.concatenate([pending, candidates.tokens[:, 1:]], axis=1)
positions = state.cache.length[:, None] + jnp.array([tree.depths])
output = jax.jit(target.forward)(
  params.target, block, positions, candidates.parents, state.cache.view()
)
print("positions", positions)
print("hidden   ", output.hidden.shape, " [B, T, E]")
print("block_kv ", len(output.block_kv), "x", output.block_kv[0].shape)

# %% [markdown]
# `score` gives the target's opinion at each node: what it would write after the
# text that ends there.

# %%
scores = jax.jit(target.score)(params.target, output.hidden)
wanted = jnp.argmax(scores.logits, axis=-1)[0]
for node, (parent, token) in enumerate(zip(tree.parents, wanted, strict=True)):
  here = repr(text(block[0, node : node + 1]))
  print(
    f"node {node} under {parent:2}: after {here:11} comes {text([token])!r}"
  )

# %% [markdown]
# ## Accept
#
# A walk: draw at the root; if a child carries the drawn token, step to it and
# draw there; else stop. At a temperature the draw adds noise that is a function
# of (seed, position, token id), so that the token at a position is the same
# whoever asks for it.

# %%
walk = decoding.accept(
  scores,
  candidates,
  state.sampling,
  sampling.History(state.tokens, state.prompt_length, state.length),
  depth=tree.depth,
  stop_ids=state.stop_ids,
  remaining=jnp.array([8]),
)
count = int(walk.count[0])
print("path  ", walk.path, " nodes passed")
print("count ", walk.count)
print("tokens", [text([token]) for token in walk.tokens[0, :count]])

# %% [markdown]
# ## Commit
#
# The keys and values of the nodes on the path go to the cache; those of refused
# nodes are never written. The last drawn token has no keys yet: it is the next
# pending token.

# %%
cache, ok = state.cache.commit(output.block_kv, walk.path, walk.count)
print("in the cache", state.cache.length, "->", cache.length, " ok", ok)

# %% [markdown]
# That is all of a round. `decoder.step` does the same with the draft that it
# was made with, and plain decoding gives the same tokens one at a time:

# %%
plain = decoding.autoregressive(target, model.init_cache, max_len=model.max_len)
plain_params = decoding.DecoderParams(params.target)
plain_step = jax.jit(plain.step)
one_by_one, drawn = state, []
for _ in range(count):
  one_by_one, emitted = plain_step(plain_params, one_by_one)
  drawn.append(int(emitted.tokens[0, 0]))
assert drawn == walk.tokens[0, :count].tolist()
assert (one_by_one.cache.length == cache.length).all()

# %% [markdown]
# ## Rounds under `scan`
#
# `trace` takes a fixed number of rounds in one program and keeps what each did.
# The state is donated: its buffers are reused, so it must not be read again.

# %%
root = int(state.tokens[0, length - 1])
trace = jax.jit(
  functools.partial(decoding.trace, decoder),
  static_argnums=2,
  donate_argnums=1,
)
state, rounds = trace(params, state, 6)
print("tokens", rounds.tokens.shape, " [rounds, B, D+1]")
for tokens, n in zip(rounds.tokens[:, 0], rounds.count[:, 0], strict=True):
  print(int(n), repr(text(tokens[:n])))

# %% [markdown]
# One of those rounds as a picture: the path that was taken, what was refused,
# and the bonus token.

# %%
first = jax.tree.map(lambda x: x[0], rounds)
ldjax.show_round(first, tokenizer=model.tokenizer, root=root)

# %% [markdown]
# ## A target of our own
#
# A target is two functions, and none of ldjax's models is needed. This one is a
# table in Flax: the next token's logits depend on the last token alone. It has
# no attention, so its keys and values are zeros in the cache's shape.

# %%
V = 12


class Bigram(nnx.Module):
  def __init__(self, rngs):
    self.table = nnx.Embed(V, V, rngs=rngs)

  def __call__(self, tokens):
    return 4.0 * self.table(tokens)


graph, weights = nnx.split(Bigram(nnx.Rngs(0)))


def forward(params, tokens, positions, parents, view):
  del positions, parents  # a model with attention needs both
  hidden = nnx.merge(graph, params)(tokens)
  nothing = jnp.zeros((*tokens.shape, 1, 2), view.pages[0].dtype)
  return decoding.TargetOutput(hidden, hidden, (nothing,))


def score(params, hidden):
  del params
  return decoding.Scores(hidden)


def init_cache(batch):
  return memory.PagedKVCache.create(
    batch=batch, max_len=32, num_layers=1, num_kv_heads=1, head_dim=1
  )


bigram = decoding.TargetFn(forward, score)

# %% [markdown]
# ## `vmap` over seeds
#
# A decoder is made of pure functions, so a whole run can stand under `vmap`.

# %%
small = decoding.speculative(bigram, decoding.ngram(3), init_cache, max_len=32)
small_params = decoding.DecoderParams(weights)
settings = sampling.make_sampling(6, temperature=1.0, seed=list(range(6)))


def sample(one):
  state = small.init(
    small_params,
    jnp.array([[3]]),
    jnp.array([1]),
    sampling=one,
    max_new_tokens=20,
  )
  state = decoding.decode(small, small_params, state)
  return state.tokens[0, :21], state.rounds[0]


one_row_each = jax.tree.map(lambda x: x[:, None], settings)
samples, passes = jax.jit(jax.vmap(sample))(one_row_each)
for row, n in zip(samples.tolist(), passes.tolist(), strict=True):
  print(f"{n:2} passes:", *row)
