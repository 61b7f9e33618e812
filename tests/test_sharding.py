"""A mesh of devices changes where things lie and nothing else."""

import functools
import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import PartitionSpec

import ldjax
from ldjax import _sharding, checkpoints, decoding, models, testing

# As in four_devices.py.
_CASES = (
  ("1x4", "medusa"),
  ("2x2", "ngram"),
  ("2x2", "medusa"),
  ("4x1", "ngram"),
)
_SIZES = {
  "vocab_size": 268,
  "hidden_size": 44,
  "intermediate_size": 52,
  "num_heads": 8,
  "num_kv_heads": 4,
  "head_dim": 6,
  "num_layers": 2,
}
_SMALLEST_MATRIX = 4 * 6 * 44  # keys


def _abstract(**sizes):
  return jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))


def _spec(path, shape, mesh, **changes):
  config = models.TransformerConfig(
    max_position_embeddings=64, **{**_SIZES, **changes}
  )
  return _sharding.param_spec(path.split("."), shape, config, mesh)


class TestCheckMesh:
  def test_explicit_axes_become_automatic(self):
    mesh = jax.make_mesh((1, 1), ("tensor", "data"))
    checked = _sharding.check_mesh(mesh)
    assert checked.axis_names == ("tensor", "data")
    assert checked.axis_types == (jax.sharding.AxisType.Auto,) * 2
    assert checked.devices.tolist() == mesh.devices.tolist()

  def test_one_axis_will_do(self):
    assert _sharding.check_mesh(jax.make_mesh((1,), ("tensor",))).size == 1

  def test_another_axis_is_refused(self):
    with pytest.raises(ValueError, match=r"axis 'model'.*'data'.*'tensor'"):
      _sharding.check_mesh(jax.make_mesh((1, 1), ("data", "model")))

  @pytest.mark.parametrize("mesh", [(1, 4), _abstract(tensor=2)])
  def test_what_is_no_mesh_is_refused(self, mesh):
    with pytest.raises(TypeError, match=r"mesh is a \w+; give a jax\.sharding"):
      _sharding.check_mesh(mesh)

  @pytest.mark.parametrize(("count", "axes"), [((), ()), ((0,), ("data",))])
  def test_a_mesh_of_nothing_is_refused(self, count, axes):
    devices = np.full(count, jax.devices()[0], object)
    with pytest.raises(ValueError, match="mesh has no devices or no axes"):
      _sharding.check_mesh(jax.sharding.Mesh(devices, axes))

  def test_nothing_is_read_for_a_bad_mesh(self):
    with pytest.raises(ValueError, match="axis 'x'"):
      ldjax.load("nowhere", mesh=jax.make_mesh((1,), ("x",)))


