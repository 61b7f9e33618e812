"""Checkpoints to other formats and back, bit by bit; nothing half-written."""

import dataclasses
import gc
import json
import pathlib
import shutil
import weakref

import jax
import numpy as np
import pytest
import safetensors.numpy

import ldjax
from ldjax import checkpoints, models, testing, text
from ldjax.checkpoints import _convert, _orbax


def _same(one, two):
  assert jax.tree.structure(one) == jax.tree.structure(two)
  for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(
      np.asarray(x).reshape(-1).view(np.uint8),
      np.asarray(y).reshape(-1).view(np.uint8),
    )


def _files(folder):
  return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def source(tiny_folder, tmp_path):
  return pathlib.Path(shutil.copytree(tiny_folder, tmp_path / "source"))


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_round_trip(source, tmp_path, dtype):
  first = ldjax.convert(source, tmp_path / "orbax", dtype=dtype)
  assert (first.holds, first.layout) == ("model", "orbax")
  second = ldjax.convert(tmp_path / "orbax", tmp_path / "hf", to="hf")
  assert second.layout == "safetensors"
  want = checkpoints.read(source, dtype=dtype)
  for folder in ("orbax", "hf"):
    have = checkpoints.read(tmp_path / folder)
    assert have.config == want.config
    assert have.eos_token_ids == want.eos_token_ids
    _same(have.params, want.params)
  weights = safetensors.numpy.load_file(source / "model.safetensors")
  back = safetensors.numpy.load_file(tmp_path / "hf" / "model.safetensors")
  assert set(back) == set(weights)
  if dtype is None:
    _same(back, weights)
  one = text.load_tokenizer(source)
  two = text.load_tokenizer(tmp_path / "hf")
  assert one.encode("hello") == two.encode("hello")


def _config(kind, **changes):
  return {
    "model_type": kind,
    "vocab_size": 31,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "sliding_window": None,
    "tie_word_embeddings": False,
    **changes,
  }


@pytest.mark.parametrize(
  "config",
  [
    _config("llama", attention_bias=True, mlp_bias=True),
    _config("mistral", sliding_window=9, tie_word_embeddings=True),
    _config("qwen2"),
    _config("qwen3", tie_word_embeddings=True),
    _config("smollm3"),
  ],
  ids=lambda config: config["model_type"],
)
def test_there_and_back(tmp_path, config):
  """Hugging Face -> Orbax -> Hugging Face; the others are in checkpoints/."""
  source = tmp_path / "source"
  source.mkdir()
  (source / "config.json").write_text(json.dumps(config))
  shape = checkpoints.read_config(source)
  rng = np.random.default_rng(0)
  # The names are those of the parameters.
  weights = {}
  for path, like in jax.tree_util.tree_leaves_with_path(
    models.abstract_params(shape)
  ):
    name = ".".join(str(part.key) for part in path)
    name = name if name.startswith("lm_head") else f"model.{name}"
    weights[name] = rng.standard_normal(like.shape, np.float32)
  safetensors.numpy.save_file(weights, source / "model.safetensors")
  checkpoints.convert(source, tmp_path / "orbax")
  checkpoints.convert(tmp_path / "orbax", tmp_path / "hf", to="hf")
  back = safetensors.numpy.load_file(tmp_path / "hf" / "model.safetensors")
  assert set(back) == set(weights)
  _same(back, weights)
  assert json.loads((tmp_path / "hf" / "config.json").read_text()) == config


@pytest.mark.slow
def test_text_of_a_converted_model(source, tmp_path):
  ldjax.convert(source, tmp_path / "orbax")
  prompt, settings = "hello", {"max_new_tokens": 12}
  one = ldjax.generate(ldjax.load(source, draft="none"), prompt, **settings)
  model = ldjax.load(tmp_path / "orbax", draft="none")
  assert ldjax.generate(model, prompt, **settings).tokens == one.tokens
  mesh = jax.make_mesh((1, 1), ("data", "tensor"))
  spread = ldjax.load(tmp_path / "orbax", draft="none", mesh=mesh)
  assert ldjax.generate(spread, prompt, **settings).tokens == one.tokens


