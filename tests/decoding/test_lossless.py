"""Law 1 as equality: the draft, the batch and the pages change no token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ldjax import decoding, models, sampling, testing

NEW = 26
PROMPTS = (
  (1, 2, 3, 1, 2, 3, 1, 2),
  (7, 7, 7),
  (30, 0, 12, 5, 9),
  (4,),
)
SETTINGS = (
  {},
  {"temperature": 0.7, "top_p": 0.9, "seed": [3, 4, 5, 6]},
  {"temperature": 1.0, "top_k": 5, "seed": [3, 4, 5, 6]},
  # Each row its own: all of it is data.
  {
    "temperature": [0.0, 1.5, 0.4, 1.0],
    "top_k": [0, 2, 31, 99],
    "top_p": [1.0, 0.95, 0.3, 1.0],
    "seed": [2**40, 3, 3, 9],
  },
  # What depends on the text so far, at each node on the node's own path.
  {
    "temperature": [0.0, 1.0, 0.7, 0.0],
    "repetition_penalty": [1.5, None, 1.2, 0.8],
    "frequency_penalty": [None, 0.7, 0.1, 0.2],
    "presence_penalty": [0.3, None, -0.4, 1.0],
    "banned_ids": [[], [3, 4, 5], [0], [7, 30]],
    "min_p": [0.0, 0.05, 0.2, 0.5],
    "seed": [1, 2, 3, 4],
  },
)
IDS = ("greedy", "T=0.7 p=0.9", "T=1 k=5", "mixed", "penalties")


@pytest.fixture(scope="module")
def tiny():
  return testing.tiny_model(max_len=36)


def _medusa(tiny):
  """Random heads over a part of the vocabulary: right now and then."""
  return models.functionalize_draft(
    models.MedusaHeads(
      models.MedusaConfig(
        num_heads=3,
        num_layers=1,
        hidden_size=tiny.config.hidden_size,
        vocab_size=23,
        target_vocab_size=tiny.config.vocab_size,
      ),
      rngs=nnx.Rngs(1),
    )
  )


def _small_model(tiny):
  """Another random model: its cache holds what was accepted of each row."""
  small = testing.tiny_model(max_len=tiny.max_len, seed=1, page_size=5)
  heads = decoding.model_heads(
    small.target, small.init_cache, depth=3, vocab_size=31
  )
  return heads, small.params


def _make(name, tiny):
  if name == "root only":
    return decoding.root_only(), ()
  if name == "n-gram":
    return decoding.ngram(4), ()
  if name == "Medusa":
    heads, params = _medusa(tiny)
    tree = decoding.TokenTree.product([5, 2, 1])
    return decoding.static_tree(heads, tree), params
  if name == "dynamic tree":
    heads, params = _small_model(tiny)
    guess = decoding.NgramGuess(
      depth=4, max_match=3, acceptance=(0.1, 0.4, 0.7)
    )
    return decoding.dynamic_tree(heads, 12, width=5, ngram=guess), params
  return testing.random_tree_draft(13, 4, tiny.config.vocab_size), ()


def _decode(
  toy, tiny, draft, draft_params, setting, rows=range(4), init_cache=None
):
  """Texts of PROMPTS[rows], in the order of `rows`."""

  def pick(value):
    return [value[row] for row in rows] if isinstance(value, list) else value

  decoder = decoding.speculative(
    tiny.target, draft, init_cache or tiny.init_cache, max_len=tiny.max_len
  )
  return toy.run(
    decoder,
    decoding.DecoderParams(tiny.params, draft_params),
    [PROMPTS[row] for row in rows],
    sampling_=sampling.make_sampling(
      len(rows), **{k: pick(v) for k, v in setting.items()}
    ),
    max_new_tokens=NEW,
  )


_plain = {}


def _oracle(toy, tiny, index):
  """Plain texts in one batch of four, on dense rows."""
  if index not in _plain:
    dense = testing.tiny_model(max_len=tiny.max_len, page_size=None)
    _plain[index] = _decode(
      toy,
      tiny,
      decoding.root_only(),
      (),
      SETTINGS[index],
      init_cache=dense.init_cache,
    )[0]
  return _plain[index]


DRAFTS = ("n-gram", "Medusa", "dynamic tree", "random tree")


@pytest.mark.parametrize(
  "name",
  [
    "n-gram",
    pytest.param("random tree", marks=pytest.mark.slow),
    pytest.param("Medusa", marks=pytest.mark.slow),
    pytest.param("dynamic tree", marks=pytest.mark.slow),
  ],
)
def test_ragged_batch_in_any_order(toy, tiny, name):
  draft, draft_params = _make(name, tiny)
  rounds = emitted = 0
  for index, setting in enumerate(SETTINGS):
    want = _oracle(toy, tiny, index)
    for rows in ((0, 1, 2, 3), (3, 1, 0, 2), (2, 2, 0, 2)):
      texts, state = _decode(toy, tiny, draft, draft_params, setting, rows)
      assert texts == [want[row] for row in rows], (IDS[index], rows)
      rounds += int(state.rounds.sum())
      emitted += int(state.emitted.sum())
  assert emitted == len(SETTINGS) * 3 * 4 * NEW
  assert rounds < emitted  # it was speculation


def test_the_texts_are_of_different_kinds(toy, tiny):
  # Otherwise the equalities above would say little. A greedy row and one of
  # top-p 0.3 are all but greedy; the other fourteen differ.
  texts = [
    tuple(text) for i in range(len(SETTINGS)) for text in _oracle(toy, tiny, i)
  ]
  assert len(set(texts)) >= 14
  assert {len(text) for text in texts} == {NEW}


@pytest.mark.slow
def test_alone(toy, tiny):
  """Rows of the batch, each in a batch of its own."""
  draft, draft_params = _make("n-gram", tiny)
  for index, setting in enumerate(SETTINGS):
    texts, _ = _decode(toy, tiny, draft, draft_params, setting, rows=(0,))
    assert texts == _oracle(toy, tiny, index)[:1]


@pytest.mark.slow
@pytest.mark.parametrize(
  ("page_size", "name"),
  [
    (2, "root only"),
    (2, "dynamic tree"),
    (5, "n-gram"),
    (5, "random tree"),
    (64, "Medusa"),
    (None, "dynamic tree"),
  ],
)
def test_page_sizes(toy, tiny, name, page_size):
  other = testing.tiny_model(max_len=tiny.max_len, page_size=page_size)
  draft, draft_params = _make(name, tiny)
  for index, setting in enumerate(SETTINGS):
    texts, _ = _decode(
      toy, tiny, draft, draft_params, setting, init_cache=other.init_cache
    )
    assert texts == _oracle(toy, tiny, index)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["root only", *DRAFTS])
def test_every_prompt_alone(toy, tiny, name):
  draft, draft_params = _make(name, tiny)
  for index, setting in enumerate(SETTINGS):
    for row in range(4):
      texts, _ = _decode(toy, tiny, draft, draft_params, setting, rows=(row,))
      assert texts == [_oracle(toy, tiny, index)[row]]


@pytest.mark.slow
@pytest.mark.parametrize(
  ("cache_dtype", "name"),
  [
    ("bfloat16", "random tree"),
    ("float16", "n-gram"),
    ("int8", "random tree"),
    ("int8", "Medusa"),
    ("float8_e4m3fn", "n-gram"),
  ],
)
def test_narrow_cache(toy, cache_dtype, name):
  # Block keys pass through the cache's dtype, so law 1 holds there as well:
  # any draft, rows in any order, pages of any size or none.
  tiny = testing.tiny_model(max_len=36, cache_dtype=cache_dtype)
  draft, draft_params = _make(name, tiny)
  dense = testing.tiny_model(
    max_len=36, cache_dtype=cache_dtype, page_size=None
  )
  for setting in SETTINGS:
    want, _ = _decode(
      toy,
      tiny,
      decoding.root_only(),
      (),
      setting,
      init_cache=dense.init_cache,
    )
    for rows in ((0, 1, 2, 3), (2, 2, 0, 3)):
      got, _ = _decode(toy, tiny, draft, draft_params, setting, rows)
      assert got == [want[row] for row in rows]


def test_an_int8_cache_is_lossless_within_itself(toy):
  int8 = testing.tiny_model(max_len=36, cache_dtype="int8")
  plain, state = _decode(toy, int8, decoding.root_only(), (), SETTINGS[2])
  assert all(layer.dtype == jnp.int8 for layer in state.cache.pages)
  draft = testing.random_tree_draft(13, 4, 31)
  assert _decode(toy, int8, draft, (), SETTINGS[2])[0] == plain


@pytest.mark.slow
def test_many_prompts():
  tiny = testing.tiny_model(max_len=36, seed=1)
  rng = np.random.default_rng(1)
  for draft in (decoding.ngram(4), testing.random_tree_draft(13, 4, 31)):
    for trial in range(20):
      prompts = [
        rng.integers(0, 31, n).tolist() for n in (8, *rng.integers(1, 9, 3))
      ]
      testing.assert_lossless(
        tiny.target,
        tiny.params,
        draft,
        (),
        tiny.init_cache,
        prompts,
        max_len=36,
        max_new_tokens=NEW,
        sampling=sampling.make_sampling(
          4, temperature=[0.0, 0.7, 1.0, 1.0], top_p=[1, 0.9, 1, 1], seed=trial
        ),
      )


_OF_THE_TARGET = {"target_size": 24, "vocab_size": 23, "target_vocab_size": 31}
FAMILIES = {
  "Hydra": models.HydraConfig(
    num_heads=3, num_layers=1, hidden_size=7, **_OF_THE_TARGET
  ),
  "recurrent": models.RecurrentConfig(
    depth=3,
    num_layers=1,
    hidden_size=7,
    intermediate_size=5,
    **_OF_THE_TARGET,
  ),
  "EAGLE": models.EagleConfig(
    depth=3,
    hidden_size=24,
    intermediate_size=13,
    num_heads=2,
    num_kv_heads=1,
    head_dim=6,
    vocab_size=31,
    shared_output=True,
  ),
  "published EAGLE": models.EagleConfig(
    depth=3,
    hidden_size=24,
    intermediate_size=13,
    num_heads=2,
    num_kv_heads=1,
    head_dim=6,
    vocab_size=31,
    shared_output=True,
    normed=False,
    fc_bias=True,
  ),
  "EAGLE-3": models.Eagle3Config(
    depth=3,
    hidden_size=24,
    intermediate_size=13,
    num_heads=2,
    num_kv_heads=1,
    head_dim=6,
    vocab_size=23,
    target_vocab_size=31,
  ),
  "published Hydra": models.HydraMlpConfig(
    num_heads=3, num_layers=2, hidden_size=24, vocab_size=31
  ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_trees_on_every_family(tiny, name):
  config = FAMILIES[name]
  if name == "EAGLE-3":
    tiny = testing.tiny_model(max_len=36, feature_layers=(0, 1, 1))
  heads, _ = models.functionalize_draft(config, max_len=tiny.max_len)
  params = models.borrow(
    config,
    models.init_draft(
      config,
      jax.random.key(0),
      token_ids=None if config.target_vocab_size is None else np.arange(4, 27),
    ),
    tiny.params,
  )
  guess = decoding.NgramGuess(depth=4, max_match=2, acceptance=(0.2, 0.5))
  for draft in (
    decoding.static_tree(heads, decoding.TokenTree.product([3, 2, 2])),
    decoding.dynamic_tree(heads, 11, width=3, ngram=guess),
  ):
    for setting in SETTINGS[:2]:
      mean_accepted = testing.assert_lossless(
        tiny.target,
        tiny.params,
        draft,
        params,
        tiny.init_cache,
        PROMPTS,
        max_len=tiny.max_len,
        max_new_tokens=NEW,
        sampling=sampling.make_sampling(4, **setting),
      )
      assert mean_accepted > 1


def _script(tiny, texts, shift=0):
  script = np.zeros((len(texts), tiny.max_len), np.int32)
  for row, text in enumerate(texts):
    whole = np.array([*PROMPTS[row], *text])
    script[row, : len(whole)] = (whole + shift) % tiny.config.vocab_size
  return jnp.asarray(script)


@pytest.mark.slow
def test_script_of_the_target_and_of_its_opposite(toy, tiny):
  depth = 4
  for index in range(len(SETTINGS)):
    want = _oracle(toy, tiny, index)
    for shift in (0, 1):
      texts, state = _decode(
        toy,
        tiny,
        testing.scripted_draft(depth),
        _script(tiny, want, shift),
        SETTINGS[index],
      )
      assert texts == want
      # One token from prefill, then depth + 1 a round, or 1.
      per_round = 1 if shift else depth + 1
      rounds = 1 + -(-(NEW - 1) // per_round)
      assert state.rounds.tolist() == [rounds] * 4
