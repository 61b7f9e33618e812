"""States saved and restored, in this process and in another."""

import json
import pathlib
import subprocess
import sys

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldjax import checkpoints


@flax.struct.dataclass(kw_only=True)
class State:
  """What a decoder's state is made of."""

  tokens: jax.Array
  pages: tuple[jax.Array, ...]
  empty: jax.Array
  key: jax.Array
  nothing: None = None
  name: str = flax.struct.field(pytree_node=False, default="state")


def _state():
  return State(
    tokens=jnp.arange(7, dtype=jnp.int32),
    pages=(jnp.full((2, 3), 1e38, jnp.bfloat16), jnp.zeros((), jnp.bool_)),
    empty=jnp.zeros((0, 5), jnp.float32),
    key=jax.random.key(3),
  )


def _equal(one, other):
  assert jax.tree.structure(one) == jax.tree.structure(other)
  for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
    assert x.dtype == y.dtype and x.shape == y.shape
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      x, y = jax.random.key_data(x), jax.random.key_data(y)
    np.testing.assert_array_equal(x, y)


def test_dataclass_of_every_kind_of_array(tmp_path):
  state = _state()
  checkpoints.save_state(tmp_path / "run" / "state", state)
  _equal(checkpoints.restore_state(tmp_path / "run" / "state", state), state)
  like = jax.eval_shape(_state)
  restored = checkpoints.restore_state(tmp_path / "run" / "state", like)
  _equal(restored, state)
  assert restored.name == "state"
  # The noise goes on as it would have.
  assert jax.random.bits(restored.key) == jax.random.bits(state.key)
  # Only the folder itself is left, no half-made ones.
  assert [p.name for p in (tmp_path / "run").iterdir()] == ["state"]


def test_restored_arrays_can_be_donated(tmp_path):
  checkpoints.save_state(tmp_path / "s", {"a": jnp.ones(4), "b": jnp.ones(4)})
  like = {"a": jnp.zeros(4), "b": jnp.zeros(4)}
  restored = checkpoints.restore_state(tmp_path / "s", like)
  step = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
  assert step(restored)["b"].tolist() == [2.0] * 4
  assert like["a"].tolist() == [0.0] * 4


def test_in_another_process(tmp_path):
  state = {"tokens": jnp.arange(5) * 3, "deep": [jnp.full((2,), 0.1)]}
  checkpoints.save_state(tmp_path / "s", state)
  program = f"""
import jax.numpy as jnp
from ldjax import checkpoints
like = {{"tokens": jnp.zeros(5, jnp.int32), "deep": [jnp.zeros(2)]}}
state = checkpoints.restore_state({str(tmp_path / "s")!r}, like)
print(state["tokens"].tolist(), [x.hex() for x in state["deep"][0].tolist()])
"""
  done = subprocess.run(
    [sys.executable, "-c", program],
    capture_output=True,
    text=True,
    check=True,
    cwd=pathlib.Path(checkpoints.__file__).parents[2],
  )
  tenth = float(np.float32(0.1)).hex()
  assert done.stdout.strip() == f"{[0, 3, 6, 9, 12]} {[tenth, tenth]}"


@pytest.mark.parametrize(
  ("like", "message"),
  [
    ({"a": jnp.zeros(4), "b": jnp.zeros(1)}, r"\['a'\].* shape \[3\]; \[4\]"),
    (
      {"a": jnp.zeros(3, jnp.int32), "b": jnp.zeros(1)},
      r"\['a'\].*float32; in",
    ),
    ({"a": jnp.zeros(3)}, r"holds leaf \['b'\]"),
    (
      {"a": jnp.zeros(3), "b": jnp.zeros(1), "c": jnp.zeros(1)},
      r"has no leaf \['c'\]",
    ),
  ],
)
def test_mismatch_names_the_leaf(tmp_path, like, message):
  checkpoints.save_state(tmp_path / "s", {"a": jnp.ones(3), "b": jnp.ones(1)})
  with pytest.raises(ValueError, match=message):
    checkpoints.restore_state(tmp_path / "s", like)


def test_nothing_is_overwritten_unasked(tmp_path):
  path = tmp_path / "s"
  checkpoints.save_state(path, {"a": jnp.ones(3)})
  with pytest.raises(FileExistsError, match="force=True"):
    checkpoints.save_state(path, {"a": jnp.zeros(3)})
  like = {"a": jnp.zeros(3)}
  assert checkpoints.restore_state(path, like)["a"].tolist() == [1.0] * 3
  checkpoints.save_state(path, {"a": jnp.full(3, 2.0)}, force=True)
  assert checkpoints.restore_state(path, like)["a"].tolist() == [2.0] * 3


def test_what_is_no_state(tmp_path):
  with pytest.raises(FileNotFoundError, match="no saved state"):
    checkpoints.restore_state(tmp_path, {"a": jnp.zeros(3)})
  with pytest.raises(ValueError, match=r"\['a'\] is a str"):
    checkpoints.save_state(tmp_path / "s", {"a": "text"})
  assert not list(tmp_path.iterdir())
  (tmp_path / "state.json").write_text(json.dumps({"format": "other"}))
  with pytest.raises(ValueError, match="format 'other'"):
    checkpoints.restore_state(tmp_path, {"a": jnp.zeros(3)})
