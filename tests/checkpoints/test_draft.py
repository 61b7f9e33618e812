"""Drafts on disk: written, read back, and refused when something is wrong."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from ldjax import checkpoints, models, testing
from ldjax.checkpoints import _write

W, V, E = 11, 31, 24
_TARGET = checkpoints.DraftTarget("tiny", E, V, 2)
_IDS = np.array([30, 0, 7, 3, 29, 11, 5, 2, 17, 13, 19])
_TRIMMED = {"vocab_size": W, "target_vocab_size": V}
_RECURRENT = models.RecurrentConfig(
  depth=2,
  num_layers=1,
  target_size=E,
  hidden_size=7,
  intermediate_size=5,
  **_TRIMMED,
)
_CONFIGS = [
  models.MedusaConfig(num_heads=2, num_layers=1, hidden_size=E, **_TRIMMED),
  models.HydraConfig(
    num_heads=2, num_layers=1, target_size=E, hidden_size=7, vocab_size=V
  ),
  dataclasses.replace(_RECURRENT, output_rank=3),
  models.EagleConfig(
    depth=2,
    hidden_size=E,
    intermediate_size=40,
    num_heads=3,
    num_kv_heads=1,
    head_dim=8,
    shared_output=True,
    rope_theta=500.0,
    **_TRIMMED,
  ),
  models.Eagle3Config(
    depth=2,
    hidden_size=E,
    intermediate_size=40,
    num_heads=3,
    num_kv_heads=1,
    head_dim=8,
    norm_before_residual=True,
    rope_scaling=models.RopeScaling(
      factor=8.0,
      low_freq_factor=1.0,
      high_freq_factor=4.0,
      original_max_position_embeddings=32,
    ),
    **_TRIMMED,
  ),
  models.HydraMlpConfig(num_heads=2, num_layers=2, hidden_size=E, vocab_size=V),
]


def _random(config, seed=0):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda like: (
      jnp.asarray(_IDS, jnp.int32)
      if like.dtype == jnp.int32
      else jnp.asarray(rng.normal(size=like.shape), jnp.float32)
    ),
    models.abstract_draft(config),
  )


@pytest.fixture(scope="module")
def target():
  return testing.tiny_model(vocab_size=V)


@pytest.fixture
def read(target):
  def read(folder, **options):
    return checkpoints.read_draft(
      folder, target_config=target.config, **options
    )

  return read


@pytest.fixture
def folder(tmp_path):
  """A recurrent draft over a trimmed vocabulary."""
  checkpoints.write_draft(
    tmp_path,
    _RECURRENT,
    _random(_RECURRENT),
    target=_TARGET,
    calibration={"acceptance": [[0.5, 0.25]]},
  )
  return tmp_path


def _rewrite(folder, change):
  """Changes the tensors of a draft by a function of their dict."""
  file = folder / "draft.safetensors"
  tensors = safetensors.numpy.load_file(file)
  change(tensors)
  safetensors.numpy.save_file(tensors, file)


def _says(folder, **changes):
  """Changes config.json; a key with a dot lies one deeper."""
  file = folder / "config.json"
  raw = json.loads(file.read_text())
  for key, value in changes.items():
    outer, _, inner = key.partition("__")
    where = raw[outer] if inner else raw
    if value == "absent":
      del where[inner or outer]
    else:
      where[inner or outer] = value
  file.write_text(json.dumps(raw))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("config", _CONFIGS, ids=[x.kind for x in _CONFIGS])
def test_write_then_read(tmp_path, target, read, config, dtype):
  own = _random(config)
  # What is borrowed is not stored.
  params = models.borrow(config, own, target.params)
  calibration = {"acceptance": [[0.5, 0.25]], "note": "ü"}
  checkpoints.write_draft(
    tmp_path / "new",
    config,
    params,
    target=_TARGET,
    calibration=calibration,
    dtype=dtype,
  )
  file = read(tmp_path / "new")
  assert (file.config, file.target) == (config, "tiny")
  assert file.calibration == calibration
  assert jax.tree.structure(file.params) == jax.tree.structure(own)

  def compare(got, want):
    wide = want if want.dtype == jnp.int32 else want.astype(dtype)
    assert got.dtype == wide.dtype
    np.testing.assert_array_equal(got, wide)

  jax.tree.map(compare, file.params, own)
  wide = read(tmp_path / "new", dtype="float32")
  for leaf in jax.tree.leaves(wide.params):
    assert leaf.dtype in (jnp.float32, jnp.int32)
  fn, shapes = models.functionalize_draft(file.config, dtype, max_len=8)
  ready = models.borrow(config, file.params, target.params)
  assert jax.tree.structure(ready) == jax.tree.structure(shapes)
  _, logits = fn.begin(ready, fn.init(ready, 1), jnp.zeros((1,), jnp.int32))
  assert logits.shape == (1, 1, config.vocab_size)
  names = sorted(path.name for path in (tmp_path / "new").iterdir())
  assert names == ["config.json", "draft.safetensors"]


def test_each_parameter_goes_where_it_belongs(folder, read):
  placed = {}

  def place(path, array):
    placed[path] = array
    return jnp.asarray(array)

  params = read(folder, place=place).params
  assert ("blocks", 0, "norm", "weight") in placed
  assert ("token_ids",) in placed
  assert len(placed) == len(jax.tree.leaves(params))


def test_an_empty_calibration(tmp_path, read):
  checkpoints.write_draft(
    tmp_path, _RECURRENT, _random(_RECURRENT), target=_TARGET
  )
  assert read(tmp_path).calibration == {}


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"hidden_size": 576}, "'tiny' with hidden_size 24, vocab_size 31.*576"),
    ({"vocab_size": 32}, "this target has hidden_size 24, vocab_size 32"),
    ({"num_layers": 3}, "num_layers 2; .* num_layers 3. Train a draft"),
  ],
)
def test_a_draft_of_another_model(folder, target, change, message):
  config = dataclasses.replace(target.config, **change)
  with pytest.raises(ValueError, match=f"made for .*{message}"):
    checkpoints.read_draft(folder, target_config=config)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"format": "other"}, "format is 'other'; this ldjax reads 'ldjax-draft'"),
    ({"version": 2}, "version is 2; this ldjax reads 1"),
    ({"version": "absent"}, "version is None"),
    (
      {"kind": "oracle"},
      "kind is 'oracle'; known are eagle, eagle3, hydra, hydra-mlp, me",
    ),
    ({"kind": ["medusa"]}, "kind is .*known are"),
    ({"kind": "hydra"}, "sizes holds depth, which this version"),
    ({"color": 1}, "holds color, which this version does not know"),
    ({"sizes": []}, r"sizes is \[\]; an object"),
    ({"sizes__depth": "absent"}, "sizes lacks depth"),
    ({"sizes__depth": "3"}, "depth is '3'; int is wanted"),
    ({"sizes__depth": True}, "depth is True; int is wanted"),
    ({"sizes__depth": 0}, "depth is 0; it must be at least 1"),
    ({"sizes__shared_output": 1}, "shared_output is 1; bool is wanted"),
    ({"sizes__rms_norm_eps": None}, "rms_norm_eps is None; float is wanted"),
    ({"sizes__target_vocab_size": 30}, "a vocab_size of 30, but .*is 31"),
    ({"sizes__target_size": 23}, "a hidden_size of 23, but .*is 24"),
    ({"target": "absent"}, "it lacks target"),
    ({"target__num_layers": "absent"}, "target lacks num_layers"),
    ({"target__num_layers": 2.0}, "num_layers is 2.0; int is wanted"),
    ({"target__name": 5}, "name is 5; str is wanted"),
    ({"calibration": None}, "calibration is None; an object"),
    ({"calibration": "absent"}, "it lacks calibration"),
  ],
)
def test_a_config_that_is_wrong(folder, read, changes, message):
  _says(folder, **changes)
  with pytest.raises(ValueError, match=rf"config\.json: .*{message}"):
    read(folder)


def test_fields_with_a_default_may_be_left_out(folder, read):
  absent = dict.fromkeys(("output_rank", "shared_output", "rms_norm_eps"))
  _says(folder, **{f"sizes__{key}": "absent" for key in absent})
  assert read(folder).config == _RECURRENT


@pytest.mark.parametrize(
  ("value", "message"),
  [
    ({"factor": 8.0}, "rope_scaling lacks low_freq_factor"),
    ({"factor": 8.0, "more": 1}, "rope_scaling holds more, which"),
    ([8.0], r"rope_scaling is \[8.0\]"),
    (8.0, r"rope_scaling is 8\.0; .*RopeScaling"),
  ],
)
def test_a_stretch_that_is_wrong(tmp_path, read, value, message):
  config = next(x for x in _CONFIGS if x.kind == "eagle3")
  checkpoints.write_draft(tmp_path, config, _random(config), target=_TARGET)
  _says(tmp_path, sizes__rope_scaling=value)
  with pytest.raises(ValueError, match=rf"config\.json: .*{message}"):
    read(tmp_path)


def test_whole_numbers_are_floats_too(folder, read):
  _says(folder, sizes__rms_norm_eps=1)
  assert read(folder).config.rms_norm_eps == 1.0


@pytest.mark.parametrize("size", [0, 1, 57, -2])
def test_files_that_are_cut_off(folder, read, size):
  for name, message in (
    ("draft.safetensors", "truncated or damaged"),
    ("config.json", "not readable as JSON"),
  ):
    file = folder / name
    whole = file.read_bytes()
    file.write_bytes(whole[:size])
    with pytest.raises(ValueError, match=f"{name}: .*{message}"):
      read(folder)
    file.write_bytes(whole)
  read(folder)


def test_files_that_are_missing(folder, tmp_path, read):
  with pytest.raises(FileNotFoundError, match="absent: no such folder"):
    read(tmp_path / "absent")
  (tmp_path / "empty").mkdir()
  with pytest.raises(FileNotFoundError, match="holds neither a draft"):
    read(tmp_path / "empty")
  (folder / "draft.safetensors").unlink()
  with pytest.raises(FileNotFoundError, match=r"draft\.safetensors: missing"):
    read(folder)


def _ids(change):
  def apply(tensors):
    tensors["token_ids"] = change(tensors["token_ids"])

  return apply


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda t: t.pop("norm.weight"), r"no tensor for parameter norm\.weight"),
    (lambda t: t.pop("token_ids"), "no tensor for parameter token_ids"),
    (
      lambda t: t.update(extra=np.zeros(2, np.float32)),
      "'extra' is not part.* left over",
    ),
    (
      lambda t: t.update({"norm.weight": np.zeros(8, np.float32)}),
      r"'norm\.weight' has shape \(8,\); .* asks for \(7,\)",
    ),
    (
      lambda t: t.update({"norm.weight": np.zeros(7, np.float64)}),
      r"'norm\.weight' is of type F64",
    ),
    (_ids(lambda x: np.where(x == 7, 31, x)), "token_ids holds 31; .* 0 to 30"),
    (_ids(lambda x: np.where(x == 7, -2, x)), "token_ids holds -2"),
    (_ids(lambda x: np.where(x == 7, 30, x)), "token_ids holds 30 more than"),
    (_ids(lambda x: x[:-1]), r"'token_ids' has shape \(10,\)"),
    (_ids(lambda x: x.astype(np.float32)), "'token_ids' is of type F32"),
    (_ids(lambda x: x.astype(np.int64)), "'token_ids' is of type int64"),
  ],
)
def test_tensors_that_are_wrong(folder, read, change, message):
  _rewrite(folder, change)
  with pytest.raises(ValueError, match=message):
    read(folder)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_values_that_are_not_finite(folder, read, value):
  def change(tensors):
    tensors["norm.weight"] = tensors["norm.weight"].copy()
    tensors["norm.weight"][3] = value

  _rewrite(folder, change)
  with pytest.warns(UserWarning, match=r"'norm\.weight' holds 1 values"):
    read(folder)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda p: p.pop("norm"), r"params lack norm\.weight"),
    (lambda p: p.pop("token_ids"), "params lack token_ids"),
    (lambda p: p.update(extra=jnp.zeros(2)), "params hold extra"),
    (
      lambda p: p.update(norm={"weight": jnp.zeros(8)}),
      r"norm\.weight has shape \(8,\)",
    ),
    (
      lambda p: p.update(norm={"weight": jnp.full(7, jnp.nan)}),
      r"'norm\.weight' holds 7 values that are not finite, of 7",
    ),
    (
      lambda p: p.update(norm={"weight": jnp.full(7, 1e6)}),
      r"'norm\.weight' holds 1e\+06, beyond float16",
    ),
    (
      lambda p: p.update(token_ids=jnp.zeros(W, jnp.int32)),
      "token_ids holds 0 more than once",
    ),
  ],
)
def test_write_checks_first(tmp_path, change, message):
  params = _random(_RECURRENT)
  change(params)
  with pytest.raises(ValueError, match=message):
    checkpoints.write_draft(
      tmp_path / "new", _RECURRENT, params, target=_TARGET, dtype="float16"
    )
  assert not (tmp_path / "new").exists()


def test_write_checks_what_stands_beside(tmp_path):
  params = _random(_RECURRENT)

  def write(target=_TARGET, **options):
    checkpoints.write_draft(
      tmp_path / "new", _RECURRENT, params, target=target, **options
    )

  with pytest.raises(ValueError, match=r"vocab_size of 31, but .*is 30"):
    write(_TARGET._replace(vocab_size=30))
  with pytest.raises(ValueError, match=r"hidden_size of 24, but .*is 25"):
    write(_TARGET._replace(hidden_size=25))
  with pytest.raises(ValueError, match="not JSON compliant"):
    write(calibration={"acceptance": [float("nan")]})
  with pytest.raises(ValueError, match="dtype int8 cannot hold weights"):
    write(dtype="int8")
  assert not (tmp_path / "new").exists()


def test_an_interrupted_write_leaves_the_old_draft(folder, read, monkeypatch):
  def stop(*args, **options):
    raise KeyboardInterrupt

  before = read(folder)
  monkeypatch.setattr(_write, "write_safetensors", stop)
  with pytest.raises(KeyboardInterrupt):
    checkpoints.write_draft(
      folder, _RECURRENT, _random(_RECURRENT, 1), target=_TARGET
    )
  after = read(folder)
  jax.tree.map(np.testing.assert_array_equal, after.params, before.params)
  assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("shared", [False, True])
def test_medusa_folders_are_drafts_too(tmp_path, target, read, shared):
  config = models.MedusaConfig(
    num_heads=2,
    num_layers=1,
    hidden_size=E,
    vocab_size=V,
    shared_output=shared,
  )
  params = _random(config)
  checkpoints.write_medusa(tmp_path, config, params)
  file = read(tmp_path)
  assert (file.config, file.target, file.calibration) == (config, "", {})
  jax.tree.map(np.testing.assert_array_equal, file.params, params)
  (tmp_path / "config.json").unlink()
  assert read(tmp_path).config == config
  other = dataclasses.replace(target.config, hidden_size=25)
  with pytest.raises(ValueError, match="hidden_size is 24, the target's is 25"):
    checkpoints.read_draft(tmp_path, target_config=other)
  (tmp_path / "medusa_lm_head.safetensors").rename(
    tmp_path / "medusa_lm_head.pt"
  )
  with pytest.raises(ValueError, match="not a whole file of torch"):
    read(tmp_path)


def test_medusa_layout_has_no_map(tmp_path):
  config = _CONFIGS[0]
  with pytest.raises(ValueError, match=r"target_vocab_size is 31.* write_dr"):
    checkpoints.write_medusa(tmp_path / "new", config, _random(config))
