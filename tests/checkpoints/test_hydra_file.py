"""Published Hydra heads: read as the reference computes them, or refused."""

import dataclasses
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from ldjax import _base, models
from ldjax.checkpoints import _hydra_file

V, E = 31, 6
TARGET = models.TransformerConfig(
  vocab_size=V,
  hidden_size=E,
  intermediate_size=20,
  num_layers=2,
  num_heads=2,
  num_kv_heads=1,
  head_dim=4,
  max_position_embeddings=64,
)
SAYS = {
  "hydra_num_heads": 3,
  "hydra_num_layers": 2,
  "hydra_head_arch": "mlp",
  "grounded_heads": True,
  "hidden_state_offset": 0,
  "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
}


def tensors(heads=3, layers=2, bias=True, seed=0):
  """What the reference code saves, by a loop of its own."""
  rng = np.random.default_rng(seed)
  found = {}
  for i in range(heads):
    wide = (i + 2) * E
    for part in ("linear", "res_connection"):
      name = f"hydra_mlp.{i}.0.{part}"
      found[f"{name}.weight"] = rng.normal(size=(E, wide)) / wide**0.5
      found[f"{name}.bias"] = rng.normal(size=E)
    for j in range(1, layers):
      name = f"hydra_mlp.{i}.{j}.linear"
      found[f"{name}.weight"] = rng.normal(size=(E, E)) / E**0.5
      found[f"{name}.bias"] = rng.normal(size=E)
    found[f"hydra_lm_head.{i}.weight"] = rng.normal(size=(V, E)) / E**0.5
    if bias:
      found[f"hydra_lm_head.{i}.bias"] = rng.normal(size=V)
  return {name: x.astype(np.float32) for name, x in found.items()}


def write(folder, found, raw=SAYS):
  folder.mkdir(parents=True, exist_ok=True)
  safetensors.numpy.save_file(found, folder / "hydra_lm_head.safetensors")
  (folder / "config.json").write_text(json.dumps(raw))
  return folder


def read(folder, **options):
  return _hydra_file.read_hydra(folder, TARGET, **options)


def guess(found, embed, feature, tokens, layers):
  """Logits of the head that sees a feature and these tokens."""
  i = len(tokens) - 1
  wide = {name: x.astype(np.float64) for name, x in found.items()}

  def linear(name, x):
    return wide[name + ".weight"] @ x + wide.get(name + ".bias", 0)

  def silu(x):
    return x / (1 + np.exp(-x))

  x = np.concatenate([feature, *embed[tokens]])
  x = linear(f"hydra_mlp.{i}.0.res_connection", x) + silu(
    linear(f"hydra_mlp.{i}.0.linear", x)
  )
  for j in range(1, layers):
    x = x + silu(linear(f"hydra_mlp.{i}.{j}.linear", x))
  return linear(f"hydra_lm_head.{i}", x)


@pytest.fixture(autouse=True)
def silent():
  """A warning that a test does not expect is an error."""
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    yield


@pytest.mark.parametrize(
  ("layers", "bias", "torch"), [(1, True, True), (3, True, False), (2, 0, True)]
)
def test_the_layout_of_the_reference(
  tmp_path, write_torch, layers, bias, torch
):
  found = tensors(layers=layers, bias=bias)
  write(tmp_path, found, {**SAYS, "hydra_num_layers": layers})
  if torch:
    (tmp_path / "hydra_lm_head.safetensors").unlink()
    write_torch(tmp_path / "hydra_lm_head.pt", found)
  assert _hydra_file.holds_hydra(tmp_path)
  config, params = read(tmp_path)
  assert config == models.HydraMlpConfig(
    num_heads=3,
    num_layers=layers,
    hidden_size=E,
    vocab_size=V,
    output_bias=bool(bias),
  )
  assert len(jax.tree.leaves(params)) == len(found)
  rng = np.random.default_rng(1)
  embed = rng.normal(size=(V, E)).astype(np.float32)
  feature = rng.normal(size=E).astype(np.float32)
  tokens = rng.integers(V, size=3)
  fn, _ = models.functionalize_draft(config)
  params = models.borrow(
    config, params, {"embed_tokens": {"weight": jnp.asarray(embed)}}
  )
  zero = jnp.zeros((1, 1), jnp.int32)
  state = fn.observe(
    params,
    fn.init(params, 1),
    _base.Observation(
      rows=zero[0],
      tokens=zero,
      features=jnp.asarray(feature)[None, None],
      positions=zero,
      count=zero[0] + 1,
    ),
  )
  ahead = jnp.asarray(tokens[None], jnp.int32)
  carry, logits = fn.begin(params, state, ahead[:, 0])
  for d in range(3):
    want = guess(found, embed, feature, tokens[: d + 1], layers)
    np.testing.assert_allclose(logits[0, 0], want, rtol=0, atol=2e-5)
    if d < 2:
      carry, logits = fn.extend(
        params, state, carry, ahead[:, d + 1, None], zero + d
      )


