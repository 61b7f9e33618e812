"""A round is a pure function of arrays: donated, scanned, mapped, kept."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldjax import decoding, sampling, testing


@pytest.fixture(scope="module")
def decoder(toy):
  return toy.decoder(testing.scripted_draft(4))


@pytest.fixture(scope="module")
def greedy(toy):
  return [toy.greedy(prompt, 38) for prompt in toy.prompts]


@pytest.fixture(scope="module")
def donating(toy, decoder, as_users):
  params = toy.params(jnp.zeros((4, toy.max_len), jnp.int32))
  state = toy.programs(decoder).empty(params, 4)
  step = jax.jit(decoder.step, donate_argnums=1)
  return step.lower(params, state).compile(as_users)


def _pointers(tree):
  return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) if x.size]


def _request(toy):
  tokens = [[*p, *[0] * (toy.width - len(p))] for p in toy.prompts]
  return {
    "prompt": jnp.asarray(tokens),
    "prompt_length": jnp.asarray([len(p) for p in toy.prompts]),
    "sampling": sampling.make_sampling(4),
    "max_new_tokens": jnp.full((4,), 16),
    "stop_ids": jnp.full((4, decoding.MAX_STOP_IDS), -1, jnp.int32),
  }


@pytest.mark.parametrize(
  "eager", [pytest.param(True, marks=pytest.mark.slow), False]
)
def test_init_copies_its_inputs(toy, decoder, donating, greedy, eager):
  params = toy.params(toy.script(greedy))
  request = _request(toy)
  kept = jax.tree.map(np.asarray, (params, request))
  init = decoder.init if eager else toy.programs(decoder).init
  state = init(params, **request)
  mine = set(_pointers((params, request)))
  fresh = _pointers(state)
  assert len(set(fresh)) == len(fresh) and not mine & set(fresh)
  while np.asarray(state.live).any():
    state, _ = donating(params, state)
  assert toy.texts(state) == [text[:16] for text in greedy]
  jax.tree.map(np.testing.assert_array_equal, kept, (params, request))


def test_no_array_stands_twice_in_an_empty_state(toy, decoder):
  params = toy.params(jnp.zeros((4, toy.max_len), jnp.int32))
  for empty in (decoder.empty, toy.programs(decoder).empty):
    leaves = jax.tree.leaves(empty(params, 4))
    assert len({id(x) for x in leaves}) == len(leaves)
    pointers = _pointers(leaves)
    assert len(set(pointers)) == len(pointers)


def test_round_survives_the_next_donated_step(toy, decoder, donating, greedy):
  params = toy.params(toy.script(greedy))
  state = toy.init(decoder, params)
  rounds, old = [], None
  for _ in range(4):
    old = state
    state, one = donating(params, state)
    assert old.tokens.is_deleted() and old.cache.pages[0].is_deleted()
    assert not set(_pointers(state)) & set(_pointers(one))
    rounds.append(one)
  for row, text in enumerate(greedy):
    emitted = [t for one in rounds for t in one.tokens[row].tolist() if t >= 0]
    assert emitted == text[1:16]
  assert rounds[0].candidates.tokens.shape == (4, 5)


def test_the_pool_is_written_in_place(donating):
  """No copy of the pool's shape, and the pool's input is its output."""
  text = donating.as_text()
  shape = "40,1,4,2"  # nothing else has it
  assert f"f32[{shape}]" in text
  copies = [
    line
    for line in text.splitlines()
    if re.search(rf"= f32\[{shape}\]\S* copy\(", line)
  ]
  assert not copies, copies
  header = text.splitlines()[0]
  inputs = re.search(r"entry_computation_layout=\{\((.*?)\)->", header)[1]
  inputs = re.findall(r"\w+\[[\d,]*\]", inputs)
  pool = inputs.index(f"f32[{shape}]")
  assert re.search(rf"input_output_alias=.*\({pool}, \{{\}}", header)


def test_nothing_recompiles(toy, decoder, greedy):
  programs = toy.programs(decoder)
  params = toy.params(toy.script(greedy))

  def serve(seed):
    rng = np.random.default_rng(seed)
    prompts = [
      rng.integers(0, toy.V, rng.integers(1, 10)).tolist() for _ in range(4)
    ]
    shift = int(rng.integers(0, 2))
    own = toy.params(toy.script(greedy, shift=shift), salt=seed)
    setting = sampling.make_sampling(
      4,
      temperature=[0.0, *rng.random(3).tolist()],
      top_k=rng.integers(0, 40, 4).tolist(),
      top_p=(1 - rng.random(4)).tolist(),
      seed=rng.integers(0, 2**40, 4).tolist(),
    )
    state = toy.init(
      decoder,
      own,
      prompts,
      sampling_=setting,
      max_new_tokens=rng.integers(0, 30, 4),
      stop_ids=rng.integers(0, toy.V, rng.integers(0, 4)).tolist(),
    )
    while np.asarray(state.live).any():
      state, _ = programs.step(own, state)
    row = jnp.asarray(rng.integers(0, 4), dtype=jnp.int32)
    state = programs.release(state, jnp.arange(4) == row)
    state = programs.admit(
      state,
      row,
      jnp.asarray(rng.integers(0, toy.V, 9), dtype=jnp.int32),
      jnp.asarray(rng.integers(1, 10), dtype=jnp.int32),
      jax.tree.map(lambda x: x[1], setting),
      jnp.asarray(rng.integers(1, 30), dtype=jnp.int32),
      jnp.asarray(decoding.stop_ids_row(())),
    )
    for _ in range(3):
      state, _ = programs.prefill(own, state, row[None], 4)
    state, _ = programs.step(own, state)
    return programs.preempt(state, jnp.arange(4) == row)

  serve(0)
  del params
  with testing.assert_no_recompile():
    for seed in range(20):
      serve(seed)


def test_decode_and_trace_are_steps(toy, decoder, greedy):
  """Under jit, while_loop and scan, or step by step from the host."""
  params = toy.params(toy.script(greedy))
  state = toy.init(decoder, params)
  want = [text[:16] for text in greedy]

  @functools.partial(jax.jit, static_argnums=0)
  def everything(decoder, params, state):
    ended = decoding.decode(decoder, params, state)
    traced, rounds = decoding.trace(decoder, params, state, 5)
    return ended, traced, rounds

  ended, traced, rounds = everything(decoder, params, state)
  stepped, singly = toy.trace(decoder, params, state, 5)
  assert toy.texts(ended) == want
  jax.tree.map(np.testing.assert_array_equal, ended, traced)
  jax.tree.map(np.testing.assert_array_equal, ended, stepped)
  jax.tree.map(np.testing.assert_array_equal, rounds, singly)
  assert rounds.tokens.shape == (5, 4, 5)
  assert rounds.count.sum(0).tolist() == [15] * 4


@pytest.mark.slow
def test_vmap_over_seeds(toy):
  decoder = toy.decoder(testing.random_tree_draft(12, 4, toy.V))
  params = toy.params()
  prompt = np.array([[5, 4, 3, 2, 1, 0, 0, 0, 0]], np.int32)
  settings = sampling.make_sampling(3, temperature=1.0, seed=[4, 5, 6])
  # A leading axis of three, each of one row.
  settings = jax.tree.map(lambda x: x[:, None], settings)

  def generate(setting):
    # The length is known while tracing, and so is checked.
    state = decoder.init(
      params, prompt, np.array([5]), sampling=setting, max_new_tokens=20
    )
    state = decoding.decode(decoder, params, state)
    return state.tokens[0], state.length[0]

  tokens, lengths = jax.jit(jax.vmap(generate))(settings)
  assert lengths.tolist() == [25] * 3
  batch = toy.init(
    toy.decoder(),
    params,
    [[5, 4, 3, 2, 1]] * 4,
    sampling_=sampling.make_sampling(4, temperature=1.0, seed=[4, 5, 6, 4]),
    max_new_tokens=20,
  )
  while np.asarray(batch.live).any():
    batch, _ = toy.programs(toy.decoder()).step(params, batch)
  texts = toy.texts(batch)
  assert [row[5:25] for row in tokens.tolist()] == texts[:3]
  assert len({tuple(text) for text in texts}) == 3
