"""Cost curves that were measured before, in the user's cache folder."""

import collections
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import pathlib
import tempfile
import warnings
from collections.abc import Mapping
from typing import Any

import jax

from ldjax import assemble, checkpoints
from ldjax.optimize import _cost


def device_of(model: assemble.LanguageModel) -> jax.Device:
  """A device that holds the target's weights."""
  leaf = jax.tree.leaves(model.params.target)[0]
  return min(leaf.devices(), key=lambda device: device.id)


def _key(model: assemble.LanguageModel, batch: int) -> dict[str, Any]:
  """Everything that a cost depends on and that is known beforehand."""
  leaf = jax.tree.leaves(model.params.target)[0]
  try:
    version = importlib.metadata.version("ldjax")
  except importlib.metadata.PackageNotFoundError:  # run from a checkout
    version = "unknown"
  cache = jax.eval_shape(lambda: model.init_cache(1))
  key = {
    "device": device_of(model).device_kind,
    "devices": len(leaf.devices()),
    "jax": jax.__version__,
    "ldjax": version,
    "name": model.name,
    "config": dataclasses.asdict(model.config),
    "dtype": str(leaf.dtype),
    "weights": dict(
      sorted(
        collections.Counter(
          str(x.dtype) for x in jax.tree.leaves(model.params.target)
        ).items()
      )
    ),
    "cache_dtypes": sorted({str(x.dtype) for x in jax.tree.leaves(cache)}),
    "draft": model.draft_name,
    "ladder": [[rung.draft.size, rung.draft.depth] for rung in model.ladder],
    "batch": batch,
  }
  return json.loads(json.dumps(key))


def fingerprint(model: assemble.LanguageModel, batch: int = 1) -> str:
  """Names what a cost curve of a model and a batch is of.

  Args:
    model: from `load`.
    batch: B.

  Returns:
    16 hexadecimal digits, of the device's kind, the versions of jax and
    ldjax, name, shape and dtypes of the model, its draft and the batch.
  """
  text = json.dumps(_key(model, batch), sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def _path(name: str) -> pathlib.Path:
  return checkpoints.cache_folder() / "costs" / f"{name}.json"


def curve_of(says: Mapping[str, Any]) -> _cost.CostCurve:
  """A curve as `dataclasses.asdict` or JSON has it.

  Args:
    says: its fields.

  Raises:
    KeyError, TypeError, ValueError: for what is no curve.
  """
  return _cost.CostCurve(
    sizes=tuple(int(size) for size in says["sizes"]),
    seconds=tuple(float(value) for value in says["seconds"]),
    draft_seconds=tuple(float(value) for value in says["draft_seconds"]),
    batch=int(says["batch"]),
    device=str(says["device"]),
    model=str(says["model"]),
  )


def write_whole(path: pathlib.Path, says: Any) -> None:
  """Writes JSON to a file that is there whole or not at all.

  Args:
    path: the file; its folder exists.
    says: what to write.

  Raises:
    OSError: if it can't be written.
  """
  handle, partial = tempfile.mkstemp(dir=path.parent, prefix=".part-")
  try:
    with os.fdopen(handle, "w", encoding="utf-8") as file:
      json.dump(says, file, indent=2)
      file.write("\n")
    os.replace(partial, path)
  finally:
    pathlib.Path(partial).unlink(missing_ok=True)


def _parse(text: str, name: str, batch: int) -> _cost.CostCurve:
  says = json.loads(text)
  if not isinstance(says, dict):
    raise ValueError("it holds no object")
  found = curve_of(says["curve"])
  if (found.model, found.batch) != (name, batch):
    raise ValueError(
      f"it is of {found.model} with batch {found.batch}, not of {name} with"
      f" batch {batch}"
    )
  return found


def load_costs(
  model: assemble.LanguageModel, *, batch: int = 1
) -> _cost.CostCurve | None:
  """The cost curve that `measure_costs` kept for a model, if there is one.

  Args:
    model: from `load`.
    batch: B.

  Returns:
    The curve, or None where none was kept. A file that is damaged counts as
    none, with a warning.

  Example:
    curve = ldjax.optimize.load_costs(model)
  """
  name = fingerprint(model, batch)
  path = _path(name)
  try:
    text = path.read_text("utf-8")
  except FileNotFoundError:
    return None
  except (OSError, UnicodeDecodeError) as error:
    _ignored(path, error)
    return None
  try:
    return _parse(text, name, batch)
  except (ValueError, KeyError, TypeError, OverflowError) as error:
    _ignored(path, error)
    return None


def _ignored(path: pathlib.Path, error: Exception) -> None:
  warnings.warn(
    f"{path}: this cost curve is not used, for it is damaged"
    f" ({type(error).__name__}: {error}); measure again, or remove it",
    stacklevel=3,
  )


def save_costs(
  model: assemble.LanguageModel, curve: _cost.CostCurve
) -> pathlib.Path:
  """Keeps a curve where `load_costs` finds it.

  Args:
    model: that was measured.
    curve: of it.

  Returns:
    The file, whole or not there.

  Raises:
    OSError: if it can't be written.
  """
  path = _path(curve.model)
  path.parent.mkdir(parents=True, exist_ok=True)
  says = {
    "of": _key(model, curve.batch),
    "curve": dataclasses.asdict(curve),
  }
  write_whole(path, says)
  return path