_QUESTION = [{"role": "user", "content": "Why is the sky blue?"}]


@pytest.fixture(scope="module")
def demo(demo_model):
  """The demo model without a draft, and its answer to `_QUESTION`."""
  model = ldjax.load(demo_model, draft="none", max_len=128)
  return model, ldjax.generate(model, _QUESTION, max_new_tokens=32)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["orbax", "hf"])
def test_the_demo_model(demo_model, demo, tmp_path, to):
  found = ldjax.convert(demo_model, tmp_path / "there", to=to)
  assert found.config == checkpoints.read_config(demo_model)
  one, want = demo
  two = ldjax.load(tmp_path / "there", draft="none", max_len=128)
  _same(two.params.target, one.params.target)
  assert two.eos_token_ids == one.eos_token_ids
  have = ldjax.generate(two, _QUESTION, max_new_tokens=32)
  assert (have.text, have.tokens) == (want.text, want.tokens)
  assert len(want.tokens) == 32


@pytest.mark.slow
@pytest.mark.parametrize("to", ["medusa", "vllm"])
def test_the_medusa_heads_of_the_demo_model(demo, tmp_path, to):
  """Those that ldjax ships, with an output that the layout can hold."""
  drafts = pathlib.Path(ldjax.__file__).parent / "data" / "drafts"
  shipped = drafts / "smollm2-135m-instruct-medusa"
  for layout in ("medusa", "vllm"):
    with pytest.raises(ValueError, match="write_draft"):
      ldjax.convert(shipped, tmp_path / "x", to=layout)
  model, plain = demo
  file = checkpoints.read_draft(shipped, target_config=model.config)
  params = models.borrow(file.config, file.params, model.params.target)
  changes = {"shared_output": False, "single_output": True}
  if to == "medusa":  # the whole of the target's vocabulary
    changes = {"vocab_size": model.config.vocab_size, "target_vocab_size": None}
    params = {"heads": params["heads"]}
  config = dataclasses.replace(file.config, **changes)
  made_for = checkpoints.DraftTarget(
    "demo", model.config.hidden_size, model.config.vocab_size, 30
  )
  checkpoints.write_draft(tmp_path / "ours", config, params, target=made_for)
  ldjax.convert(tmp_path / "ours", tmp_path / to, to=to)
  rounds = []
  for folder in (tmp_path / "ours", tmp_path / to):
    model = ldjax.with_draft(model, folder, "1,3,2")
    have = ldjax.generate(model, _QUESTION, max_new_tokens=32)
    assert (have.text, have.tokens) == (plain.text, plain.tokens)
    rounds.append(have.rounds)
  assert rounds[0] == rounds[1] < 32


@pytest.mark.parametrize("to", ["medusa", "vllm"])
def test_heads(tmp_path, to):
  config = models.MedusaConfig(
    num_heads=2, num_layers=1, hidden_size=6, vocab_size=9
  )
  params = models.init_draft(config, jax.random.key(1))
  checkpoints.write_medusa(tmp_path / "a", config, params)
  found = ldjax.convert(tmp_path / "a", tmp_path / "b", to=to)
  assert (found.holds, found.draft) == ("draft", "medusa")
  again, same = checkpoints.read_medusa(tmp_path / "b")
  assert again == config
  _same(same, params)
  back = "vllm" if to == "medusa" else "medusa"
  ldjax.convert(tmp_path / "b", tmp_path / "c", to=back)
  _same(checkpoints.read_medusa(tmp_path / "c")[1], params)


def test_trained_heads_go_to_vllm(tmp_path):
  config = models.MedusaConfig(
    num_heads=2,
    num_layers=1,
    hidden_size=24,
    vocab_size=3,
    single_output=True,
    target_vocab_size=31,
  )
  params = models.init_draft(
    config, jax.random.key(1), token_ids=np.array([4, 30, 7])
  )
  checkpoints.write_draft(
    tmp_path / "a",
    config,
    params,
    target=checkpoints.DraftTarget("tiny", 24, 31, 2),
  )
  ldjax.convert(tmp_path / "a", tmp_path / "b", to="vllm")
  again, same = checkpoints.read_medusa(tmp_path / "b")
  assert again == config
  _same(same, params)
  with pytest.raises(ValueError, match="target_vocab_size is 31"):
    ldjax.convert(tmp_path / "a", tmp_path / "c", to="medusa")
  assert _files(tmp_path) == ["a", "b"]


