"""Drafts by themselves: what they propose, how often it is accepted."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest

from ldjax import decoding, sampling, testing


@pytest.mark.slow
@pytest.mark.parametrize("depth", range(1, 7))
def test_right_script_is_accepted_for_ever(toy, depth):
  toy = toy.long()
  prompts = toy.prompts[:2]
  greedy = [toy.greedy(prompt, 352) for prompt in prompts]
  decoder = toy.decoder(testing.scripted_draft(depth), page_size=16)
  params = toy.params(toy.script(greedy, prompts))
  state = toy.init(decoder, params, prompts, max_new_tokens=352)
  state, rounds = toy.trace(decoder, params, state, 50)
  assert (rounds.count == depth + 1).all()
  assert (rounds.path == list(range(depth + 1))).all()
  length = 1 + 50 * (depth + 1)
  assert toy.texts(state) == [text[:length] for text in greedy]


def test_wrong_script_gives_one_token_a_round(toy):
  decoder = toy.decoder(testing.scripted_draft(4))
  greedy = [toy.greedy(prompt, 38) for prompt in toy.prompts]
  params = toy.params(toy.script(greedy, shift=1))
  state = toy.init(decoder, params, max_new_tokens=28)
  state, rounds = toy.trace(decoder, params, state, 27)
  assert (rounds.count == 1).all()
  assert toy.texts(state) == [text[:28] for text in greedy]


def _ngram(text, depth, max_match):
  """The longest, then latest, earlier occurrence of the text's end."""
  best, at = 0, None
  for end in range(len(text) - 1):
    matched = 0
    while (
      matched < max_match
      and matched <= end
      and text[end - matched] == text[len(text) - 1 - matched]
    ):
      matched += 1
    if matched and matched >= best:
      best, at = matched, end
  if at is None:
    return [-1] * depth
  going = list(text)
  for i in range(depth):
    going.append(going[at + 1 + i])  # runs on into what it drafts
  return going[len(text) :]


_propose = jax.jit(
  lambda tokens, length: decoding.ngram(4, 3).propose(
    (), (), decoding.DraftContext(tokens, length, None)
  )[0]
)


@hypothesis.given(
  st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=3, max_size=3
  )
)
def test_ngram_is_the_loop(texts):
  # What stands past the length is noise that must not be read.
  tokens = jnp.array([[*text, *[1, 0, 2] * 5][:14] for text in texts])
  got = _propose(tokens, jnp.array([len(text) for text in texts]))
  assert got.tokens.tolist() == [[-1, *_ngram(text, 4, 3)] for text in texts]
  assert got.parents.tolist() == [[-1, 0, 1, 2, 3]] * 3


def test_ngram_errors():
  with pytest.raises(ValueError, match="depth is 0"):
    decoding.ngram(0)
  with pytest.raises(ValueError, match="max_match is -1"):
    decoding.ngram(3, -1)


def test_last_observed():
  features = jnp.arange(12.0).reshape(2, 3, 2)
  observation = decoding.Observation(
    rows=jnp.array([2, 0]),
    tokens=jnp.zeros((2, 3), jnp.int32),
    features=features,
    positions=jnp.zeros((2, 3), jnp.int32),
    count=jnp.array([2, 0]),
  )
  got = decoding.last_observed(observation, jnp.full((3, 2), -1.0))
  # Row 2 saw two positions; row 0 none; row 1 was not there.
  assert got.tolist() == [[-1, -1], [-1, -1], [2, 3]]


@pytest.mark.slow
def test_root_only_keeps_another_drafts_state(toy):
  """A state moves between a draft and its root-only form, with one text."""
  inner = testing.scripted_draft(3)
  seen = []

  def observe(params, state, observation):
    seen.append(observation.tokens.shape)
    return state.at[observation.rows].add(observation.count)

  draft = inner._replace(
    init=lambda params, batch: jnp.zeros((batch,), jnp.int32), observe=observe
  )
  root = decoding.root_only(draft)
  assert (root.size, root.depth) == (1, 0) and root.observe is observe
  greedy = [toy.greedy(prompt, 38) for prompt in toy.prompts]
  params = toy.params(toy.script(greedy))
  wide, narrow = toy.decoder(draft), toy.decoder(root)
  state = toy.init(wide, params, max_new_tokens=24)
  for turn in range(24):
    decoder = narrow if turn % 3 == 1 else wide
    state, _ = toy.programs(decoder).step(params, state)
    # The draft has heard of every committed position once.
    assert state.draft.tolist() == state.cache.length.tolist()
  assert toy.texts(state) == [text[:24] for text in greedy]


def test_scripted_draft_at_its_end():
  script = jnp.arange(10, dtype=jnp.int32)[None]
  context = decoding.DraftContext(script, jnp.array([8]), None)
  got, _ = testing.scripted_draft(4).propose(script, (), context)
  assert got.tokens.tolist() == [[-1, 8, 9, -1, -1]]


@pytest.mark.parametrize(
  ("one", "other"),
  [
    (lambda: decoding.ngram(), lambda: decoding.ngram(depth=3, max_match=4)),
    (lambda: decoding.ngram(2), lambda: decoding.ngram(depth=2)),
    (decoding.root_only, lambda: decoding.root_only(draft=None)),
    (
      lambda: testing.random_tree_draft(6, 3, 31),
      lambda: testing.random_tree_draft(size=6, depth=3, vocab_size=31),
    ),
    (
      lambda: testing.tiny_model(),
      lambda: testing.tiny_model(seed=0, page_size=4),
    ),
  ],
)
def test_same_arguments_same_draft(one, other):
  # A cell run again, or written another way, compiles nothing again.
  assert one() is one()
  for x, y in zip(one(), other(), strict=True):
    assert x is y or not callable(x)


