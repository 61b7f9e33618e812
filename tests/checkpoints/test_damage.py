"""Flipped bits in headers and JSON: an error by name, or the same tensors."""

import functools
import json
import warnings

import jax
import numpy as np
import pytest
import safetensors.numpy

from ldjax import checkpoints, models

E, V = 32, 31  # of `make_tiny`
_FLIPS = 100


def _model(folder):
  return checkpoints.read(folder).params


def _draft(config, folder):
  return checkpoints.read_draft(folder, target_config=config).params


def _write_sharded(path, tiny):
  return _model, tiny.folder(path, 2), "model.safetensors.index.json"


def _write_gguf(path, tiny):
  return _model, tiny.gguf(path / "tiny.gguf"), "tiny.gguf"


def _write_orbax(path, tiny):
  checkpoints.convert(tiny.folder(path / "hf"), path / "orbax")
  return _model, path / "orbax", "ldjax-model.json"


def _target(path, tiny):
  return checkpoints.read_config(tiny.folder(path / "target"))


def _write_medusa(path, tiny):
  config = models.MedusaConfig(
    num_heads=2, num_layers=1, hidden_size=E, vocab_size=V
  )
  params = models.init_draft(config, jax.random.key(0))
  checkpoints.write_medusa(path / "heads", config, params)
  read = functools.partial(_draft, _target(path, tiny))
  return read, path / "heads", "medusa_lm_head.safetensors"


def _write_ours(path, tiny):
  config = models.HydraConfig(
    num_heads=2, num_layers=1, target_size=E, hidden_size=7, vocab_size=V
  )
  target = _target(path, tiny)
  made_for = checkpoints.DraftTarget("x", E, V, target.num_layers)
  params = models.init_draft(config, jax.random.key(0))
  checkpoints.write_draft(path / "ours", config, params, target=made_for)
  return functools.partial(_draft, target), path / "ours", "draft.safetensors"


def _write_eagle(path, tiny):
  rng = np.random.default_rng(0)
  shapes = {
    "fc.weight": (E, 2 * E),
    "layers.0.post_attention_layernorm.weight": (E,),
    **{f"layers.0.self_attn.{x}_proj.weight": (E, E) for x in "qkvo"},
    **{f"layers.0.mlp.{x}_proj.weight": (9, E) for x in ("gate", "up")},
    "layers.0.mlp.down_proj.weight": (E, 9),
  }
  folder = path / "eagle"
  folder.mkdir()
  tensors = {k: rng.normal(size=x).astype("f4") for k, x in shapes.items()}
  safetensors.numpy.save_file(tensors, folder / "model.safetensors")
  says = {"num_attention_heads": 4, "rms_norm_eps": 1e-6, "vocab_size": V}
  (folder / "config.json").write_text(json.dumps(says))
  read = functools.partial(_draft, _target(path, tiny))
  return read, folder, "model.safetensors"


def test_more_layers_than_any_model_has(tmp_path, make_tiny):
  """A flipped bit can ask for a thousand million: none is laid out."""
  tiny = make_tiny()
  tiny.config["num_hidden_layers"] = 1 << 30
  folder = tiny.folder(tmp_path / "hf")
  file = tiny.gguf(tmp_path / "tiny.gguf")
  for path, name in ((folder, "num_hidden_layers"), (file, "block_count")):
    with pytest.raises(ValueError, match=f"{name} is 1073741824; .* 256"):
      checkpoints.read(path)


@pytest.mark.parametrize(
  "write",
  [
    _write_sharded,
    _write_gguf,
    _write_orbax,
    _write_medusa,
    _write_ours,
    _write_eagle,
  ],
)
def test_flipped_bits(tmp_path, make_tiny, write):
  read, where, name = write(tmp_path, make_tiny())
  want = jax.tree.map(np.shape, read(where))
  rng = np.random.default_rng(0)
  inside = where if where.is_dir() else where.parent
  refused = 0
  for file in (inside / name, inside / "config.json"):
    if not file.is_file():
      continue
    whole = file.read_bytes()
    reach = len(whole)
    if file.suffix == ".safetensors":
      reach = 8 + int.from_bytes(whole[:8], "little")
    if file.suffix == ".gguf":
      reach = 1500
    for _ in range(_FLIPS):
      data = bytearray(whole)
      data[rng.integers(reach)] ^= 1 << rng.integers(8)
      file.write_bytes(bytes(data))
      try:
        with warnings.catch_warnings():
          warnings.simplefilter("ignore")
          have = read(where)
      except (ValueError, FileNotFoundError):
        refused += 1
      else:
        assert jax.tree.map(np.shape, have) == want
    file.write_bytes(whole)
  assert refused > _FLIPS / 4