def test_what_is_there_stays(source, tmp_path):
  target = tmp_path / "there"
  target.mkdir()
  (target / "mine.txt").write_text("mine")
  with pytest.raises(FileExistsError, match="--force"):
    ldjax.convert(source, target)
  assert _files(target) == ["mine.txt"]
  ldjax.convert(source, target, force=True)
  assert "mine.txt" not in _files(target)
  with pytest.raises(ValueError, match="holds the source itself"):
    ldjax.convert(source, source, force=True)
  with pytest.raises(ValueError, match="holds the source itself"):
    ldjax.convert(source, tmp_path, force=True)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("disk full")])
@pytest.mark.parametrize("to", ["orbax", "hf"])
def test_interrupted(source, tmp_path, monkeypatch, error, to):
  count = 0
  honest = _convert._digest

  def stop(array):
    nonlocal count
    count += 1
    if count == 9:
      raise error
    return honest(array)

  monkeypatch.setattr(_convert, "_digest", stop)
  with pytest.raises((KeyboardInterrupt, OSError)):
    ldjax.convert(source, tmp_path / "there", to=to)
  assert _files(tmp_path) == ["source"]


@pytest.mark.parametrize("to", ["orbax", "hf"])
def test_what_reads_back_otherwise_is_told(source, tmp_path, monkeypatch, to):
  honest = _convert._Digests.note

  def lie(self, parameters):
    for path, array in honest(self, parameters):
      yield path, array + 1 if path[0] == "norm" else array

  monkeypatch.setattr(_convert._Digests, "note", lie)
  with pytest.raises(OSError, match=r"norm\.weight reads back otherwise"):
    ldjax.convert(source, tmp_path / "there", to=to)
  assert _files(tmp_path) == ["source"]


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("to", ["orbax", "hf"])
def test_values_that_are_not_finite(source, tmp_path, to, value):
  file = source / "model.safetensors"
  weights = safetensors.numpy.load_file(file)
  name = "model.layers.1.mlp.up_proj.weight"
  weights[name] = weights[name].copy()
  weights[name][2, 3:6] = value
  safetensors.numpy.save_file(weights, file)
  message = f"model.safetensors: tensor '{name}' holds 3 values that are not"
  with pytest.warns(UserWarning, match=message):
    ldjax.load(source, draft="none")
  # Once, though it is read back; and it is kept as it is.
  with pytest.warns(UserWarning) as caught:
    ldjax.convert(source, tmp_path / "there", to=to)
  assert len(caught) == 1
  assert message in str(caught[0].message)
  with pytest.warns(UserWarning, match=r"layers\.1\.mlp\.up_proj\.weight"):
    checkpoints.read(tmp_path / "there")
  checkpoints.inspect(source)  # reads no weights


def test_refused(source, tmp_path):
  with pytest.raises(ValueError, match="to is 'onnx'; known are orbax, hf"):
    ldjax.convert(source, tmp_path / "x", to="onnx")
  with pytest.raises(ValueError, match="holds no heads"):
    ldjax.convert(source, tmp_path / "x", to="vllm")
  with pytest.raises(ValueError, match="holds no draft, which to='ldjax'"):
    ldjax.convert(source, tmp_path / "x", to="ldjax")
  (source / "model.safetensors").unlink()
  with pytest.raises(FileNotFoundError, match="a configuration and no weights"):
    ldjax.convert(source, tmp_path / "x")
  config = models.MedusaConfig(
    num_heads=1, num_layers=0, hidden_size=6, vocab_size=9
  )
  params = models.init_draft(config, jax.random.key(1))
  checkpoints.write_medusa(tmp_path / "heads", config, params)
  with pytest.raises(ValueError, match=r"holds a draft \(medusa\)"):
    ldjax.convert(tmp_path / "heads", tmp_path / "x")
  assert _files(tmp_path) == ["heads", "source"]