def test_same_arguments_same_decoder(toy):
  make = decoding.speculative
  target, cache = toy.target, toy.init_cache()
  first = make(target, decoding.ngram(2), cache, max_len=40)
  assert make(target, decoding.ngram(2), cache, max_len=40) is first
  assert make(target, decoding.ngram(2), cache, max_len=40, chunk=64) is first
  assert (
    make(target=target, draft=decoding.ngram(2), init_cache=cache, max_len=40)
    is first
  )
  assert make(target, decoding.ngram(2), cache, max_len=41) is not first
  plain = decoding.autoregressive(target, cache, max_len=40)
  assert make(target, decoding.root_only(), cache, max_len=40) is plain


@pytest.mark.parametrize("name", ["max_len", "chunk"])
def test_sizes_below_one(toy, name):
  sizes = {"max_len": 8, "chunk": 4, name: 0}
  with pytest.raises(ValueError, match=f"{name} is 0"):
    decoding.speculative(
      toy.target, decoding.root_only(), toy.init_cache(), **sizes
    )


class TestInitErrors:
  """What can be checked before tracing is; shapes are, even under jit."""

  def _init(self, toy, **change):
    request = {
      "prompt": jnp.ones((2, 5), jnp.int32),
      "prompt_length": jnp.array([5, 2]),
      "sampling": sampling.make_sampling(2),
      "max_new_tokens": 3,
      "stop_ids": (),
      **change,
    }
    prompt, length = request.pop("prompt"), request.pop("prompt_length")
    decoder, params = toy.decoder(), toy.params()
    return jax.eval_shape(
      lambda: decoder.init(params, prompt, length, **request)
    )

  def test_good(self, toy):
    state = self._init(toy)
    assert state.tokens.shape == (2, toy.max_len)
    for limits in (4, jnp.int32(4), [4, 5], jnp.array([4, 5])):
      self._init(toy, max_new_tokens=limits)
    row = decoding.stop_ids_row([4, 9])
    for stops in ([1, 2], {3}, range(16), row, jnp.asarray(row), [row, row]):
      self._init(toy, stop_ids=stops)

  @pytest.mark.parametrize(
    ("change", "message"),
    [
      ({"prompt": jnp.ones((5,), jnp.int32)}, r"prompt has shape \(5,\)"),
      ({"prompt_length": jnp.array([5, 0])}, "a prompt is empty"),
      ({"prompt_length": jnp.array([5, -1])}, "a prompt is empty"),
      ({"prompt_length": jnp.array([6, 2])}, "6 tokens long.* holds 5"),
      (
        {
          "prompt": jnp.ones((2, 50), jnp.int32),
          "prompt_length": jnp.array([41, 2]),
        },
        "41 tokens long.*max_len is 40",
      ),
      # JAX would clamp the row's number and use another row's settings.
      ({"prompt_length": jnp.array([5])}, r"prompt_length has shape \(1,\)"),
      ({"prompt_length": jnp.int32(5)}, r"prompt_length has shape \(\)"),
      (
        {"sampling": sampling.make_sampling(1)},
        r"sampling has shape \(1,\).* 2 rows",
      ),
      (
        {"sampling": sampling.make_sampling(3)},
        r"sampling has shape \(3,\).* 2 rows",
      ),
      ({"max_new_tokens": jnp.array([1, 2, 3])}, "max_new_tokens"),
      ({"stop_ids": jnp.array([2, 7])}, "stop_ids"),
      ({"stop_ids": range(17)}, "17 stop ids"),
    ],
  )
  def test_bad(self, toy, change, message):
    with pytest.raises(ValueError, match=message):
      self._init(toy, **change)

  def test_shapes_are_checked_under_jit(self, toy):
    decoder, params = toy.decoder(), toy.params()
    with pytest.raises(ValueError, match="prompt_length has shape"):
      jax.eval_shape(
        lambda prompt, length: decoder.init(
          params,
          prompt,
          length,
          sampling=sampling.make_sampling(2),
          max_new_tokens=3,
        ),
        jnp.ones((2, 5), jnp.int32),
        jnp.array([5]),
      )


@pytest.mark.slow
@pytest.mark.parametrize("length", [0, -3, 10, 39, 40, 41, 2**30])
def test_traced_length_out_of_range_emits_nothing(toy, length):
  """Under jit a length is unknown; a row that cannot be read ends at once."""
  decoder = toy.decoder()
  params = toy.params()
  good = toy.init(decoder, params)
  programs = toy.programs(decoder)
  tokens = jnp.asarray([[*p, *[0] * (9 - len(p))] for p in toy.prompts])
  state = programs.init(
    params,
    tokens,
    jnp.array([3, length, 2, 4]),
    sampling=sampling.make_sampling(4),
    max_new_tokens=jnp.full((4,), 16),
    stop_ids=jnp.full((4, decoding.MAX_STOP_IDS), -1, jnp.int32),
  )
  while bool(state.live.any()):
    state, _ = programs.step(params, state)
  assert state.emitted[1] == 0 and state.status[1] == decoding.Status.LENGTH
  assert state.cache.length[1] == 0
  want = [toy.greedy(p, 16) for p in toy.prompts]
  assert [toy.texts(state)[i] for i in (0, 2, 3)] == [
    want[i] for i in (0, 2, 3)
  ]
  assert good.status.tolist() == [decoding.Status.RUNNING] * 4
