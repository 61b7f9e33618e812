"""From files to a decoder: what load accepts, refuses and shares."""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import ldjax
from ldjax import assemble, checkpoints, decoding, models

TokenTree = decoding.TokenTree


@pytest.fixture
def weights_untouched(monkeypatch):
  """Fails a test that comes to the point of reading the target's weights."""

  def read(*_, **__):
    raise AssertionError("the weights are read before the error is found")

  monkeypatch.setattr(checkpoints, "read", read)


@pytest.fixture
def write_heads(tmp_path):
  """Writes random Medusa heads with other sizes than the tiny model's."""

  def write(**changes):
    config = models.MedusaConfig(
      **{
        "num_heads": 2,
        "num_layers": 1,
        "hidden_size": 24,
        "vocab_size": 262,
        "shared_output": False,
        **changes,
      }
    )
    rng = np.random.default_rng(3)
    width, vocab = config.hidden_size, config.vocab_size

    def head():
      weight = rng.standard_normal((width, width), np.float32)
      blocks = {0: {"weight": weight, "bias": np.zeros(width, np.float32)}}
      if config.shared_output:
        return {"blocks": blocks}
      output = rng.standard_normal((vocab, width), np.float32)
      return {"blocks": blocks, "lm_head": {"weight": output}}

    folder = tmp_path / "heads"
    heads = {i: head() for i in range(config.num_heads)}
    checkpoints.write_medusa(folder, config, {"heads": heads})
    return folder, heads

  return write


