"""Trees whose shape and content are data: what may never be accepted."""

import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldjax import decoding, sampling, testing

SIZE, DEPTH, V = 9, 4, 5


def _walk(parents, tokens, drawn, finite, stops, remaining):
  """Acceptance in plain Python: one row, nodes as a list."""
  node, path, out, stopped = 0, [], [], False
  while remaining > len(out) and finite[node]:
    path.append(node)
    out.append(drawn[node])
    stopped = drawn[node] in stops
    children = [
      i
      for i in range(len(parents))
      if parents[i] == node and tokens[i] == drawn[node]
    ]
    if stopped or not children:
      return path, out, stopped, True
    node = children[0]
  return path, out, stopped, remaining <= len(out)


@functools.cache
def _accept():
  return jax.jit(functools.partial(decoding.accept, depth=DEPTH))


@st.composite
def _rows(draw):
  parents, depths = [-1], [0]
  for i in range(1, SIZE):
    allowed = [j for j in range(i) if depths[j] < DEPTH]
    parents.append(draw(st.sampled_from(allowed)))
    depths.append(depths[parents[-1]] + 1)
  # -1 is invalid; 5 and 6 are no tokens of the target.
  tokens = draw(st.lists(st.integers(-1, V + 1), min_size=SIZE, max_size=SIZE))
  drawn = draw(st.lists(st.integers(0, V - 1), min_size=SIZE, max_size=SIZE))
  finite = draw(
    st.lists(
      st.sampled_from([True] * 9 + [False]), min_size=SIZE, max_size=SIZE
    )
  )
  stops = draw(st.sets(st.integers(0, V - 1), max_size=1))
  return parents, tokens, drawn, finite, stops, draw(st.integers(0, DEPTH + 2))


@hypothesis.given(st.lists(_rows(), min_size=3, max_size=3))
def test_acceptance_is_the_walk(rows):
  parents, tokens, drawn, finite, stops, remaining = zip(*rows, strict=True)
  logits = np.eye(V, dtype=np.float32)[np.array(drawn)] * 3
  logits[~np.array(finite), 1] = [np.inf, np.nan][remaining[0] % 2]
  root = jnp.array([0, 5, 9])  # the last tokens drawn find no room
  walk = _accept()(
    decoding.Scores(jnp.asarray(logits)),
    decoding.Candidates(jnp.array(tokens), jnp.array(parents)),
    sampling.make_sampling(3),
    sampling.History(
      jnp.zeros((3, 11), jnp.int32), jnp.ones((3,), jnp.int32), root + 1
    ),
    stop_ids=jnp.array([[*s, -1][:1] for s in stops]),
    remaining=jnp.array(remaining),
  )
  for row, one in enumerate(rows):
    path, out, stopped, healthy = _walk(*one)
    count = len(out)
    assert walk.count[row] == count
    assert walk.path[row, :count].tolist() == path
    assert walk.tokens[row].tolist() == out + [-1] * (DEPTH + 1 - count)
    assert bool(walk.stopped[row]) == stopped
    assert bool(walk.finite[row]) == healthy


@functools.cache
def _playing(size, depth):
  """A draft that proposes what its parameters say at each position.

  They are tokens and parents [B, S, T], by the position of the root.
  """

  def propose(params, state, context):
    tokens, parents = params
    at = (context.length - 1)[:, None, None]
    pick = lambda x: jnp.take_along_axis(x, at, axis=1)[:, 0]  # noqa: E731
    return decoding.Candidates(pick(tokens), pick(parents)), state

  return decoding.root_only()._replace(propose=propose, size=size, depth=depth)


def _tree_params(toy, texts, parents, fill):
  """Plays one tree everywhere; `fill(text ahead of the root)` gives tokens."""
  batch, size = len(texts), len(parents)
  tokens = np.full((batch, toy.max_len, size), -1, np.int32)
  for row, (prompt, text) in enumerate(zip(toy.prompts, texts, strict=True)):
    whole = [*prompt, *text]
    for root in range(toy.max_len):
      ahead = [*whole[root + 1 :], *[0] * size]
      tokens[row, root] = fill(ahead)
  return jnp.asarray(tokens), jnp.broadcast_to(
    jnp.asarray(parents, dtype=jnp.int32), tokens.shape
  )


# Node 1 begins a long branch; nodes 2 to 4 hang off the root, leaves at once.
RAGGED = (-1, 0, 0, 0, 0, 1, 5, 1)


@pytest.fixture(scope="module")
def decoder(toy):
  return toy.decoder(_playing(len(RAGGED), 3))


FORCE = {position: 0 for position in range(40) if position % 3}


def _other(token, by=1):
  return (token + by) % 31


