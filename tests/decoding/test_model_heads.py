"""An independent model as draft heads."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldjax import decoding, sampling

TokenTree = decoding.TokenTree
SURE = decoding.NgramGuess(depth=3, max_match=2, acceptance=(0.3, 0.8))


@functools.cache
def _wrong(score):
  """A model whose best guess is the token after the right one."""

  def shifted(params, hidden):
    return decoding.Scores(jnp.roll(score(params, hidden).logits, 1, axis=-1))

  return shifted


def _heads(toy, depth=4, model=None, vocab_size=31, **cache):
  return decoding.model_heads(
    model or toy.target,
    toy.init_cache(**cache),
    depth=depth,
    vocab_size=vocab_size,
  )


def _drafts(heads):
  return {
    "chain": decoding.static_tree(heads, TokenTree.chain(4)),
    "product": decoding.static_tree(heads, TokenTree.product([3, 2, 1])),
    "dynamic": decoding.dynamic_tree(heads, 9, width=3),
    "merged": decoding.dynamic_tree(heads, 9, width=3, ngram=SURE),
  }


@pytest.mark.parametrize(
  "name",
  [
    "chain",
    pytest.param("merged", marks=pytest.mark.slow),
    pytest.param("dynamic", marks=pytest.mark.slow),
  ],
)
def test_the_target_itself_is_right_for_ever(toy, name):
  # vllm#14649: one stale key in the draft's cache would cost acceptance.
  toy = toy.long()
  prompts = toy.prompts[:2]
  draft = _drafts(_heads(toy, page_size=16))[name]
  decoder = toy.decoder(draft, page_size=16)
  # So sure of itself that the likeliest tree holds its best path.
  target = toy.params(scale=0.1).target
  params = decoding.DecoderParams(target, target)
  state = toy.init(decoder, params, prompts, max_new_tokens=254)
  state, rounds = toy.trace(decoder, params, state, 50)
  assert (rounds.count == 5).all()
  assert toy.texts(state) == [toy.greedy(prompt, 251) for prompt in prompts]
  # The draft read what the target read, and wrote the same.
  np.testing.assert_array_equal(state.draft.length, state.cache.length)
  np.testing.assert_array_equal(state.draft.pages[0], state.cache.pages[0])


def test_always_wrong_gives_one_token_a_round(toy):
  model = toy.target._replace(score=_wrong(toy.target.score))
  draft = decoding.static_tree(_heads(toy, model=model), TokenTree.chain(3))
  decoder = toy.decoder(draft)
  params = toy.params()._replace(draft=toy.params().target)
  state = toy.init(decoder, params, max_new_tokens=20)
  state, rounds = toy.trace(decoder, params, state, 19)
  assert (rounds.count == 1).all()
  assert toy.texts(state) == [toy.greedy(p, 20) for p in toy.prompts]
  # Yet its guesses were the ones it was made to give.
  first = rounds.candidates.tokens[0, :, 1]
  assert first.tolist() == [
    (toy.greedy(prompt, 2)[1] + 1) % 31 for prompt in toy.prompts
  ]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 4], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["product", "merged"])
def test_changes_no_token(toy, name, seed):
  """Another model than the target, in a ragged batch, alone and reordered."""
  draft = _drafts(_heads(toy))[name]
  decoder = toy.decoder(draft)
  params = toy.params()._replace(draft=toy.params(salt=3, scale=0.02).target)

  def run(decoder, params, rows):
    setting = {}
    if seed is not None:
      setting = {"temperature": 1.0, "seed": [seed + row for row in rows]}
    return toy.run(
      decoder,
      params,
      [toy.prompts[row] for row in rows],
      sampling_=sampling.make_sampling(len(rows), **setting),
      max_new_tokens=28,
    )

  want, _ = run(toy.decoder(), toy.params(), (0, 1, 2, 3))
  for rows in ((0, 1, 2, 3), (2, 0, 3, 1)):
    texts, state = run(decoder, params, rows)
    assert texts == [want[row] for row in rows]
    np.testing.assert_array_equal(state.draft.length, state.cache.length)
    # It is right now and then, and wrong now and then.
    assert 28 < int(state.rounds.sum()) < int(state.emitted.sum()) == 4 * 28
  assert run(decoder, params, (1,))[0] == [want[1]]


@pytest.mark.parametrize(
  "page_size", [4, pytest.param(None, marks=pytest.mark.slow)]
)
def test_a_draft_shorter_than_the_target(toy, page_size):
  # vllm#21986; a full cache takes nothing more, least of all after a gap.
  heads = _heads(toy, page_size=page_size, max_len=12)
  draft = decoding.static_tree(heads, TokenTree.chain(4))
  params = toy.params()._replace(draft=toy.params().target)
  texts, state = toy.run(toy.decoder(draft), params, max_new_tokens=28)
  assert texts == [toy.greedy(prompt, 28) for prompt in toy.prompts]
  length = np.asarray(state.draft.length)
  assert (length <= 12).all()
  got, want = np.asarray(state.draft.pages[0]), np.asarray(state.cache.pages[0])
  for row, slot in itertools.product(range(4), range(12)):
    if slot >= length[row]:
      continue
    theirs = int(state.cache.block_table[row, slot // 4]), slot % 4
    own = (row, slot)
    if page_size is not None:
      own = int(state.draft.block_table[row, slot // 4]), slot % 4
    assert (got[own[0], 0, own[1]] == want[theirs[0], 0, theirs[1]]).all()


def test_a_row_that_begins_anew(toy):
  """Position 0 begins a sequence, whatever the row held before."""
  heads = _heads(toy)
  params = toy.params().target

  @jax.jit
  def seen(state, rows, tokens, start):
    positions = start[:, None] + jnp.arange(tokens.shape[1])[None]
    return heads.observe(
      params,
      state,
      decoding.Observation(
        rows=rows,
        tokens=tokens,
        features=jnp.zeros((*tokens.shape, 0)),
        positions=positions,
        count=jnp.array([3, 2]),
      ),
    )

  state = heads.init(params, 3)
  rows, zero = jnp.array([2, 0]), jnp.array([0, 0])
  state = seen(state, rows, jnp.array([[1, 2, 3], [4, 5, 6]]), zero)
  assert state.length.tolist() == [2, 0, 3]
  state = seen(
    state, rows, jnp.array([[7, 8, 9], [10, 11, 12]]), jnp.array([0, 2])
  )
  assert state.length.tolist() == [4, 0, 3]
  # Position 7 after position 3: there is a gap, so nothing is written.
  state = seen(
    state, rows, jnp.array([[1, 1, 1], [2, 2, 2]]), jnp.array([3, 7])
  )
  assert state.length.tolist() == [4, 0, 6]
  pool = state.pool.num_pages
  assert int(state.pool.num_free) == pool - 1 - 2
  state = heads.release(state, jnp.array([True, True, False]))
  assert state.length.tolist() == [0, 0, 6]
  # What it guesses next is what its model says of the text.
  _, logits = jax.jit(heads.begin)(params, state, jnp.array([0, 0, 5]))
  want = toy.ranks([7, 8, 9, 1, 1, 1, 5])
  got = logits[2, 0] / params["scale"]
  np.testing.assert_allclose(got, want, rtol=1e-5)


def test_each_level_sees_its_path(toy):
  heads = _heads(toy)
  params = toy.params().target

  @jax.jit
  def grow(params):
    state = heads.init(params, 1)
    carry, logits = heads.begin(params, state, jnp.array([4]))
    carry, first = heads.extend(
      params, state, carry, jnp.array([[9, 2]]), jnp.array([[0, 0]])
    )
    _, second = heads.extend(
      params, state, carry, jnp.array([[6, 1, 30]]), jnp.array([[2, 1, 2]])
    )
    return jnp.concatenate([logits, first, second], axis=1)[0]

  paths = [(4,), (4, 9), (4, 2), (4, 2, 6), (4, 9, 1), (4, 2, 30)]
  want = np.stack([toy.ranks(path) for path in paths])
  np.testing.assert_allclose(grow(params) / params["scale"], want, rtol=1e-5)


def test_smaller_vocabulary(toy):
  """An id that the target lacks is never proposed."""
  heads = _heads(toy, vocab_size=13)
  params = toy.params().target
  draft = decoding.dynamic_tree(heads, 9, width=4)
  context = decoding.DraftContext(
    jnp.array([[1, 2, 3]]), jnp.array([3]), sampling.make_sampling(1)
  )
  state = draft.init(params, 1)
  got, _ = jax.jit(draft.propose)(params, state, context)
  assert (got.tokens[:, 1:] >= 0).all() and (got.tokens < 13).all()
  with pytest.raises(ValueError, match=r"ranks 14 .* draft knows 13"):
    decoding.static_tree(heads, TokenTree.product([14]))


def test_errors(toy):
  for name in ("depth", "vocab_size"):
    with pytest.raises(ValueError, match=f"{name} is 0"):
      decoding.model_heads(
        toy.target, toy.init_cache(), **{"depth": 1, "vocab_size": 3, name: 0}
      )
  params = toy.params().target
  wide = _heads(toy, vocab_size=32)
  with pytest.raises(ValueError, match=r"vocab_size is 32, but .* has 31"):
    jax.eval_shape(
      lambda: wide.begin(params, wide.init(params, 1), jnp.array([4]))
    )
  heads = _heads(toy, depth=1)
  state = heads.init(params, 1)
  carry, _ = heads.begin(params, state, jnp.array([4]))
  with pytest.raises(ValueError, match=r"2 tokens ahead is asked.* depth is 1"):
    heads.extend(params, state, carry, jnp.array([[1]]), jnp.array([[0]]))
  for function in (heads.unroll, heads.score):
    with pytest.raises(TypeError, match="language model of its own"):
      function(params, jnp.zeros((1, 2, 3)))


def test_same_arguments_same_heads(toy):
  cache = toy.init_cache()
  one = decoding.model_heads(toy.target, cache, depth=2, vocab_size=31)
  other = decoding.model_heads(
    model=toy.target, init_cache=cache, vocab_size=31, depth=2
  )
  assert one is other