@pytest.fixture
def change_folder(tiny_folder, tmp_path):
  """Copies the tiny model with changes of its config.json."""

  def change(**changes):
    folder = tmp_path / "changed"
    shutil.copytree(tiny_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder

  return change


class TestParseTree:
  @pytest.mark.parametrize(
    ("tree", "paths"),
    [
      ("root", []),
      ("chain:0", []),
      ("chain:2", [(0,), (0, 0)]),
      ("1", []),
      ("1,2", [(0,), (1,)]),
      (" 1, 1 ,2 ", [(0,), (0, 0), (0, 1)]),
      ([1, 2], [(0,), (1,)]),
      ((1, 1, 1), [(0,), (0, 0)]),
      ([(0,), (2,), (0, 1)], [(0,), (2,), (0, 1)]),
      ([[0, 1], [0]], [(0,), (0, 1)]),
      (TokenTree.chain(1), [(0,)]),
    ],
  )
  def test_forms(self, tree, paths):
    assert assemble.parse_tree(tree).paths == tuple(map(tuple, paths))

  def test_published(self):
    tree = assemble.parse_tree("mc_sim_7b_63")
    assert (tree.size, tree.depth) == (64, 4)

  @pytest.mark.parametrize(
    "tree", ["", "chain:", "chain:-1", "chain:x", "mc_sim", "1,x", "Root", "²"]
  )
  def test_what_is_not_understood_is_shown_with_what_would_do(self, tree):
    with pytest.raises(ValueError, match="not understood") as caught:
      assemble.parse_tree(tree)
    assert repr(tree) in str(caught.value)
    assert "chain:N" in str(caught.value)
    assert "mc_sim_7b_63" in str(caught.value)

  @pytest.mark.parametrize("tree", ["2,3", [2, 3], [], [(0, 1)], "1,0"])
  def test_trees_that_cannot_be(self, tree):
    with pytest.raises(ValueError):
      assemble.parse_tree(tree)


class TestLoad:
  def test_defaults(self, tiny, tiny_folder):
    assert tiny.name == tiny_folder.name
    assert tiny.draft_name == "ngram"
    assert (tiny.draft.size, tiny.draft.depth) == (4, 3)
    assert tiny.max_len == 256
    assert tiny.page_size == 16
    # Three of the longest sequences at first; as many as memory has, later.
    assert tiny.initial_pages == 3 * 16 < tiny.num_pages
    assert tiny.on_pressure == "preempt"
    leaves = jax.tree.leaves(tiny.params.target)
    wanted = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    assert {str(leaf.dtype) for leaf in leaves} == {wanted}
    cache = jax.eval_shape(functools.partial(tiny.init_cache, 3))
    assert cache.block_table.shape == (3, 16)
    assert cache.pool.num_pages == 48
    assert cache.pages[0].dtype == leaves[0].dtype

  def test_every_eos_of_every_file(self, tiny):
    # config.json says 259, generation_config.json [260, 259], the tokenizer's
    # eos_token is 258.
    assert tiny.eos_token_ids == (258, 259, 260)

  def test_a_folder_without_the_optional_files(self, tiny_folder, tmp_path):
    folder = tmp_path / "bare"
    shutil.copytree(tiny_folder, folder)
    (folder / "generation_config.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    model = ldjax.load(folder)
    assert model.eos_token_ids == (259,)
    assert not model.tokenizer.has_chat_template

  def test_max_len_is_2048_for_a_model_of_more(self, change_folder):
    assert ldjax.load(change_folder(max_position_embeddings=4096)).max_len == (
      2048
    )

  def test_sizes_and_dtypes_that_are_asked_for(self, tiny_folder):
    model = ldjax.load(
      tiny_folder,
      draft=None,
      max_len=50,
      dtype=jnp.bfloat16,
      cache_dtype="float16",
      page_size=8,
      num_pages=9,
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(model.params.target)} == {
      jnp.dtype(jnp.bfloat16)
    }
    cache = jax.eval_shape(functools.partial(model.init_cache, 2))
    assert [page.shape for page in cache.pages] == [(9, 1, 8, 16)] * 2
    assert cache.pages[0].dtype == jnp.float16
    assert cache.block_table.shape == (2, 7)
    assert (model.draft_name, model.draft.size) == ("none", 1)
    assert (model.max_len, model.page_size, model.num_pages) == (50, 8, 9)

  @pytest.mark.parametrize("cache_dtype", ["int8", jnp.float8_e4m3fn])
  def test_a_cache_in_eight_bits(self, tiny_folder, cache_dtype):
    model = ldjax.load(tiny_folder, cache_dtype=cache_dtype, max_len=50)
    cache = jax.eval_shape(functools.partial(model.init_cache, 2))
    assert cache.pages[0].dtype == cache_dtype
    assert cache.pages[0].scales.shape == (8, 1, 16, 2)
    text = ldjax.generate(model, "abc", max_new_tokens=4, chat=False)
    assert len(text.tokens) > 0

  def test_progress_is_lines_of_text(self, tiny_folder):
    lines = []
    ldjax.load(tiny_folder, progress=lines.append)
    assert lines
    assert all(isinstance(line, str) and line for line in lines)

  @pytest.mark.parametrize("path", ["", "no-such-model", "./nowhere/at-all"])
  def test_no_such_model(self, weights_untouched, path):
    with pytest.raises(FileNotFoundError, match="no file or folder"):
      ldjax.load(path)

  @pytest.mark.parametrize(
    ("settings", "message"),
    [
      ({"max_len": 1}, "max_len is 1; this model can have 2 to 256"),
      ({"max_len": 0}, "max_len is 0;"),
      ({"max_len": -5}, "max_len is -5;"),
      ({"max_len": 257}, "max_len is 257; this model can have 2 to 256"),
      ({"page_size": 1}, "page_size is 1; it must be at least 2"),
      ({"num_pages": 0}, "num_pages is 0"),
      ({"cache_dtype": "int4"}, "dtype is int4; .* int8, float8_e4m3fn"),
      ({"cache_dtype": "q8"}, "dtype is q8; .* one of float32, bfloat16"),
      ({"tree": "1,2,2"}, "proposes a chain, not a tree of 7 nodes and depth"),
      ({"tree": [(0,), (1,)]}, "proposes a chain, not a tree of 3 nodes"),
      ({"tree": "nonsense"}, "'nonsense' is not understood"),
      ({"draft": "none", "tree": "chain:2"}, "'none' takes no tree"),
      ({"draft": None, "tree": "1,2"}, "'none' takes no tree"),
    ],
  )
  def test_settings_out_of_range(
    self, weights_untouched, tiny_folder, settings, message
  ):
    with pytest.raises(ValueError, match=message):
      ldjax.load(tiny_folder, **settings)

  @pytest.mark.parametrize("kind", ["missing", "file", "empty"])
  def test_no_such_draft(self, weights_untouched, tiny_folder, tmp_path, kind):
    draft = tmp_path / kind
    if kind == "file":
      draft.write_text("no heads")
    elif kind == "empty":
      draft.mkdir()
    with pytest.raises(FileNotFoundError, match=str(draft)):
      ldjax.load(tiny_folder, draft=draft)

  @pytest.mark.parametrize(
    ("sizes", "message"),
    [
      ({"hidden_size": 20}, "hidden_size is 20, the target's is 24"),
      ({"vocab_size": 31}, "vocab_size is 31, the target's is 262"),
      (
        {"hidden_size": 20, "shared_output": True},
        "hidden_size is 20, the target's is 24",
      ),
    ],
  )
  def test_heads_of_another_model(
    self, weights_untouched, tiny_folder, write_heads, sizes, message
  ):
    folder, _ = write_heads(**sizes)
    with pytest.raises(ValueError, match=message):
      ldjax.load(tiny_folder, draft=folder)

  def test_tree_deeper_than_the_heads(
    self, weights_untouched, tiny_folder, tiny_heads
  ):
    with pytest.raises(
      ValueError, match="4 deep but the draft guesses 2 tokens"
    ):
      ldjax.load(tiny_folder, draft=tiny_heads, tree="mc_sim_7b_63")

  def test_tree_wider_than_the_vocabulary(
    self, weights_untouched, tiny_folder, tiny_heads
  ):
    with pytest.raises(ValueError, match=r"ranks 300 tokens .* knows 262"):
      ldjax.load(tiny_folder, draft=tiny_heads, tree="1,300")

  def test_ngram_trees(self, tiny):
    assert ldjax.with_draft(tiny, "ngram", "chain:5").draft.depth == 5
    for tree in ("root", "chain:0"):
      assert ldjax.with_draft(tiny, "ngram", tree).draft.size == 1

  def test_draft_none_with_a_tree_of_the_root_alone(self, tiny):
    assert ldjax.with_draft(tiny, "none", "root").draft.size == 1


class TestMedusa:
  def test_own_output(self, tiny, write_heads):
    folder, heads = write_heads()
    model = ldjax.with_draft(tiny, folder)
    assert model.draft_name == str(folder)
    assert (model.draft.size, model.draft.depth) == (3, 2)  # chain of 2 heads
    assert set(model.params.draft) == {"heads"}
    for i, head in heads.items():
      have = model.params.draft["heads"][i]
      np.testing.assert_array_equal(
        have["lm_head"]["weight"], head["lm_head"]["weight"]
      )
      np.testing.assert_array_equal(
        have["blocks"][0]["weight"], head["blocks"][0]["weight"]
      )

  def test_shared_output_is_the_tied_embedding_itself(
    self, tiny_folder, tiny_heads
  ):
    model = ldjax.load(tiny_folder, draft=tiny_heads, tree="1,2,2")
    assert (model.draft.size, model.draft.depth) == (7, 2)
    assert (
      model.params.draft["output"]["weight"]
      is model.params.target["embed_tokens"]["weight"]
    )

  def test_shared_output_is_the_output_matrix_of_an_untied_target(
    self, change_folder, tiny_heads
  ):
    folder = change_folder(tie_word_embeddings=False)
    file = folder / "model.safetensors"
    weights = safetensors.numpy.load_file(file)
    weights["lm_head.weight"] = -weights["model.embed_tokens.weight"]
    safetensors.numpy.save_file(weights, file)
    model = ldjax.load(folder, draft=tiny_heads)
    assert (
      model.params.draft["output"]["weight"]
      is model.params.target["lm_head"]["weight"]
    )

  def test_heads_take_the_dtype_of_the_target(self, tiny_folder, tiny_heads):
    model = ldjax.load(tiny_folder, draft=tiny_heads, dtype="bfloat16")
    again = ldjax.with_draft(
      ldjax.load(tiny_folder, dtype="bfloat16"), tiny_heads
    )
    for params in (model.params.draft, again.params.draft):
      assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {
        "bfloat16"
      }


class TestWithDraft:
  def test_weights_are_shared(self, tiny, tiny_heads):
    for draft in ("none", None, "ngram", tiny_heads):
      other = ldjax.with_draft(tiny, draft)
      for one, two in zip(
        jax.tree.leaves(tiny.params.target),
        jax.tree.leaves(other.params.target),
        strict=True,
      ):
        assert one is two
      assert other.target is tiny.target
      assert other.init_cache is tiny.init_cache
      assert other.tokenizer is tiny.tokenizer

  def test_names(self, tiny, tiny_heads):
    assert ldjax.with_draft(tiny, None).draft_name == "none"
    assert ldjax.with_draft(tiny, "none").draft_name == "none"
    assert ldjax.with_draft(tiny, tiny_heads).draft_name == str(tiny_heads)

  def test_errors_are_those_of_load(self, tiny, write_heads):
    with pytest.raises(FileNotFoundError, match="neither 'none' nor 'ngram'"):
      ldjax.with_draft(tiny, "nowhere")
    with pytest.raises(ValueError, match="'none' takes no tree"):
      ldjax.with_draft(tiny, "none", "chain:1")
    folder, _ = write_heads(hidden_size=20)
    with pytest.raises(ValueError, match="made for another model"):
      ldjax.with_draft(tiny, folder)


class TestMemoisation:
  """What is equal is the same function, so it is not compiled again."""

  def test_loaded_again(self, tiny, tiny_folder):
    again = ldjax.load(tiny_folder)
    assert again is not tiny
    assert again.decoder is tiny.decoder
    assert again.fallback is tiny.fallback
    assert again.init_cache is tiny.init_cache

  def test_other_drafts(self, tiny, tiny_plain, tiny_heads, tiny_folder):
    assert ldjax.with_draft(tiny, "ngram").decoder is tiny.decoder
    assert ldjax.with_draft(tiny, "ngram", "chain:3").decoder is tiny.decoder
    assert ldjax.with_draft(tiny, None).decoder is tiny_plain.decoder
    one = ldjax.with_draft(tiny, tiny_heads, "1,2")
    two = ldjax.load(tiny_folder, draft=str(tiny_heads), tree=[(1,), (0,)])
    assert one.decoder is two.decoder

  def test_other_sizes_are_others(self, tiny, tiny_folder):
    assert ldjax.load(tiny_folder, max_len=64).decoder is not tiny.decoder
    assert ldjax.load(tiny_folder, page_size=8).decoder is not tiny.decoder

  def test_fallback_runs_on_the_same_state(self, tiny, tiny_medusa):
    for model in (tiny, tiny_medusa):
      shapes = [
        jax.eval_shape(functools.partial(each.empty, batch=2), model.params)
        for each in (model.decoder, model.fallback)
      ]
      assert shapes[0] == shapes[1]
      assert jax.tree.structure(shapes[0]) == jax.tree.structure(shapes[1])


class TestFeatureLayers:
  """The target shows an EAGLE-3 draft the layers that it asks for."""

  @pytest.fixture
  def six_layers(self, tiny_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("deep") / "six"
    shutil.copytree(tiny_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = 6
    (folder / "config.json").write_text(json.dumps(config))
    file = folder / "model.safetensors"
    weights = safetensors.numpy.load_file(file)
    for name, array in list(weights.items()):
      for layer in range(2, 6):
        copy = name.replace("layers.1.", f"layers.{layer}.")
        weights[copy] = array if copy == name else array / layer
    safetensors.numpy.save_file(weights, file)
    return folder

  @pytest.fixture
  def write_eagle3(self, tmp_path_factory):
    config = models.Eagle3Config(
      depth=2,
      hidden_size=24,
      intermediate_size=10,
      num_heads=2,
      num_kv_heads=1,
      head_dim=6,
      vocab_size=262,
    )

    def write(num_layers):
      folder = tmp_path_factory.mktemp("eagle3")
      checkpoints.write_draft(
        folder,
        config,
        models.init_draft(config, jax.random.key(0)),
        target=checkpoints.DraftTarget("six", 24, 262, num_layers),
      )
      return folder

    return write

  def test_there_and_back(self, six_layers, write_eagle3):
    folder = write_eagle3(6)
    plain = ldjax.load(six_layers, draft="none")
    model = ldjax.load(six_layers, draft=folder)
    assert (plain.feature_layers, model.feature_layers) == ((), (2, 3, 3))
    assert model.target is not plain.target
    for draft in ("none", "ngram"):
      back = ldjax.with_draft(model, draft)
      assert (back.feature_layers, back.target) == ((), plain.target)
    assert ldjax.with_draft(model, "none").decoder is plain.decoder
    again = ldjax.with_draft(plain, folder)
    assert again.target is model.target
    assert again.decoder is model.decoder
    assert again.fallback is model.fallback

  @pytest.mark.slow
  def test_the_text_is_the_same(self, six_layers, write_eagle3):
    plain = ldjax.load(six_layers, draft="none", dtype="float32")
    model = ldjax.with_draft(plain, write_eagle3(6), "1,2")
    want = ldjax.generate(plain, "hello", max_new_tokens=12)
    have = ldjax.generate(model, "hello", max_new_tokens=12)
    assert have.tokens == want.tokens

  def test_too_few_layers(self, tiny_folder, write_eagle3, weights_untouched):
    with pytest.raises(ValueError, match="has 2 layers and 5 are needed"):
      ldjax.load(tiny_folder, draft=write_eagle3(2))


def test_a_draft_of_your_own(tiny, tiny_plain):
  def propose(params, state, context):
    batch = context.length.shape[0]
    tokens = jnp.broadcast_to(params[None], (batch, 3))
    parents = jnp.broadcast_to(jnp.array([[-1, 0, 0]]), (batch, 3))
    return decoding.Candidates(tokens, parents), state

  draft = decoding.DraftFn(
    init=lambda params, batch: (),
    propose=propose,
    observe=lambda params, state, observation: state,
    release=lambda state, mask: state,
    size=3,
    depth=1,
  )
  want = ldjax.generate(tiny_plain, "hello", max_new_tokens=12)
  model = ldjax.with_draft(
    tiny, draft, draft_params=jnp.array([-1, want.tokens[3], want.tokens[5]])
  )
  assert model.draft_name == "custom"
  have = ldjax.generate(model, "hello", max_new_tokens=12)
  assert have.tokens == want.tokens
  assert have.mean_accepted > 1
  with pytest.raises(ValueError, match="a tree of its own"):
    ldjax.with_draft(tiny, draft, "chain:3")


def test_no_more_positions_than_were_learned(tiny):
  # A gather past the table's end would give its last row in silence.
  config = dataclasses.replace(tiny.config, learned_positions=True)
  assert assemble.cache_factory(config, max_len=256)
  with pytest.raises(ValueError, match=r"max_len is 257, .* learned 256"):
    assemble.cache_factory(config, max_len=257)
  assert assemble.cache_factory(tiny.config, max_len=257)