def test_damaged_orbax(source, tmp_path):
  target = tmp_path / "there"
  ldjax.convert(source, target)
  shutil.rmtree(target / "orbax" / "layers.1")
  with pytest.raises(ValueError, match=r"layers\.1: missing"):
    checkpoints.read(target)
  says = json.loads((target / "ldjax-model.json").read_text())
  for key, value in (("format", "x"), ("version", 9), ("dtype", "int8")):
    (target / "ldjax-model.json").write_text(json.dumps({**says, key: value}))
    with pytest.raises(ValueError, match=rf"ldjax-model.json: {key} is"):
      checkpoints.read(target)


def test_each_layer_is_restored_once_and_let_go(source, tmp_path, monkeypatch):
  ldjax.convert(source, tmp_path / "there")
  restored, alive = [], []
  honest = _orbax._restore

  def restore(folder, names):
    tree = honest(folder, names)
    restored.append(folder.name)
    alive.extend(weakref.ref(array) for array in tree.values())
    return tree

  monkeypatch.setattr(_orbax, "_restore", restore)
  checkpoint = checkpoints.read(tmp_path / "there", dtype="bfloat16")
  gc.collect()
  groups = {path.name for path in (tmp_path / "there" / "orbax").iterdir()}
  assert sorted(restored) == sorted(groups)
  assert alive and not any(array() is not None for array in alive)
  assert checkpoint.config.num_layers > 1


class TestInspect:
  def test_a_model(self, source):
    found = checkpoints.inspect(source)
    assert (found.holds, found.layout, found.draft) == (
      "model",
      "safetensors",
      "",
    )
    weights = safetensors.numpy.load_file(source / "model.safetensors")
    assert found.parameters == sum(x.size for x in weights.values())
    assert found.tensors == {"float32": len(weights)}
    assert found.rows()["parameters"] == f"{found.parameters:,}"

  def test_a_configuration_alone(self, source):
    (source / "model.safetensors").unlink()
    found = checkpoints.inspect(source)
    assert (found.layout, found.tensors, found.size) == ("config", {}, 0)
    assert found.parameters > 0

  def test_a_draft_of_ours(self, tmp_path):
    folder = pathlib.Path(ldjax.__file__).parent / "data" / "drafts"
    found = checkpoints.inspect(folder / "smollm2-135m-instruct")
    assert (found.holds, found.layout, found.draft) == (
      "draft",
      "ldjax",
      "recurrent",
    )
    assert checkpoints.inspect(folder / "smollm2-135m-instruct-medusa").draft

  def test_nothing(self, tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file"):
      checkpoints.inspect(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match="no weights that are known"):
      checkpoints.inspect(tmp_path)

  @pytest.mark.slow
  def test_every_published_configuration(self, shared_data):
    for folder in sorted((shared_data / "configs").iterdir()):
      try:
        found = checkpoints.inspect(folder)
      except ValueError as error:
        assert str(folder) in str(error)
      else:
        assert found.layout == "config"


@pytest.mark.slow
def test_flipped_bytes(tmp_path):
  """A damaged file is refused or is still the same; never a crash."""
  testing.write_tiny_model(tmp_path)
  want = checkpoints.read(tmp_path)
  rng = np.random.default_rng(0)
  for name, reach in (("model.safetensors", 2000), ("config.json", 10_000)):
    file = tmp_path / name
    whole = file.read_bytes()
    for _ in range(500):
      data = bytearray(whole)
      data[rng.integers(min(reach, len(data)))] ^= 1 << rng.integers(8)
      file.write_bytes(bytes(data))
      try:
        have = checkpoints.read(tmp_path)
      except (ValueError, FileNotFoundError):
        continue
      shapes = jax.tree.map(np.shape, have.params)
      assert shapes == jax.tree.map(np.shape, want.params)
    file.write_bytes(whole)