def test_types_and_places(tmp_path):
  half = {name: x.astype(np.float16) for name, x in tensors().items()}
  write(tmp_path, half)
  (tmp_path / "config.json").unlink()
  placed = {}

  def place(path, array):
    placed[path] = array
    return jnp.asarray(array)

  _, params = read(tmp_path, place=place)
  assert len(placed) == len(jax.tree.leaves(params))
  assert {x.dtype.name for x in placed.values()} == {"float16"}
  lines = []
  _, params = read(tmp_path, dtype="bfloat16", progress=lines.append)
  assert {x.dtype.name for x in jax.tree.leaves(params)} == {"bfloat16"}
  assert lines[-1].startswith("read ")


@pytest.mark.parametrize(
  ("key", "value", "found"),
  [
    ("hydra_num_heads", 5, "3 heads"),
    ("hydra_num_layers", 4, "2 layers a head"),
  ],
)
def test_the_tensors_win(tmp_path, key, value, found):
  write(tmp_path, tensors(), {**SAYS, key: value})
  with pytest.warns(UserWarning, match=f"{key} is {value}, .* holds {found}"):
    config, _ = read(tmp_path)
  assert (config.num_heads, config.num_layers) == (3, 2)


@pytest.mark.parametrize(
  ("key", "value"),
  [
    ("hydra_head_arch", "prefix-mlp"),
    ("hydra_head_arch", "cross-attn"),
    ("hydra_head_arch", "eagle-attn"),
    ("grounded_heads", False),
    ("hidden_state_offset", 1),
  ],
)
def test_what_is_not_supported(tmp_path, key, value):
  write(tmp_path, tensors(), {**SAYS, key: value})
  with pytest.raises(ValueError, match=f"json: {key} {value!r} is not supp"):
    read(tmp_path)


def test_heads_that_do_not_see_tokens(tmp_path):
  found = tensors()
  ungrounded = {k: x for k, x in found.items() if "res_connection" not in k}
  write(tmp_path, ungrounded, {})
  with pytest.raises(ValueError, match=r"grounded_heads false"):
    read(tmp_path)


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size"])
def test_heads_of_another_model(tmp_path, field):
  write(tmp_path, tensors())
  other = dataclasses.replace(TARGET, **{field: 48})
  with pytest.raises(ValueError, match=rf"{field} is \d+, the target's is 48"):
    _hydra_file.read_hydra(tmp_path, other)


def _drop(name):
  return lambda found: found.pop(name)


def _put(name, *shape, value=1.0, dtype=np.float32):
  return lambda found: found.update({name: np.full(shape, value, dtype)})


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (_drop("hydra_mlp.1.0.linear.bias"), r"heads\.1\.blocks\.0\.linear\.bias"),
    (_drop("hydra_mlp.2.1.linear.weight"), r"heads\.2\.blocks\.1\.weight"),
    (_drop("hydra_lm_head.1.bias"), r"parameter heads\.1\.lm_head\.bias"),
    (_drop("hydra_lm_head.2.weight"), r"parameter heads\.2\.lm_head\.weight"),
    (_drop("hydra_lm_head.0.weight"), "'hydra_lm_head.0.weight' is missing"),
    (_put("hydra_lm_head.0.weight", V), r"0.weight' is \(31,\); a matrix"),
    (_put("prefix_embeding_layer.norm.weight", E), "is not part.* left over"),
    (_put("hydra_mlp.0.1.res_connection.bias", E), "is not part.* left over"),
    (
      _put("hydra_mlp.1.0.linear.weight", E, 2 * E),
      r"has shape \(6, 12\); .* asks for \(6, 18\)",
    ),
    (_put("hydra_lm_head.0.bias", V, dtype=np.int64), "is of type I64"),
    (lambda found: found.clear(), "these are not Hydra heads"),
  ],
)
def test_tensors_that_are_wrong(tmp_path, change, message):
  found = tensors()
  change(found)
  write(tmp_path, found)
  with pytest.raises(ValueError, match=message):
    read(tmp_path)


def test_to_our_format(tmp_path, check_our_format):
  folder = write(tmp_path / "hydra", tensors())
  check_our_format(folder, TARGET, *read(folder))


def test_values_that_are_not_finite(tmp_path):
  found = tensors()
  _put("hydra_mlp.1.1.linear.bias", E, value=np.nan)(found)
  write(tmp_path, found)
  with pytest.warns(UserWarning, match="'hydra_mlp.1.1.linear.bias' holds 6"):
    read(tmp_path)


@pytest.mark.parametrize("torch", [False, True])
@pytest.mark.parametrize("size", [0, 1, 57, -2])
def test_files_that_are_cut_off(tmp_path, write_torch, torch, size):
  file = tmp_path / "hydra_lm_head.safetensors"
  write(tmp_path, tensors())
  if torch:
    file.unlink()
    file = tmp_path / "hydra_lm_head.pt"
    write_torch(file, tensors())
  file.write_bytes(file.read_bytes()[:size])
  with pytest.raises(ValueError, match=file.name):
    read(tmp_path)


def test_files_that_are_missing(tmp_path):
  assert not _hydra_file.holds_hydra(tmp_path)
  with pytest.raises(FileNotFoundError, match="holds neither hydra_lm_head"):
    read(tmp_path)
  write(tmp_path, tensors())
  (tmp_path / "config.json").write_text("[]")
  with pytest.raises(ValueError, match=r"config\.json: holds a list"):
    read(tmp_path)