class TestParamSpec:
  @pytest.mark.parametrize(
    ("path", "shape", "want"),
    [
      ("layers.0.self_attn.q_proj.weight", (48, 44), ("tensor",)),
      ("layers.0.self_attn.q_proj.bias", (48,), ("tensor",)),
      ("layers.0.self_attn.k_proj.weight", (24, 44), ("tensor",)),
      ("layers.1.self_attn.v_proj.bias", (24,), ("tensor",)),
      ("layers.1.self_attn.o_proj.weight", (44, 48), (None, "tensor")),
      ("layers.1.self_attn.o_proj.bias", (44,), ()),
      ("layers.1.self_attn.q_norm.weight", (8,), ()),
      ("layers.0.mlp.gate_proj.weight", (52, 44), ("tensor",)),
      ("layers.0.mlp.up_proj.bias", (52,), ("tensor",)),
      ("layers.0.mlp.down_proj.weight", (44, 52), (None, "tensor")),
      ("layers.0.mlp.down_proj.bias", (44,), ()),
      ("layers.0.input_layernorm.weight", (44,), ()),
      ("embed_tokens.weight", (268, 44), ("tensor",)),
      ("lm_head.weight", (268, 44), ("tensor",)),
      ("norm.weight", (44,), ()),
      ("norm.bias", (44,), ()),
      ("layers.0.mlp_output_norm.weight", (44,), ()),
      ("embed_positions.weight", (64, 44), ()),
      ("heads.0.lm_head.weight", (268, 44), ("tensor",)),
      ("heads.0.blocks.0.weight", (44, 44), ()),
      ("weight", (44, 44), ()),
    ],
  )
  def test_layout(self, path, shape, want):
    for mesh in (_abstract(data=2, tensor=4), _abstract(tensor=4)):
      assert _spec(path, shape, mesh) == PartitionSpec(*want)
    for mesh in (_abstract(data=4), _abstract(data=4, tensor=1)):
      assert _spec(path, shape, mesh) == PartitionSpec()

  def test_heads_stay_whole(self):
    # 9 x 64 rows could be split in four, but not between heads.
    split = functools.partial(
      _spec, mesh=_abstract(tensor=4), num_heads=9, num_kv_heads=3, head_dim=64
    )
    assert split("self_attn.q_proj.weight", (576, 576)) == PartitionSpec()
    assert split("self_attn.k_proj.weight", (192, 576)) == PartitionSpec()
    assert split("self_attn.o_proj.weight", (576, 576)) == PartitionSpec()
    assert split("mlp.up_proj.weight", (1536, 576)) == PartitionSpec("tensor")
    assert split("lm_head.weight", (31, 576)) == PartitionSpec()

  def test_a_draft_with_other_heads_than_the_target(self):
    split = functools.partial(_spec, mesh=_abstract(tensor=4))
    layer = "layer.self_attn."
    assert split(f"{layer}q_proj.weight", (36, 88)) == PartitionSpec("tensor")
    # Neither 18 rows nor 18 columns make four equal parts.
    assert split(f"{layer}q_proj.weight", (18, 88)) == PartitionSpec()
    assert split(f"{layer}k_proj.bias", (18,)) == PartitionSpec()
    assert split(f"{layer}o_proj.weight", (44, 18)) == PartitionSpec()

  def test_every_matrix_of_a_model_is_split(self):
    config = models.TransformerConfig(max_position_embeddings=64, **_SIZES)
    mesh = _abstract(tensor=4)
    for path, leaf in jax.tree.leaves_with_path(models.abstract_params(config)):
      keys = [key.key for key in path]
      spec = _sharding.param_spec(keys, leaf.shape, config, mesh)
      assert bool(spec) == (leaf.ndim == 2), keys


class TestStateShardings:
  def _specs(self, batch, mesh, draft=None):
    tiny = testing.tiny_model()
    decoder = decoding.speculative(
      tiny.target,
      draft or decoding.ngram(2),
      tiny.init_cache,
      max_len=tiny.max_len,
    )
    params = decoding.DecoderParams(())
    state = jax.eval_shape(lambda: decoder.empty(params, batch))
    shardings = _sharding.state_shardings(state, mesh)
    assert jax.tree.structure(shardings) == jax.tree.structure(state)
    return jax.tree.map(lambda leaf: leaf.spec, shardings)

  def test_rows_over_data(self):
    specs = self._specs(6, _abstract(data=3, tensor=2))
    cache = specs.cache
    assert cache.pool.references == PartitionSpec()
    assert cache.pages == (PartitionSpec(),) * 2  # one key/value head
    rows = [
      leaf
      for path, leaf in jax.tree.leaves_with_path(specs)
      if "pages" not in str(path) and "pool" not in str(path)
    ]
    assert len(rows) > 15
    assert set(rows) == {PartitionSpec("data")}

  def test_rows_that_do_not_divide_are_repeated(self):
    specs = self._specs(5, _abstract(data=3, tensor=2))
    assert set(jax.tree.leaves(specs)) == {PartitionSpec()}

  def test_pages_over_key_value_heads(self):
    config = models.TransformerConfig(max_position_embeddings=64, **_SIZES)
    init_cache = ldjax.assemble.cache_factory(config, max_len=40)
    decoder = decoding.autoregressive(None, init_cache, max_len=40)
    params = decoding.DecoderParams(())
    state = jax.eval_shape(lambda: decoder.empty(params, 2))
    # A pool of as many pages as there are rows is no array of rows.
    pages = state.cache.pages[0]
    assert pages.shape[1] == 4
    for tensor, want in ((4, (None, "tensor")), (3, ())):
      shardings = _sharding.state_shardings(state, _abstract(tensor=tensor))
      assert shardings.cache.pages[1].spec == PartitionSpec(*want)


