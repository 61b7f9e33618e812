"""Medusa heads: the published layouts, and configurations that are wrong."""

import dataclasses
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from ldjax import _base, checkpoints, models


def _write(folder, heads, layers, config=None, shared=False, width=6, vocab=11):
  """The layout as published, by a loop of its own."""
  rng = np.random.default_rng(heads * 10 + layers)
  tensors = {}
  for i in range(heads):
    for j in range(layers):
      tensors[f"{i}.{j}.linear.weight"] = rng.normal(size=(width, width))
      tensors[f"{i}.{j}.linear.bias"] = rng.normal(size=width)
    if not shared:
      tensors[f"{i}.{layers}.weight"] = rng.normal(size=(vocab, width))
  tensors = {k: v.astype(np.float32) for k, v in tensors.items()}
  folder.mkdir(parents=True, exist_ok=True)
  safetensors.numpy.save_file(tensors, folder / "medusa_lm_head.safetensors")
  if config is not None:
    (folder / "config.json").write_text(json.dumps(config))
  return tensors


def _says(heads, layers):
  return {"medusa_num_heads": heads, "medusa_num_layers": layers}


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_medusa_1_layout(tmp_path, layers):
  tensors = _write(tmp_path, 3, layers, _says(3, layers))
  config, params = checkpoints.read_medusa(tmp_path)
  assert config == models.MedusaConfig(
    num_heads=3,
    num_layers=layers,
    hidden_size=6,
    vocab_size=11,
    shared_output=False,
  )
  for i in range(3):
    head = params["heads"][i]
    for j in range(layers):
      for part in ("weight", "bias"):
        np.testing.assert_array_equal(
          head["blocks"][j][part], tensors[f"{i}.{j}.linear.{part}"]
        )
    np.testing.assert_array_equal(
      head["lm_head"]["weight"], tensors[f"{i}.{layers}.weight"]
    )
  assert len(jax.tree.leaves(params)) == len(tensors)


def test_shared_layout(tmp_path):
  tensors = _write(tmp_path, 2, 1, _says(2, 1), shared=True)
  with pytest.raises(ValueError, match="pass vocab_size"):
    checkpoints.read_medusa(tmp_path)
  config, params = checkpoints.read_medusa(tmp_path, vocab_size=11)
  assert config.shared_output and config.vocab_size == 11
  assert set(params["heads"][1]) == {"blocks"}
  assert len(jax.tree.leaves(params)) == len(tensors)


@pytest.mark.parametrize("config", [None, {}, {"medusa_num_layers": 1}])
def test_counts_come_from_the_names(tmp_path, config):
  _write(tmp_path, 5, 1, config)
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    found, _ = checkpoints.read_medusa(tmp_path)
  assert (found.num_heads, found.num_layers) == (5, 1)


def test_published_config_that_is_wrong(tmp_path, shared_data):
  folder = shared_data / "configs" / "medusa-vicuna-7b-v1.3"
  published = json.loads((folder / "config.json").read_text())
  _write(tmp_path, 5, 1, published)
  with pytest.warns(UserWarning, match="medusa_num_heads is 2.* holds 5 heads"):
    config, params = checkpoints.read_medusa(tmp_path)
  assert config.num_heads == len(params["heads"]) == 5


def test_wrong_number_of_layers_warns(tmp_path):
  _write(tmp_path, 2, 2, _says(2, 1))
  with pytest.warns(UserWarning, match="medusa_num_layers is 1.* holds 2 lay"):
    assert checkpoints.read_medusa(tmp_path)[0].num_layers == 2


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ("-1.0.linear.bias", r"no tensor for parameter heads\.1\.blocks\.0\.bias"),
    ("-1.1.weight", r"no tensor for parameter heads\.1\.lm_head\.weight"),
    ("+extra", "'extra' is not part"),
    ("+2.1.weight", r"no tensor for parameter heads\.2"),
    ("+0.2.weight", r"'0\.2\.weight' should be.*'0\.1\.weight'"),
    ("+0.0.linear.weight", r"'0\.0\.linear\.weight' has shape"),
  ],
)
def test_strictness(tmp_path, change, message):
  tensors = _write(tmp_path, 2, 1)
  if change[0] == "-":
    del tensors[change[1:]]
  else:
    tensors[change[1:]] = np.zeros((11, 6), np.float32)
  safetensors.numpy.save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
  with pytest.raises(ValueError, match=message):
    checkpoints.read_medusa(tmp_path)


def test_values_that_are_not_finite(tmp_path):
  tensors = _write(tmp_path, 2, 1)
  tensors["1.0.linear.bias"][:2] = np.nan
  safetensors.numpy.save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
  with pytest.warns(UserWarning, match=r"'1\.0\.linear\.bias' holds 2 values"):
    checkpoints.read_medusa(tmp_path)