@pytest.mark.parametrize(
  ("what", "fill", "per_round"),
  [
    # Medusa: leaves of different depth, and the text after a leaf is id 0.
    (
      "right leaf",
      lambda a: [-1, _other(a[0]), a[0], _other(a[0], 2), 0, 0, 0, 0],
      (1, 2),
    ),
    (
      "right branch",
      lambda a: [-1, a[0], _other(a[0]), 0, 1, a[1], a[2], _other(a[1])],
      (1, 4),
    ),
    ("invalid after a match", lambda a: [-1, a[0], *[-1] * 6], (1, 2)),
    # An invalid node's children carry the right tokens, but hang in the air.
    (
      "below an invalid node",
      lambda a: [-1, -1, -1, -1, -1, a[0], a[1], a[1]],
      (1, 1),
    ),
    ("all but the root invalid", lambda a: [-1] * 8, (1, 1)),
    ("duplicate siblings", lambda a: [-1, *[a[0]] * 4, a[1], a[2], a[1]], None),
    (
      "ids beyond the vocabulary",
      lambda a: [-1, 31, 32, 10**9, -7, -2, 2**31 - 1, -(2**31)],
      (1, 1),
    ),
    # The root's own entry is no candidate, whatever it says.
    ("a token at the root", lambda a: [a[0], *[-1] * 7], (1, 1)),
  ],
)
@pytest.mark.parametrize("seed", [None, 5], ids=["greedy", "sampled"])
def test_same_text_as_plain(toy, decoder, what, fill, per_round, seed):
  request = {"max_new_tokens": 24}
  if seed is not None:
    request["sampling_"] = sampling.make_sampling(
      4, temperature=1.0, seed=[seed, seed + 1, seed + 2, seed]
    )
  texts, _ = toy.run(toy.decoder(), toy.params(force=FORCE), **request)
  if seed is None:
    assert texts == [toy.greedy(p, 24, force=FORCE) for p in toy.prompts]
  assert sum(text.count(0) for text in texts) >= 4 * 14
  tree = _tree_params(toy, texts, RAGGED, fill)
  params = toy.params(tree, force=FORCE)
  state = toy.init(decoder, params, **request)
  state, rounds = toy.trace(decoder, params, state, 24)
  assert toy.texts(state) == texts
  if per_round is not None:
    counts = set(rounds.count[rounds.count > 0].tolist())
    assert min(counts) >= per_round[0] and max(counts) <= per_round[1]
    assert max(counts) == per_round[1]
  # Nodes passed are a path of the tree, and never an invalid node.
  for path, count in zip(
    rounds.path.reshape(-1, 4), rounds.count.reshape(-1), strict=True
  ):
    for above, below in itertools.pairwise(path[:count]):
      assert RAGGED[below] == above


@pytest.mark.slow
def test_random_trees_and_random_targets(toy):
  draft = testing.random_tree_draft(12, 4, toy.V)
  decoder = toy.decoder(draft)
  for salt in range(5):
    params = toy.params(salt=salt)
    texts, state = toy.run(decoder, params, max_new_tokens=28)
    assert texts == [toy.greedy(p, 28, salt=salt) for p in toy.prompts]
    # Some guesses were right, so the tree did something.
    assert int(state.rounds.sum()) < int(state.emitted.sum())


def _proposes(size, depth, make):
  """A draft whose `propose` returns make(batch)."""

  def propose(params, state, context):
    made = make(context.length.shape[0])
    return (made, state) if isinstance(made, decoding.Candidates) else made

  return decoding.root_only()._replace(propose=propose, size=size, depth=depth)


@pytest.mark.parametrize(
  "parents",
  [
    (4, 3, 2, 1, 0),
    (-1, 1, 2, 3, 4),
    (-1, 2, 0, 1, 2),
    (0, 0, 9, -5, 1),
    (-1, -1, 0, 1, -1),
  ],
)
def test_parents_that_make_no_tree_change_no_token(toy, parents):
  # The tokens are right ones, so that a walk would like to go there.
  want = [toy.greedy(prompt, 8) for prompt in toy.prompts]
  tokens = np.full((4, 5), -1, np.int32)
  for row, text in enumerate(want):
    tokens[row] = [0, *text[1:5]]
  draft = _proposes(
    5,
    4,
    lambda batch: decoding.Candidates(
      jnp.asarray(tokens), jnp.full((batch, 5), jnp.asarray(parents, jnp.int32))
    ),
  )
  texts, _ = toy.run(toy.decoder(draft), toy.params(), max_new_tokens=8)
  assert texts == want


@pytest.mark.parametrize(
  "make",
  [
    lambda b: decoding.Candidates(
      jnp.zeros((b, 3), jnp.int32), jnp.array([-1, 0, 0])
    ),
    lambda b: decoding.Candidates(
      jnp.zeros((b, 4), jnp.int32), jnp.zeros((b, 4), jnp.int32)
    ),
    lambda b: decoding.Candidates(
      jnp.zeros((b, 3), jnp.float32), jnp.zeros((b, 3), jnp.int32)
    ),
    lambda b: decoding.Candidates(np.zeros((b, 3), np.int32), (-1, 0, 0)),
    lambda b: (jnp.zeros((b, 3), jnp.int32), jnp.zeros((b, 3), jnp.int32)),
    lambda b: jnp.zeros((b, 3), jnp.int32),
  ],
)
def test_what_is_no_proposal_is_told_by_name(toy, make):
  decoder = toy.decoder(_proposes(3, 2, make))
  state = toy.init(toy.decoder(), toy.params())
  with pytest.raises(
    TypeError, match=r"propose of a draft of size 3 must.*\[4"
  ):
    jax.eval_shape(decoder.step, toy.params(), state)
