"""Trees of fixed shape on draft heads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldjax import decoding, sampling

TokenTree = decoding.TokenTree

# Texts of which the last token is pending; what stands past them is noise.
TEXTS = ((3, 9), (30,), (0, 4, 17, 4))


def _context(texts=TEXTS):
  tokens = np.full((len(texts), 7), 29, np.int32)
  for row, text in enumerate(texts):
    tokens[row, : len(text)] = text
  lengths = jnp.array([len(text) for text in texts])
  return decoding.DraftContext(jnp.asarray(tokens), lengths, None)


def _propose(draft, heads, context):
  state = draft.init(heads.params, context.length.shape[0])
  got, after = jax.jit(draft.propose)(heads.params, state, context)
  # A proposal leaves no trace in the state.
  np.testing.assert_array_equal(after, state)
  return got


def _filled(heads, tree, pending):
  """Token of each node besides the root, by a loop over paths."""
  tokens = []
  for path in tree.paths:
    text = [pending]
    for rank in path:
      best = np.argsort(-heads.logits(text), kind="stable")[rank]
      text.append(heads.token(best))
    tokens.append(text[-1])
  return tokens


@pytest.mark.parametrize(
  "tree",
  [
    TokenTree.chain(1),
    TokenTree.chain(3),
    TokenTree.product([3, 2]),
    # Leaves at every depth, and ranks that leave others out.
    TokenTree.from_paths([(4,), (0,), (4, 1), (4, 1, 0), (0, 6), (0, 6, 2)]),
    # Nodes in another order than by depth.
    TokenTree(((1,), (1, 0), (1, 0, 3), (0,), (0, 2), (1, 5), (0, 2, 0))),
  ],
  ids=["chain 1", "chain 3", "product", "ragged", "by branches"],
)
@pytest.mark.parametrize("trimmed", [False, True], ids=["whole", "trimmed"])
def test_filled_as_the_loop_does(pair_heads, tree, trimmed):
  heads = pair_heads(3, 11 if trimmed else 31, trimmed=trimmed)
  draft = decoding.static_tree(heads.fn, tree)
  assert (draft.size, draft.depth) == (tree.size, tree.depth)
  got = _propose(draft, heads, _context())
  want = [[-1, *_filled(heads, tree, text[-1])] for text in TEXTS]
  assert got.tokens.tolist() == want
  assert got.parents.tolist() == [list(tree.parents)] * 3
  # Asked a level at a time, and never about a leaf.
  inner = set(tree.parents) - {-1}
  asked = [
    sum(tree.depths[node] == depth for node in inner)
    for depth in range(tree.depth)
  ]
  assert heads.asked == asked


def test_the_root_alone_asks_nothing(pair_heads):
  heads = pair_heads(3)
  draft = decoding.static_tree(heads.fn, TokenTree.root_only())
  got = _propose(draft, heads, _context())
  assert got.tokens.tolist() == got.parents.tolist() == [[-1]] * 3
  assert heads.asked == []
  # One form for every tree on the same heads, so one program.
  for tree in (TokenTree.chain(2), TokenTree.product([2, 2])):
    other = decoding.root_only(decoding.static_tree(heads.fn, tree))
    assert other == draft and hash(other) == hash(draft)


def test_same_arguments_same_draft(pair_heads):
  heads = pair_heads(3).fn
  tree = TokenTree.product([2, 2])
  draft = decoding.static_tree(heads, tree)
  assert decoding.static_tree(heads=heads, tree=TokenTree(tree.paths)) is draft


def test_a_row_without_tokens(pair_heads):
  heads = pair_heads(2)
  draft = decoding.static_tree(heads.fn, TokenTree.chain(2))
  got = _propose(draft, heads, _context(((), (5,))))
  assert got.tokens[1].tolist() == [
    -1,
    *_filled(heads, TokenTree.chain(2), 5),
  ]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_broken_logits_give_ids_in_range(pair_heads, value):
  heads = pair_heads(3)
  broken = {**heads.params, "own": jnp.full_like(heads.params["own"], value)}
  draft = decoding.static_tree(heads.fn, TokenTree.product([3, 2, 1]))
  got, _ = draft.propose(broken, draft.init(broken, 3), _context())
  assert (got.tokens[:, 1:] >= 0).all() and (got.tokens < 31).all()


def test_tree_deeper_than_the_heads(pair_heads):
  # Medusa#63: in JAX the gather would clamp and say nothing.
  tree = TokenTree.medusa("mc_sim_7b_63")
  with pytest.raises(ValueError, match="4 deep but the draft guesses 3"):
    decoding.static_tree(pair_heads(3).fn, tree)
  draft = decoding.static_tree(pair_heads(4).fn, tree)
  assert (draft.size, draft.depth) == (64, 4)


def test_tree_wider_than_the_vocabulary(pair_heads):
  with pytest.raises(ValueError, match=r"ranks 12 .* draft knows 11"):
    decoding.static_tree(pair_heads(3, 11).fn, TokenTree.product([12]))


@pytest.mark.parametrize("seed", [None, 6], ids=["greedy", "sampled"])
def test_changes_no_token(toy, pair_heads, seed):
  heads = pair_heads(3, 17, trimmed=True)
  draft = decoding.static_tree(heads.fn, TokenTree.product([7, 2, 1]))
  request = {"max_new_tokens": 24}
  if seed is not None:
    request["sampling_"] = sampling.make_sampling(4, temperature=1.0, seed=seed)
  want, _ = toy.run(toy.decoder(), toy.params(), **request)
  texts, state = toy.run(
    toy.decoder(draft), toy.params(heads.params), **request
  )
  assert texts == want
  if seed is None:
    assert texts == [toy.greedy(prompt, 24) for prompt in toy.prompts]
  assert int(state.rounds.sum()) < int(state.emitted.sum())
  # The heads heard of every committed position once.
  np.testing.assert_array_equal(state.draft, state.cache.length)