def _vllm(folder, heads, layers, *, single, ids=None, bias=True, prefix=""):
  """vLLM's layout, by a loop of its own."""
  rng = np.random.default_rng(7)
  width, vocab = 6, 11 if ids is None else len(ids)
  tensors = {}
  for i in range(heads):
    for j in range(layers):
      tensors[f"blocks.{i}.layers.{j}.weight"] = rng.normal(size=(width, width))
      if bias:
        tensors[f"blocks.{i}.layers.{j}.bias"] = rng.normal(size=width)
    if not single:
      tensors[f"lm_heads.{i}.weight"] = rng.normal(size=(vocab, width))
  if single:
    tensors["lm_head.weight"] = rng.normal(size=(vocab, width))
  tensors = {prefix + k: v.astype(np.float32) for k, v in tensors.items()}
  if ids is not None:
    tensors[prefix + "token_map"] = np.array(ids)
  folder.mkdir(parents=True, exist_ok=True)
  safetensors.numpy.save_file(tensors, folder / "model.safetensors")
  says = {"num_heads": heads, "num_hidden_layers": layers, "vocab_size": 11}
  (folder / "config.json").write_text(json.dumps(says))
  return tensors


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("ids", [None, [7, 2, 10]])
def test_vllm_layout(tmp_path, single, ids, prefix):
  tensors = _vllm(tmp_path, 2, 1, single=single, ids=ids, prefix=prefix)
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    config, params = checkpoints.read_medusa(tmp_path)
  assert config == models.MedusaConfig(
    num_heads=2,
    num_layers=1,
    hidden_size=6,
    vocab_size=11 if ids is None else 3,
    single_output=single,
    target_vocab_size=None if ids is None else 11,
  )
  for i in range(2):
    block = params["heads"][i]["blocks"][0]
    for part in ("weight", "bias"):
      name = f"{prefix}blocks.{i}.layers.0.{part}"
      np.testing.assert_array_equal(block[part], tensors[name])
    matrix = params["output"] if single else params["heads"][i]["lm_head"]
    name = "lm_head" if single else f"lm_heads.{i}"
    np.testing.assert_array_equal(
      matrix["weight"], tensors[f"{prefix}{name}.weight"]
    )
  if ids is not None:
    assert params["token_ids"].tolist() == ids
  # Back again, bit by bit.
  checkpoints.write_medusa(tmp_path / "b", config, params, layout="vllm")
  again = safetensors.numpy.load_file(tmp_path / "b" / "model.safetensors")
  assert {prefix + name for name in again} == set(tensors)
  for name, value in again.items():
    np.testing.assert_array_equal(value, tensors[prefix + name])
    assert value.dtype == tensors[prefix + name].dtype
  assert checkpoints.read_medusa(tmp_path / "b")[0] == config


def _guess(tensors, head, feature, matrix):
  """Logits of a head from the tensors by their names, in either layout."""
  x = feature.astype(np.float64)
  for layer in range(3):
    for name in (f"{head}.{layer}.linear", f"blocks.{head}.layers.{layer}"):
      if name + ".weight" in tensors:
        y = tensors[name + ".weight"].astype(np.float64) @ x
        y = y + tensors[name + ".bias"]
        x = x + y / (1 + np.exp(-y))
  for name in (f"{head}.1", f"{head}.2", f"lm_heads.{head}", "lm_head"):
    matrix = tensors.get(name + ".weight", matrix)
  return matrix @ x


@pytest.mark.parametrize(
  "write",
  [
    lambda folder: _write(folder, 3, 1),
    lambda folder: _write(folder, 3, 2),
    lambda folder: _write(folder, 3, 2, shared=True),
    lambda folder: _vllm(folder, 3, 2, single=False),
    lambda folder: _vllm(folder, 3, 1, single=True, ids=[7, 2, 10]),
    lambda folder: _vllm(folder, 3, 1, single=False, ids=[7, 2, 10]),
  ],
  ids=["own", "layers", "shared", "vllm", "vllm-single", "vllm-part"],
)
def test_guesses_equal_numpy(tmp_path, write):
  tensors = write(tmp_path)
  config, params = checkpoints.read_medusa(tmp_path, vocab_size=11)
  rng = np.random.default_rng(1)
  matrix, feature = (
    rng.normal(size=shape).astype(np.float32) for shape in ((11, 6), (6,))
  )
  fn, _ = models.functionalize_draft(config)
  target = {
    "embed_tokens": {"weight": np.ones((11, 6), np.float32)},
    "lm_head": {"weight": jnp.asarray(matrix)},
  }
  params = models.borrow(config, params, target)
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
  carry, logits = fn.begin(params, state, zero[0])
  for head in range(3):
    want = _guess(tensors, head, feature, matrix)
    np.testing.assert_allclose(logits[0, 0], want, rtol=0, atol=1e-4)
    if head < 2:
      carry, logits = fn.extend(params, state, carry, zero, zero + head)