class TestOneDevice:
  @pytest.mark.slow
  def test_the_text_is_the_same(self, tiny, tiny_folder):
    mesh = jax.make_mesh((1, 1), ("data", "tensor"))
    model = ldjax.load(tiny_folder, mesh=mesh)
    want = ldjax.generate(tiny, "abab", max_new_tokens=6).tokens
    assert ldjax.generate(model, "abab", max_new_tokens=6).tokens == want

  def test_another_draft_keeps_the_mesh(self, tiny, tiny_folder, tiny_heads):
    mesh = jax.make_mesh((1,), ("data",))
    model = ldjax.load(tiny_folder, mesh=mesh)
    other = ldjax.with_draft(model, tiny_heads)
    assert other.mesh == model.mesh and other.mesh.axis_names == ("data",)
    assert tiny.mesh is None
    for leaf in jax.tree.leaves(other.params):
      assert leaf.sharding.mesh == model.mesh

  def test_same_arguments_give_the_same_functions(self, tiny_folder):
    def load():
      return ldjax.load(tiny_folder, mesh=jax.make_mesh((1,), ("data",)))

    assert load().decoder is load().decoder
    assert load().fallback is load().fallback


class TestLoading:
  @pytest.mark.parametrize("what", ["model", "heads"])
  def test_each_parameter_is_placed_from_the_host(
    self, tiny_folder, tiny_heads, what
  ):
    seen = {}

    def place(path, array):
      assert type(array) is np.ndarray
      seen[path] = array
      return array

    if what == "model":
      params = checkpoints.read(tiny_folder, place=place).params
      assert ("layers", 1, "self_attn", "o_proj", "weight") in seen
    else:
      _, params = checkpoints.read_medusa(tiny_heads, place=place)
      assert ("heads", 1, "blocks", 0, "weight") in seen
    leaves = jax.tree.leaves_with_path(params)
    assert len(leaves) == len(seen)
    for path, leaf in leaves:
      assert seen[tuple(key.key for key in path)] is leaf

  @pytest.mark.slow
  def test_a_gguf_file(self, demo_model):
    mesh = jax.make_mesh((1,), ("tensor",))
    model = ldjax.load(demo_model, mesh=mesh)
    for leaf in jax.tree.leaves(model.params):
      assert leaf.sharding.mesh == model.mesh


def _write_model(folder, tiny_folder):
  """A model of which everything divides by four, and heads for it."""
  config = models.TransformerConfig(max_position_embeddings=256, **_SIZES)
  rng = np.random.default_rng(0)
  tensors = {}
  for path, leaf in jax.tree.leaves_with_path(models.abstract_params(config)):
    name = ".".join(str(key.key) for key in path)
    name = name if name.startswith("lm_head") else f"model.{name}"
    value = rng.standard_normal(leaf.shape, np.float32)
    if leaf.ndim == 1:
      value = 1 + np.float32(0.1) * value
    elif "embed" not in name:
      value *= np.float32(1.5 * leaf.shape[1] ** -0.5)
    tensors[name] = value
  shutil.copytree(tiny_folder, folder)
  safetensors.numpy.save_file(tensors, folder / "model.safetensors")
  written = json.loads((folder / "config.json").read_text())
  for theirs, ours in (
    ("num_hidden_layers", "num_layers"),
    ("num_attention_heads", "num_heads"),
    ("num_key_value_heads", "num_kv_heads"),
  ):
    written[theirs] = _SIZES[ours]
  for name in ("vocab_size", "hidden_size", "intermediate_size", "head_dim"):
    written[name] = _SIZES[name]
  written["tie_word_embeddings"] = False
  (folder / "config.json").write_text(json.dumps(written))

  width = config.hidden_size
  heads = models.MedusaConfig(
    num_heads=2, num_layers=1, hidden_size=width, vocab_size=config.vocab_size
  )

  def head():
    weight = 0.01 * rng.standard_normal((width, width), np.float32)
    block = {"weight": weight, "bias": np.zeros(width, np.float32)}
    output = {"weight": tensors["lm_head.weight"]}
    return {"blocks": {0: block}, "lm_head": output}

  checkpoints.write_medusa(
    folder / "heads", heads, {"heads": {0: head(), 1: head()}}
  )


