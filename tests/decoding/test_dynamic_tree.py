"""Trees of fixed size whose content is what the draft finds likeliest."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldjax import decoding, sampling

NgramGuess = decoding.NgramGuess

# Nothing repeats; one token repeats; two do; the text goes round in a circle.
TEXTS = ((3, 9, 1), (30, 30), (5, 6, 7, 8, 5, 6), (1, 2, 1, 2, 1), (4,))
GUESS = NgramGuess(depth=3, max_match=2, acceptance=(0.2, 0.6))
SURE = NgramGuess(depth=6, max_match=3, acceptance=(1.0, 0.0, 0.9))


def _context(texts=TEXTS):
  tokens = np.full((len(texts), 8), 29, np.int32)
  for row, text in enumerate(texts):
    tokens[row, : len(text)] = text
  lengths = jnp.array([len(text) for text in texts])
  return decoding.DraftContext(jnp.asarray(tokens), lengths, None)


def _repeat(text, depth, max_match):
  """What followed the longest, then latest, repeat of the end; its length."""
  for size in range(min(max_match, len(text) - 1), 0, -1):
    for end in range(len(text) - 1, size - 1, -1):
      if text[end - size : end] == text[-size:]:
        going = list(text)
        for i in range(depth):
          going.append(going[end + i])
        return going[len(text) :], size
  return [], 0


def _candidates(heads, text, width, depth, guess):
  """Scores of all paths of tokens that may enter the tree, by the rule."""
  found, above = {}, [((), np.float32(0))]
  for _ in range(depth):
    level = {}
    for path, score in above:
      logits = heads.logits((text[-1], *path))
      logps = logits - np.log(np.exp(logits).sum())
      for best in np.argsort(-logits, kind="stable")[:width]:
        level[*path, heads.token(best)] = score + logps[best]
    above = sorted(level.items(), key=lambda item: -item[1])[:width]
    found |= level
  if guess is not None:
    chain, matched = _repeat(list(text), guess.depth, guess.max_match)
    rate = guess.acceptance[matched - 1] if matched else 0
    for i in range(1, len(chain) + 1 if rate else 0):
      path = tuple(chain[:i])
      found[path] = max(found.get(path, -np.inf), np.float32(i * np.log(rate)))
  return found


def _paths(candidates, row):
  """Paths of tokens of a row's valid nodes; checks that it is a tree."""
  tokens, parents = candidates.tokens[row], candidates.parents[row]
  assert tokens[0] == parents[0] == -1
  paths = {0: ()}
  for node in range(1, len(tokens)):
    assert 0 <= parents[node] < node
    if tokens[node] >= 0:
      paths[node] = (*paths[int(parents[node])], int(tokens[node]))
  assert len(set(paths.values())) == len(paths)
  return set(paths.values()) - {()}


def _propose(draft, params, context=None):
  context = _context() if context is None else context
  state = draft.init(params, context.length.shape[0])
  got, _ = jax.jit(draft.propose)(params, state, context)
  assert got.tokens.shape == got.parents.shape == (len(state), draft.size)
  return jax.tree.map(np.asarray, got)


@pytest.mark.parametrize(
  ("size", "width", "depth", "vocab_size", "guess"),
  [
    (2, 4, 3, 31, None),
    (2, 1, 1, 31, GUESS),
    (5, 1, 3, 31, None),
    (8, 4, 4, 31, None),
    (8, 3, 4, 11, GUESS),
    (13, 2, 4, 31, GUESS),
    (19, 5, 2, 31, SURE),
    (7, 5, 3, 31, SURE),
    (11, 9, 4, 3, SURE),
    # More nodes than there are candidates.
    (17, 2, 2, 5, GUESS),
    (9, 1, 2, 31, None),
  ],
)
def test_the_rule_in_numpy(pair_heads, size, width, depth, vocab_size, guess):
  trimmed = vocab_size < 31
  for seed in range(3):
    # Peaked enough that some trees go deep.
    heads = pair_heads(4, vocab_size, trimmed=trimmed, seed=seed, scale=2.0)
    draft = decoding.dynamic_tree(
      heads.fn, size, width=width, depth=depth, ngram=guess
    )
    got = _propose(draft, heads.params)
    for row, text in enumerate(TEXTS):
      found = _candidates(heads, text, width, depth, guess)
      best = sorted(found, key=lambda path: -found[path])[: size - 1]
      assert _paths(got, row) == set(best), (row, seed)
      assert max(map(len, best)) <= draft.depth
      # The chain of a sure guess is always there, whatever the heads say.
      if guess is SURE and row == 1:
        assert (30,) * min(size - 1, 6) in best
    assert draft.depth <= size - 1
    assert len(heads.asked) == min(depth, size - 1)
    assert max(heads.asked) <= min(width, size - 1)