def test_vllm_without_biases(tmp_path):
  _vllm(tmp_path, 2, 2, single=False, bias=False)
  _, params = checkpoints.read_medusa(tmp_path)
  for i in range(2):
    for j in range(2):
      assert not np.any(params["heads"][i]["blocks"][j]["bias"])


def test_vllm_config_that_is_wrong(tmp_path):
  _vllm(tmp_path, 2, 1, single=True)
  (tmp_path / "config.json").write_text('{"num_heads": 5}')
  with pytest.warns(UserWarning, match="medusa_num_heads is 5.* holds 2 heads"):
    checkpoints.read_medusa(tmp_path)


@pytest.mark.parametrize(
  ("ids", "message"),
  [
    ([7, 2, 11], "holds 11; the target's ids are 0 to 10"),
    ([7, 7, 2], "holds 7 more than once"),
  ],
)
def test_a_map_of_ids_that_is_wrong(tmp_path, ids, message):
  _vllm(tmp_path, 1, 1, single=False, ids=ids)
  with pytest.raises(ValueError, match=message):
    checkpoints.read_medusa(tmp_path)


def test_a_map_needs_the_size_of_the_vocabulary(tmp_path):
  _vllm(tmp_path, 1, 1, single=False, ids=[3, 4])
  (tmp_path / "config.json").unlink()
  with pytest.raises(ValueError, match=r"guess 2 tokens of a voc.*vocab_size"):
    checkpoints.read_medusa(tmp_path)
  config, _ = checkpoints.read_medusa(tmp_path, vocab_size=9)
  assert config.target_vocab_size == 9


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("shared", [False, True])
def test_medusa_2(tmp_path, make_tiny, shards, shared):
  tiny = make_tiny(medusa_num_heads=2)
  heads = _write(tmp_path / "heads", 2, 1, shared=shared, width=32, vocab=31)
  added = {f"medusa_head.{name}": value for name, value in heads.items()}
  whole = dataclasses.replace(tiny, weights={**tiny.weights, **added})
  folder = whole.folder(tmp_path / "model", shards)
  tiny.check(checkpoints.read(folder).params)
  config, params = checkpoints.read_medusa(folder)
  alone, wanted = checkpoints.read_medusa(tmp_path / "heads", vocab_size=31)
  assert config == alone
  jax.tree.map(np.testing.assert_array_equal, params, wanted)


def test_medusa_2_of_a_model_with_tensors_that_are_passed_over(
  tmp_path, make_tiny
):
  # Of a type that is not read: GPT-2 and Gemma 3 bring such.
  extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(3, "u1")}
  tiny = make_tiny()
  tiny = dataclasses.replace(tiny, weights={**tiny.weights, **extra})
  folder = tiny.folder(tmp_path / "plain")
  assert not checkpoints.has_medusa_heads(folder)
  checkpoints.read(folder)
  heads = _write(tmp_path / "heads", 2, 1, shared=True, width=32, vocab=31)
  added = {f"medusa_head.{name}": value for name, value in heads.items()}
  both = dataclasses.replace(tiny, weights={**tiny.weights, **added})
  folder = both.folder(tmp_path / "model", 2)
  assert checkpoints.has_medusa_heads(folder)
  config, _ = checkpoints.read_medusa(folder)
  assert config.num_heads == 2


def test_to_our_format(tmp_path, make_tiny):
  """Of a Medusa-2 folder, which is the model that its heads are for."""
  tiny = make_tiny()
  heads = _write(tmp_path / "heads", 2, 1, width=32, vocab=31)
  added = {f"medusa_head.{name}": value for name, value in heads.items()}
  whole = dataclasses.replace(tiny, weights={**tiny.weights, **added})
  folder = whole.folder(tmp_path / "model")
  checkpoints.convert(folder, tmp_path / "one", to="ldjax")
  checkpoints.convert(
    tmp_path / "heads", tmp_path / "two", to="ldjax", target=folder
  )
  target = checkpoints.read_config(folder)
  _, params = checkpoints.read_medusa(tmp_path / "heads")
  for name in ("one", "two"):
    file = checkpoints.read_draft(tmp_path / name, target_config=target)
    assert file.target == "model"
    jax.tree.map(np.testing.assert_array_equal, file.params, params)
    # And back, as any draft of ours.
    checkpoints.convert(tmp_path / name, tmp_path / f"{name}-out", to="medusa")
    back = safetensors.numpy.load_file(
      tmp_path / f"{name}-out" / "medusa_lm_head.safetensors"
    )
    jax.tree.map(np.testing.assert_array_equal, back, heads)


