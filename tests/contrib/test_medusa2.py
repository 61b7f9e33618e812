"""The Medusa-2 mode: the text of plain decoding, the rounds of its tree."""

import dataclasses
import itertools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import ldjax
from ldjax import bench, checkpoints, contrib, decoding, models, sampling

_TREE = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0)]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_text_and_rounds(tiny, tiny_heads, temperature):
  # The heads' guesses at a node do not hang on how they are computed.
  ours = ldjax.with_draft(tiny, str(tiny_heads), tree=_TREE)
  theirs = contrib.as_medusa2(tiny, tiny_heads, tree=_TREE)
  plain = ldjax.with_draft(tiny, "none")
  settings = {"max_new_tokens": 40, "temperature": temperature, "seed": 5}
  for prompt in ("hello", "one two one two one"):
    want = ldjax.generate(plain, prompt, **settings)
    one = ldjax.generate(ours, prompt, **settings)
    two = ldjax.generate(theirs, prompt, **settings)
    assert one.tokens == two.tokens == want.tokens
    assert one.rounds == two.rounds
    assert set(two.round_sizes[1:]) == {len(_TREE) + 1}


@pytest.mark.slow
def test_every_sequence_takes_the_whole_length(tiny, tiny_heads):
  theirs = contrib.as_medusa2(tiny, tiny_heads)
  result = ldjax.generate(theirs, "hello", max_new_tokens=3)
  pages = -(-theirs.max_len // theirs.page_size)
  page = tiny.init_cache(1).page_bytes
  assert result.peak_cache_bytes == pages * page
  back = ldjax.with_draft(theirs, "none")
  less = ldjax.generate(back, "hello", max_new_tokens=3)
  assert less.peak_cache_bytes == page
  assert less.tokens == result.tokens


def test_the_tree_is_the_one_that_the_reference_picks(tiny, tiny_heads):
  for name, tree in (
    ("lmsys/vicuna-13b-v1.5", "vicuna_13b_stage2"),
    ("HuggingFaceH4/zephyr-7b-beta", "zephyr_stage2"),
    ("somebody/else-7b", "mc_sim_7b_63"),
  ):
    named = dataclasses.replace(tiny, name=name)
    model = contrib.as_medusa2(named, tiny_heads)
    assert model.draft.size == decoding.TokenTree.medusa(tree).cut(2).size
    assert len(model.ladder) == 1


def test_what_is_refused(tiny, tiny_heads, tmp_path):
  with pytest.raises(ValueError, match="acceptance is 'greedy'; known are"):
    contrib.as_medusa2(tiny, tiny_heads, acceptance="greedy")
  with pytest.raises(FileNotFoundError, match="nowhere"):
    contrib.as_medusa2(tiny, tmp_path / "nowhere")
  config = models.HydraConfig(
    num_heads=2, num_layers=0, target_size=24, hidden_size=6, vocab_size=262
  )
  checkpoints.write_draft(
    tmp_path,
    config,
    models.init_draft(config, jax.random.key(0)),
    target=checkpoints.DraftTarget("x", 24, 262, tiny.config.num_layers),
  )
  with pytest.raises(ValueError, match=r"of kind .hydra..* wants Medusa heads"):
    contrib.as_medusa2(tiny, tmp_path)
  with pytest.raises(ValueError, match="no Medusa heads come with ldjax"):
    bench.make_methods(tiny, ["medusa2"])


def test_as_a_way_to_load(tiny_folder, tiny_heads, monkeypatch):
  model = ldjax.load(tiny_folder, compat="medusa2", draft=tiny_heads)
  assert model.preallocates
  assert model.draft_name == f"medusa2 ({tiny_heads})"
  tree = decoding.TokenTree.medusa("mc_sim_7b_63").cut(2)
  assert [rung.draft.size for rung in model.ladder] == [tree.size]
  chain = ldjax.load(
    tiny_folder, compat="medusa2", draft=tiny_heads, tree="chain:1"
  )
  assert chain.draft.size == 2
  monkeypatch.setattr(checkpoints, "read", None)  # no weights are read
  for options, message in (
    ({"compat": "medusa1"}, "compat is 'medusa1'; known are 'medusa2'"),
    ({"draft": "ngram"}, "with Medusa heads, but draft is 'ngram'"),
    ({"draft": None}, "with Medusa heads, but draft is None"),
    ({"draft": tiny_folder}, "holds no heads"),
    ({"draft": "auto"}, "no Medusa heads come with ldjax for"),
    ({"mesh": jax.make_mesh((1,), ("data",))}, "leave out mesh"),
  ):
    with pytest.raises(ValueError, match=message):
      ldjax.load(tiny_folder, **{"compat": "medusa2", **options})
  with pytest.raises(FileNotFoundError, match="nowhere"):
    ldjax.load(tiny_folder, compat="medusa2", draft="nowhere")


def test_as_a_method_of_the_benchmark(tiny, tiny_heads):
  made = bench.make_methods(tiny, ["autoregressive", f"medusa2:{tiny_heads}"])
  assert list(made) == ["autoregressive", "medusa2"]


# Typical acceptance, by trying all paths.


def _softmax(x):
  x = np.exp(x - x.max())
  return x / x.sum()


def _typical(logits, tokens, parents, temperature, threshold, alpha):
  """The tokens that a row emits, and the path."""
  logits = logits.astype(np.float64)

  def probability(node, token):
    p = _softmax(logits[node] / temperature)
    entropy = -(p * np.log(p)).sum()
    return p[token], min(threshold, alpha * np.exp(-entropy))

  best = (0, 0.0, [0])
  for node in range(len(tokens)):
    path = [node]
    while parents[path[0]] >= 0:
      path.insert(0, parents[path[0]])
    if path[0] != 0:
      continue
    total, good = 0.0, True
    for above, at in itertools.pairwise(path):
      p, least = probability(above, tokens[at])
      good &= tokens[at] >= 0 and p > least
      total += np.log(p)
    if good and (len(path) - 1, total) > best[:2]:
      best = (len(path) - 1, total, path)
  path = best[2]
  return [*(tokens[i] for i in path[1:]), int(logits[path[-1]].argmax())], path


@pytest.mark.parametrize("spread", [0.3, 1.5, 4.0])
def test_typical_acceptance(spread):
  rng = np.random.default_rng(int(spread * 10))
  batch, size, vocab, depth = 12, 9, 7, 3
  parents = np.array([-1, 0, 0, 0, 1, 1, 2, 4, 6])
  logits = rng.normal(size=(batch, size, vocab)).astype(np.float32) * spread
  tokens = rng.integers(vocab, size=(batch, size))
  tokens[:, 0] = -1
  tokens[rng.random((batch, size)) < 0.1] = -1
  temperature = rng.uniform(0.5, 1.5, batch).astype(np.float32)
  walk = contrib.typical_accept(
    decoding.Scores(jnp.asarray(logits)),
    decoding.Candidates(
      jnp.asarray(tokens, jnp.int32),
      jnp.broadcast_to(jnp.asarray(parents, jnp.int32)[None], tokens.shape),
    ),
    sampling.make_sampling(batch, temperature=temperature.tolist()),
    sampling.History(
      jnp.zeros((batch, 20), jnp.int32),
      jnp.ones(batch, jnp.int32),
      jnp.ones(batch, jnp.int32),
    ),
    depth=depth,
    stop_ids=jnp.full((batch, 1), -1, jnp.int32),
    remaining=jnp.full((batch,), 10, jnp.int32),
    threshold=0.2,
    alpha=0.5,
  )
  longest = 0
  for row in range(batch):
    want, path = _typical(
      logits[row], tokens[row], parents, float(temperature[row]), 0.2, 0.5
    )
    count = int(walk.count[row])
    assert walk.tokens[row, :count].tolist() == want
    assert walk.path[row, :count].tolist() == path
    assert not walk.stopped[row]
    longest = max(longest, count)
  assert longest > 1


def test_typical_acceptance_ends():
  # A chain that is right all along: 1, 2, 3.
  logits = jnp.eye(5)[None, jnp.array([1, 2, 3, 4])] * 20
  logits = jnp.repeat(logits, 4, axis=0)
  candidates = decoding.Candidates(
    jnp.tile(jnp.array([[-1, 1, 2, 3]]), (4, 1)),
    jnp.tile(jnp.array([[-1, 0, 1, 2]]), (4, 1)),
  )
  walk = contrib.typical_accept(
    decoding.Scores(logits),
    candidates,
    sampling.make_sampling(4, temperature=[1.0, 1.0, 1.0, 0.0]),
    sampling.History(
      jnp.zeros((4, 9), jnp.int32),
      jnp.ones(4, jnp.int32),
      jnp.ones(4, jnp.int32),
    ),
    depth=3,
    stop_ids=jnp.array([[-1], [2], [-1], [3]]),
    remaining=jnp.array([9, 9, 0, 9]),
  )
  assert walk.tokens[:2].tolist() == [[1, 2, 3, 4], [1, 2, -1, -1]]
  assert walk.count.tolist() == [4, 2, 0, 3]
  assert walk.stopped.tolist() == [False, True, False, True]
  assert walk.finite.tolist() == [True] * 4


@pytest.mark.slow
def test_a_folder_of_both(tiny_folder, tiny_heads, tmp_path):
  folder = tmp_path / "vicuna-7b-v1.3"
  shutil.copytree(tiny_folder, folder)
  weights = safetensors.numpy.load_file(folder / "model.safetensors")
  heads = safetensors.numpy.load_file(tiny_heads / "medusa_lm_head.safetensors")
  weights.update({f"medusa_head.{name}": x for name, x in heads.items()})
  safetensors.numpy.save_file(weights, folder / "model.safetensors")
  model = ldjax.load(folder)
  tree = decoding.TokenTree.medusa("vicuna_7b_stage2").cut(2)
  assert [rung.draft.size for rung in model.ladder] == [1, tree.size]
  one = ldjax.generate(model, "hello", max_new_tokens=20)
  plain = ldjax.with_draft(model, "none")
  want = ldjax.generate(plain, "hello", max_new_tokens=20)
  assert one.tokens == want.tokens
  theirs = contrib.as_medusa2(plain, folder)
  for each in (theirs, ldjax.load(folder, compat="medusa2")):
    assert each.draft.size == tree.size
    two = ldjax.generate(each, "hello", max_new_tokens=20)
    assert two.tokens == want.tokens
    assert two.mean_accepted > 1
