"""Draws the README's picture: one real round of the demo model.

    python docs/draw_round.py

The tree holds what the target itself ranks first at each place; the tokens are
drawn at a temperature, so that the walk does not always take the first. What
the picture shows is kept beside it: it can be drawn again without the model.
"""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp

import ldjax
from ldjax import decoding, sampling

PICTURE = pathlib.Path(__file__).resolve().parent / "images" / "round.svg"
KEPT = PICTURE.with_suffix(".json")
PROMPT = "The capital of France"
PATHS = ((0,), (1,), (2,), (0, 0), (0, 1), (0, 2), (1, 0), (0, 0, 0), (0, 1, 0))
SEED = 11
TEMPERATURE = 0.8


def scripted(tree: decoding.TokenTree, tokens: list[int]) -> decoding.DraftFn:
  """A draft that proposes the same tree in every round."""

  def propose(params, state, context):
    batch = context.length.shape[0]
    candidates = decoding.Candidates(
      jnp.broadcast_to(jnp.array([tokens], jnp.int32), (batch, tree.size)),
      jnp.broadcast_to(
        jnp.array([tree.parents], jnp.int32), (batch, tree.size)
      ),
    )
    return candidates, state

  return decoding.root_only()._replace(
    propose=propose, size=tree.size, depth=tree.depth
  )


def fill(
  model: ldjax.LanguageModel, text: list[int], tree: decoding.TokenTree
) -> list[int]:
  """The target's own best tokens for each place of a tree after a text."""

  @jax.jit
  def logits(tokens, length):
    chain = jnp.arange(-1, tokens.shape[0] - 1, dtype=jnp.int32)[None]
    output = model.target.forward(
      model.params.target,
      tokens[None],
      chain + 1,
      chain,
      model.init_cache(1).view(),
    )
    last = output.hidden[:, length - 1][:, None]
    return model.target.score(model.params.target, last).logits[0, 0]

  tokens = [-1]
  for path, parent in zip(tree.paths, tree.parents[1:], strict=True):
    before: list[int] = []
    while parent:
      before.insert(0, tokens[parent])
      parent = tree.parents[parent]
    known = [*text, *before]
    padded = jnp.zeros((len(text) + tree.depth,), jnp.int32)
    padded = padded.at[: len(known)].set(jnp.array(known, jnp.int32))
    best = jnp.argsort(-logits(padded, len(known)))
    tokens.append(int(best[path[-1]]))
  return tokens


def draw(model: ldjax.LanguageModel, seed: int = SEED) -> ldjax.RoundView:
  """Runs one round after the prompt."""
  prompt = jnp.array([model.tokenizer.encode(PROMPT)])
  settings = {
    "sampling": sampling.make_sampling(1, temperature=TEMPERATURE, seed=seed),
    "max_new_tokens": 16,
  }
  length = jnp.array([prompt.shape[1]])
  plain = decoding.autoregressive(
    model.target, model.init_cache, max_len=model.max_len
  )
  state = jax.jit(plain.init)(model.params, prompt, length, **settings)
  text = state.tokens[0, : state.length[0]].tolist()
  tree = decoding.TokenTree.from_paths(PATHS)
  draft = scripted(tree, fill(model, text, tree))
  decoder = decoding.speculative(
    model.target, draft, model.init_cache, max_len=model.max_len
  )
  _, round = jax.jit(decoder.step)(model.params, state)
  return ldjax.show_round(round, tokenizer=model.tokenizer, root=text[-1])


def redraw() -> str:
  """The picture's text, from what is kept of its round."""
  kept = json.loads(KEPT.read_text("utf-8"))
  return ldjax.RoundView(**kept)._repr_svg_() + "\n"


def main() -> None:
  """Writes the picture and what it shows."""
  view = draw(ldjax.load("demo", draft="none", max_len=64))
  PICTURE.parent.mkdir(exist_ok=True)
  kept = json.dumps(dataclasses.asdict(view), ensure_ascii=False, indent=1)
  KEPT.write_text(kept + "\n", encoding="utf-8")
  PICTURE.write_text(redraw(), encoding="utf-8")
  print(view)


if __name__ == "__main__":
  main()