def test_nodes_that_both_find_are_there_once(pair_heads):
  """The n-gram's chain is the heads' best path, or a worse one, or half."""
  heads = pair_heads(4, seed=5)
  for ranks in ((0, 0, 0), (1, 0, 1), (0, 2, 9), (9, 0, 0)):
    path = [30]
    for rank in ranks:
      path.append(int(np.argsort(-heads.logits(path))[rank]))
    # 30 a b c 30: a match of one token, and the chain a b c.
    text = (*path, 30)
    guess = NgramGuess(depth=3, max_match=1, acceptance=(0.7,))
    draft = decoding.dynamic_tree(heads.fn, 9, width=3, ngram=guess)
    got = _propose(draft, heads.params, _context([text]))
    paths = _paths(got, 0)  # which checks that none is there twice
    assert len(paths) == 8
    assert {tuple(path[1 : i + 1]) for i in (1, 2, 3)} <= paths
    assert (got.tokens >= 0)[:, 1:].all()


def test_equal_scores(pair_heads):
  """All guesses alike: ties must not part a node from its parent."""
  heads = pair_heads(4, scale=0.0)
  for size, width in ((8, 3), (30, 4)):
    for guess in (None, GUESS, SURE):
      draft = decoding.dynamic_tree(heads.fn, size, width=width, ngram=guess)
      got = _propose(draft, heads.params)
      for row in range(len(TEXTS)):
        assert len(_paths(got, row)) == size - 1


def test_certainty(pair_heads):
  """Probability 1 at each step: a child scores no lower than its parent."""
  heads = pair_heads(4)
  own = 1e9 * jnp.eye(31)[(jnp.arange(31) + 1) % 31]
  params = {"own": own, "before": jnp.zeros_like(own)}
  draft = decoding.dynamic_tree(heads.fn, 5, width=3)
  got = _propose(draft, params)
  for row, text in enumerate(TEXTS):
    path = [(text[-1] + i) % 31 for i in range(1, 5)]
    assert _paths(got, row) == {tuple(path[:i]) for i in range(1, 5)}


@pytest.mark.parametrize("guess", [None, GUESS, SURE])
@pytest.mark.parametrize(
  "value", [np.nan, np.inf, -np.inf, 3e38, -3e38, "a few"]
)
def test_broken_logits(pair_heads, value, guess):
  heads = pair_heads(3)
  own = np.array(heads.params["own"])
  if value == "a few":
    own[1, 3:9], own[9, ::2], own[6], own[30, 30] = np.nan, np.inf, np.nan, 3e38
  else:
    own[:] = value
  params = {**heads.params, "own": jnp.asarray(own)}
  draft = decoding.dynamic_tree(heads.fn, 9, width=3, ngram=guess)
  got = _propose(draft, params)
  for row, text in enumerate(TEXTS):
    paths = _paths(got, row)
    if value != "a few" and not np.isfinite(value):
      # Only the n-gram's chain is left.
      rule = guess or NgramGuess(depth=1, max_match=1, acceptance=(0.0,))
      chain, matched = _repeat(list(text), rule.depth, rule.max_match)
      if not matched or not rule.acceptance[matched - 1]:
        chain = []
      assert paths == {
        tuple(chain[:i]) for i in range(1, min(len(chain), 8) + 1)
      }


def test_one_broken_logit_rules_out_one_token(pair_heads):
  heads = pair_heads(3)
  for value in (np.nan, np.inf):
    own = heads.params["own"].at[4, ::2].set(value)
    draft = decoding.dynamic_tree(heads.fn, 4, width=3, depth=1)
    got = _propose(draft, {**heads.params, "own": own}, _context([(4,)]))
    best = np.argsort(-heads.logits([4])[1::2])[:3] * 2 + 1
    assert got.tokens[0].tolist() == [-1, *best]