@pytest.mark.parametrize("shared", [False, True])
def test_a_pytorch_file(tmp_path, write_torch, shared):
  tensors = _write(tmp_path / "a", 2, 1, shared=shared)
  (tmp_path / "b").mkdir()
  write_torch(tmp_path / "b" / "medusa_lm_head.pt", tensors)
  config, params = checkpoints.read_medusa(tmp_path / "b", vocab_size=11)
  alone, wanted = checkpoints.read_medusa(tmp_path / "a", vocab_size=11)
  assert config == alone
  jax.tree.map(np.testing.assert_array_equal, params, wanted)


def test_layouts_that_cannot_hold_the_heads(tmp_path):
  sizes = {"num_heads": 1, "num_layers": 0, "hidden_size": 6, "vocab_size": 3}
  for layout, change, message in (
    ("medusa", {"single_output": True}, "single_output is True"),
    ("medusa", {"target_vocab_size": 9}, "target_vocab_size is 9"),
    ("vllm", {"shared_output": True}, "use layout='medusa'"),
    ("torch", {}, "layout is 'torch'; known are 'medusa', 'vllm'"),
  ):
    config = models.MedusaConfig(**sizes, **change)
    with pytest.raises(ValueError, match=message):
      checkpoints.write_medusa(tmp_path / "x", config, {}, layout=layout)
  assert not (tmp_path / "x").exists()


def test_files_that_are_missing_or_damaged(tmp_path):
  with pytest.raises(FileNotFoundError, match="no such folder"):
    checkpoints.read_medusa(tmp_path / "absent")
  with pytest.raises(FileNotFoundError, match=r"medusa_lm_head\.safetensors"):
    checkpoints.read_medusa(tmp_path)
  (tmp_path / "medusa_lm_head.pt").write_bytes(b"\x80")
  with pytest.raises(ValueError, match=r"\.pt: not a whole file of torch"):
    checkpoints.read_medusa(tmp_path)
  file = tmp_path / "medusa_lm_head.safetensors"
  safetensors.numpy.save_file({"fc.weight": np.ones((2, 2))}, file)
  with pytest.raises(ValueError, match=r"fc\.weight.*F64"):
    checkpoints.read_medusa(tmp_path)
  safetensors.numpy.save_file({"fc.weight": np.ones((2, 2), np.float32)}, file)
  with pytest.raises(ValueError, match="not Medusa heads"):
    checkpoints.read_medusa(tmp_path)


@pytest.mark.parametrize("shared", [False, True])
def test_write_then_read(tmp_path, bfloat16, shared):
  _write(tmp_path / "a", 2, 2, _says(2, 2), shared)
  config, params = checkpoints.read_medusa(
    tmp_path / "a", vocab_size=11, dtype="bfloat16"
  )
  checkpoints.write_medusa(tmp_path / "b", config, params)
  again, same = checkpoints.read_medusa(tmp_path / "b")
  assert again == config
  assert jax.tree.structure(same) == jax.tree.structure(params)
  for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(same), strict=True):
    assert x.dtype == y.dtype == bfloat16
    np.testing.assert_array_equal(x, y)
  names = set(
    safetensors.numpy.load_file(tmp_path / "a" / "medusa_lm_head.safetensors")
  )
  assert names == set(
    safetensors.numpy.load_file(tmp_path / "b" / "medusa_lm_head.safetensors")
  )


def test_write_checks_first(tmp_path):
  _write(tmp_path / "a", 1, 1)
  config, params = checkpoints.read_medusa(tmp_path / "a")
  block = params["heads"][0]["blocks"][0]
  bias = block.pop("bias")
  with pytest.raises(
    ValueError, match=r"params lack heads\.0\.blocks\.0\.bias"
  ):
    checkpoints.write_medusa(tmp_path / "b", config, params)
  block["bias"] = bias[:2]
  with pytest.raises(ValueError, match=r"shape \(2,\)"):
    checkpoints.write_medusa(tmp_path / "b", config, params)
  block["bias"] = bias
  block["scale"] = bias
  with pytest.raises(ValueError, match=r"params hold heads\.0\.blocks\.0\.sc"):
    checkpoints.write_medusa(tmp_path / "b", config, params)
  assert not (tmp_path / "b").exists()
