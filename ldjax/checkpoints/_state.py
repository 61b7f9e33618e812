"""Saving and restoring a pytree of arrays, by Orbax."""

import json
import os
import pathlib
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ldjax.checkpoints import _write

T = TypeVar("T")

_FORMAT = "ldjax.state.1"


def _is_key(leaf: Any) -> bool:
  return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _describe(path: Any, leaf: Any) -> dict[str, Any]:
  return {
    "path": jax.tree_util.keystr(path) or "(the whole)",
    "shape": list(leaf.shape),
    "dtype": str(leaf.dtype),
  }


def _arrays(leaf: Any) -> np.ndarray:
  return np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def _flatten(tree: Any) -> tuple[list[tuple[Any, Any]], Any]:
  leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
  for path, leaf in leaves:
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
      raise ValueError(
        f"leaf {jax.tree_util.keystr(path)} is a {type(leaf).__name__}, not an"
        " array"
      )
  return leaves, treedef


def save_state(
  path: str | os.PathLike[str], state: Any, *, force: bool = False
) -> None:
  """Saves a pytree of arrays, such as a decoder's state in mid-run.

  The folder appears whole or not at all.

  Args:
    path: the folder to make.
    state: any pytree of arrays (dicts, tuples, registered dataclasses; typed
      PRNG keys included).
    force: whether to replace what is at `path`.

  Raises:
    FileExistsError: if `path` exists and `force` is not set.
    ValueError: for a leaf that is no array.

  Example:
    >>> import pathlib, tempfile, jax.numpy as jnp, ldjax
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "state"
    >>> ldjax.checkpoints.save_state(path, {"count": jnp.arange(3)})
    >>> like = {"count": jnp.zeros(3, jnp.int32)}
    >>> ldjax.checkpoints.restore_state(path, like)["count"].tolist()
    [0, 1, 2]

  Source: orbax-checkpoint's `PyTreeCheckpointer`.
  """
  import orbax.checkpoint as ocp

  leaves, _ = _flatten(state)
  with _write.new_folder(pathlib.Path(path), force) as folder:
    # An empty array has nothing to store, and the store refuses it.
    arrays = {
      f"{index:06d}": _arrays(leaf)
      for index, (_, leaf) in enumerate(leaves)
      if leaf.size
    }
    if arrays:
      with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(folder / "arrays", arrays)
    index = {
      "format": _FORMAT,
      "leaves": [_describe(where, leaf) for where, leaf in leaves],
    }
    text = json.dumps(index, indent=1) + "\n"
    (folder / "state.json").write_text(text, encoding="utf-8")


def _check(
  file: pathlib.Path, saved: list[dict[str, Any]], wanted: list[dict[str, Any]]
) -> None:
  by_path = {leaf["path"]: leaf for leaf in saved}
  for leaf in wanted:
    found = by_path.pop(leaf["path"], None)
    if found is None:
      raise ValueError(f"{file}: has no leaf {leaf['path']}")
    for what in ("shape", "dtype"):
      if found[what] != leaf[what]:
        raise ValueError(
          f"{file}: leaf {leaf['path']} was saved with {what} {found[what]};"
          f" {leaf[what]} is wanted"
        )
  for left in by_path:
    raise ValueError(f"{file}: holds leaf {left}, which is not wanted")
  if [leaf["path"] for leaf in saved] != [leaf["path"] for leaf in wanted]:
    raise ValueError(f"{file}: holds the same leaves in another order")


def restore_state(path: str | os.PathLike[str], like: T) -> T:
  """Restores what `save_state` saved, into the structure of an example.

  Args:
    path: the folder.
    like: a pytree of the same structure, of arrays or of
      `jax.ShapeDtypeStruct` (as from `jax.eval_shape`). Leaves that carry a
      sharding say where the arrays go.

  Returns:
    The structure of `like` with the saved values, in fresh buffers.

  Raises:
    FileNotFoundError: if there is no saved state at `path`.
    ValueError: naming the first leaf that is missing, left over, or of another
      shape or dtype.

  Example:
    See `save_state`.

  Source: orbax-checkpoint's `PyTreeCheckpointer`.
  """
  import orbax.checkpoint as ocp

  target = pathlib.Path(path).absolute()
  file = target / "state.json"
  if not file.is_file():
    raise FileNotFoundError(f"{target}: no saved state (state.json is missing)")
  index = json.loads(file.read_text(encoding="utf-8"))
  if index.get("format") != _FORMAT:
    raise ValueError(
      f"{file}: format {index.get('format')!r} cannot be read; {_FORMAT!r} can"
    )
  leaves, treedef = _flatten(like)
  _check(file, index["leaves"], [_describe(*item) for item in leaves])
  arrays: dict[str, Any] = {}
  if any(leaf.size for _, leaf in leaves):
    with ocp.PyTreeCheckpointer() as checkpointer:
      arrays = checkpointer.restore(
        target / "arrays",
        restore_args={
          f"{number:06d}": ocp.RestoreArgs(restore_type=np.ndarray)
          for number, (_, leaf) in enumerate(leaves)
          if leaf.size
        },
      )
  restored = []
  for number, (_, leaf) in enumerate(leaves):
    if _is_key(leaf):
      value = jax.random.wrap_key_data(
        jnp.asarray(arrays[f"{number:06d}"]), impl=leaf.dtype
      )
    elif leaf.size:
      value = jnp.array(arrays[f"{number:06d}"])
    else:
      value = jnp.zeros(leaf.shape, leaf.dtype)
    sharding = getattr(leaf, "sharding", None)
    restored.append(
      value if sharding is None else jax.device_put(value, sharding)
    )
  return jax.tree_util.tree_unflatten(treedef, restored)