def test_narrow_logits(pair_heads):
  """bfloat16 logits are summed up in float32."""
  heads = pair_heads(3, seed=2)
  rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), heads.params)
  exact = jax.tree.map(lambda x: x.astype(jnp.float32), rounded)

  def begin(params, state, pending):
    carry, logits = heads.fn.begin(params, state, pending)
    return carry, logits.astype(jnp.bfloat16)

  narrow = heads.fn._replace(begin=begin)
  got = [
    _propose(decoding.dynamic_tree(fn, 4, width=3, depth=1), exact)
    for fn in (heads.fn, narrow)
  ]
  np.testing.assert_array_equal(got[0].tokens, got[1].tokens)


def test_sizes(pair_heads):
  heads = pair_heads(3).fn
  make = functools.partial(decoding.dynamic_tree, heads)
  assert make(1) == make(1, ngram=GUESS) == decoding.root_only(make(8))
  assert (make(8).size, make(8).depth) == (8, 3)
  assert make(8, depth=2).depth == 2 and make(3).depth == 2
  assert make(8, depth=9) is make(8) is make(8, width=4, depth=3)
  assert make(8, ngram=SURE).depth == 6 and make(5, ngram=SURE).depth == 4


def test_errors(pair_heads):
  heads = pair_heads(3).fn
  for wrong in ({"size": 0}, {"width": 0}, {"depth": -1}):
    name, value = next(iter(wrong.items()))
    with pytest.raises(ValueError, match=f"{name} is {value}"):
      decoding.dynamic_tree(heads, **{"size": 8, **wrong})


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"depth": 0}, "depth is 0"),
    ({"max_match": 0}, "max_match is 0"),
    ({"acceptance": (0.5,)}, "acceptance has 1 entries.* 2"),
    ({"acceptance": (0.5, 1.5)}, "acceptance holds 1.5"),
    ({"acceptance": (-0.1, 0.5)}, "acceptance holds -0.1"),
    ({"acceptance": (math.nan, 0.5)}, "acceptance holds nan"),
  ],
)
def test_guess_errors(change, message):
  good = {"depth": 2, "max_match": 2, "acceptance": [0.25, 0.5]}
  assert hash(NgramGuess(**good)) == hash(
    NgramGuess(**{**good, "acceptance": (0.25, 0.5)})
  )
  with pytest.raises(ValueError, match=message):
    NgramGuess(**{**good, **change})


@pytest.mark.parametrize(
  "guess",
  [pytest.param(None, marks=pytest.mark.slow), SURE],
  ids=["heads", "merged"],
)
@pytest.mark.parametrize("seed", [None, 6], ids=["greedy", "sampled"])
def test_changes_no_token(toy, pair_heads, guess, seed):
  heads = pair_heads(3, 17, trimmed=True)
  draft = decoding.dynamic_tree(heads.fn, 16, width=5, ngram=guess)
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
  np.testing.assert_array_equal(state.draft, state.cache.length)
  # The same from heads that break.
  broken = jax.tree.map(jnp.copy, heads.params)
  broken["own"] = broken["own"].at[::2].set(jnp.nan)
  texts, _ = toy.run(toy.decoder(draft), toy.params(broken), **request)
  assert texts == want


@pytest.mark.slow
def test_text_that_repeats(toy, pair_heads):
  """The heads know nothing of it; the n-gram does."""
  heads = pair_heads(3, seed=1)
  force = {position: (7, 2, 11)[position % 3] for position in range(40)}
  rounds = []
  for guess in (None, NgramGuess(depth=4, max_match=2, acceptance=(0.5, 0.9))):
    draft = decoding.dynamic_tree(heads.fn, 6, width=2, ngram=guess)
    params = toy.params(heads.params, force=force)
    texts, state = toy.run(toy.decoder(draft), params, max_new_tokens=24)
    assert texts == [toy.greedy(p, 24, force=force) for p in toy.prompts]
    rounds.append(int(state.rounds.max()))
  # Once it has seen the circle, five tokens a round.
  assert rounds[1] <= 1 + 5 + -(-20 // 5) < rounds[0]