@pytest.fixture(scope="module")
def found(tiny_folder, tiny_heads, tmp_path_factory):
  """What `four_devices.py` found."""
  folder = tmp_path_factory.mktemp("sharding") / "model"
  _write_model(folder, tiny_folder)
  here = pathlib.Path(__file__).resolve().parent
  package = pathlib.Path(ldjax.__file__).resolve().parent.parent
  done = subprocess.run(
    [sys.executable, "-W", "error", str(here / "four_devices.py")]
    + [str(path) for path in (folder, folder / "heads")]
    + [str(path) for path in (tiny_folder, tiny_heads)],
    capture_output=True,
    text=True,
    env={**os.environ, "PYTHONPATH": str(package)},
    timeout=900,
  )
  assert done.returncode == 0, done.stderr
  result = json.loads(done.stdout)
  assert result["devices"] == 4
  return result


@pytest.mark.slow
class TestFourDevices:
  @pytest.mark.parametrize(("mesh", "draft"), _CASES)
  def test_the_text_is_the_same(self, found, mesh, draft):
    texts = found["texts"]
    assert texts[f"{mesh} {draft}"] == texts["one"]

  @pytest.mark.parametrize(("mesh", "draft"), _CASES)
  def test_nothing_compiles_again(self, found, mesh, draft):
    texts = found["texts"]
    assert found["layout"][f"{mesh} {draft}"]["compiled"] == 0
    assert texts[f"{mesh} {draft}, changed"] == texts["one, changed"]
    assert texts["one, changed"] != texts["one"]

  def test_rows_that_no_axis_divides(self, found):
    texts = found["texts"]
    assert texts["three rows"] == texts["one"]
    assert texts["one row"] == texts["one"][0]

  def test_rows_that_are_preempted(self, found):
    assert found["preempted"]
    assert found["texts"]["scarce"] == found["texts"]["one"]

  def test_heads_that_no_axis_divides(self, found):
    assert found["texts"]["odd"] == found["texts"]["odd, one"]
    assert found["odd q"] == [1, 4]

  def test_a_loop_in_one_program(self, found):
    assert found["texts"]["loop"] == found["texts"]["loop, one"]

  @pytest.mark.parametrize(("mesh", "draft"), _CASES)
  def test_where_things_lie(self, found, mesh, draft):
    layout = found["layout"][f"{mesh} {draft}"]
    data, tensor = map(int, mesh.split("x"))
    for name in ("q", "o", "down", "lm_head", "pages"):
      assert layout[name] == [tensor, 4], name
    for name in ("norm", "references", "emitted"):
      assert layout[name] == [1, 4], name
    assert layout["tokens"] == [data, 4]

  @pytest.mark.parametrize(("mesh", "draft"), _CASES)
  def test_a_donated_state_stays_in_its_place(self, found, mesh, draft):
    layout = found["layout"][f"{mesh} {draft}"]
    assert layout["kept"]
    assert layout["deleted"]
    assert not layout["moved"]
    assert layout["pool_copies"] == 0

  @pytest.mark.parametrize(("mesh", "draft"), _CASES)
  def test_what_is_communicated(self, found, mesh, draft):
    layout = found["layout"][f"{mesh} {draft}"]
    data, tensor = map(int, mesh.split("x"))
    # No weight is put together. XLA has no top-k of parts: the logits of four
    # rows are gathered for it, of one head after the other or of both.
    large = {size for size in layout["gathered"] if size >= _SMALLEST_MATRIX}
    logits = 4 * 2 * _SIZES["vocab_size"]
    allowed = {
      logits // heads // rows for heads in (1, 2) for rows in (1, data)
    }
    assert large <= (allowed if draft == "medusa" else set())
    # Two sums a layer, and what the parts of the embedding found.
    nodes = 4 if draft == "ngram" else 7
    block = 4 // data * nodes * _SIZES["hidden_size"]
    want = 2 * _SIZES["num_layers"] + 1 if tensor > 1 else 0
    assert layout["summed"].count(block) == want
