"""Which tensor of a file becomes which parameter, as data, applied strictly.

A family's table is a tuple of `Rule`. Every tensor of the file must match
exactly one rule, every parameter must be given exactly once, and every shape
must be the configuration's; what does not fit is an error that names the
tensor. All of this is decided before the first weight is read.
"""

import dataclasses
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Progress = Callable[[str], None]
Path = tuple[str | int, ...]
Transform = Callable[[np.ndarray], np.ndarray]
Place = Callable[[Path, np.ndarray], jax.Array]


@dataclasses.dataclass(frozen=True)
class Rule:
  """One line of a family's table.

  Args:
    pattern: a regular expression that must match a whole tensor name.
    target: the parameter's path, segments joined by "/", with `{0}`, `{1}`, …
      for the pattern's groups; None for a tensor that is known and not needed.
    transform: the name of what is done to the array; "" for nothing.
  """

  pattern: str
  target: str | None
  transform: str = ""


@dataclasses.dataclass(frozen=True)
class Tensor:
  """A tensor that a file offers, not yet read.

  Args:
    name: its name in the file.
    file: the file that holds it, for messages.
    shape: its shape once read.
    dtype: the float type of the array that `read` returns.
    read: reads it into memory of its own.
  """

  name: str
  file: str
  shape: tuple[int, ...]
  dtype: np.dtype[Any]
  read: Callable[[], np.ndarray]


def offer(
  name: str,
  file: pathlib.Path,
  shape: Iterable[int],
  kind: str,
  dtypes: Mapping[str, np.dtype[Any]],
  read: Callable[[], np.ndarray],
) -> Tensor:
  """A tensor of a file, if it is of a type that can be read.

  Args:
    name: its name in the file.
    file: the file that holds it.
    shape: its shape once read.
    kind: what the file calls its type.
    dtypes: the types that can be read, by what the file calls them.
    read: reads it into memory of its own.

  Raises:
    ValueError: for another type.
  """
  if kind not in dtypes:
    raise ValueError(
      f"{file}: tensor {name!r} is of type {kind}; only"
      f" {', '.join(sorted(dtypes))} can be read"
    )
  return Tensor(name, file.name, tuple(shape), dtypes[kind], read)


def finite(array: np.ndarray, name: str, where: str) -> np.ndarray:
  """The array, if all of its values are finite.

  Args:
    array: of floats, integers or truth values.
    name: of the tensor.
    where: what the message begins with.

  Raises:
    ValueError: naming the tensor.
  """
  bad = np.count_nonzero(~np.isfinite(array))
  if bad:
    raise ValueError(
      f"{where}tensor {name!r} holds {bad} values that are not finite, of"
      f" {array.size}"
    )
  return array


def checked(tensor: Tensor, file: pathlib.Path) -> Tensor:
  """The tensor, which raises ValueError as it is read if it is not finite."""

  def read() -> np.ndarray:
    return finite(tensor.read(), tensor.name, f"{file}: ")

  return dataclasses.replace(tensor, read=read)


def _show(path: Path) -> str:
  return ".".join(str(part) for part in path)


def flatten(tree: Mapping[Any, Any], prefix: Path = ()) -> dict[Path, Any]:
  """The leaves of nested dicts by their paths."""
  leaves: dict[Path, Any] = {}
  for key, value in tree.items():
    if isinstance(value, Mapping):
      leaves.update(flatten(value, (*prefix, key)))
    else:
      leaves[(*prefix, key)] = value
  return leaves


def unflatten(leaves: Mapping[Path, Any]) -> dict[Any, Any]:
  """Nested dicts from leaves by their paths."""
  tree: dict[Any, Any] = {}
  for path, leaf in leaves.items():
    node = tree
    for part in path[:-1]:
      node = node.setdefault(part, {})
    node[path[-1]] = leaf
  return tree


def _match(rules: Iterable[Rule], tensor: Tensor) -> tuple[Rule, Path | None]:
  hits = [
    (rule, found)
    for rule in rules
    if (found := re.fullmatch(rule.pattern, tensor.name)) is not None
  ]
  if not hits:
    raise ValueError(
      f"{tensor.file}: tensor {tensor.name!r} is not part of this model"
      " family; it would be left over, so the file is not loaded"
    )
  if len(hits) > 1:
    raise ValueError(
      f"{tensor.file}: tensor {tensor.name!r} matches {len(hits)} rules: "
      + ", ".join(repr(rule.pattern) for rule, _ in hits)
    )
  rule, found = hits[0]
  if rule.target is None:
    return rule, None
  parts = rule.target.format(*found.groups()).split("/")
  return rule, tuple(int(p) if p.isdecimal() else p for p in parts)


def targets(
  rules: Iterable[Rule], tensors: Iterable[Tensor]
) -> dict[Path, Tensor]:
  """The tensors of a file by the parameters that they would be.

  For what a file's shapes tell of its configuration; `plan` checks the rest.

  Raises:
    ValueError: for a tensor that no rule or more than one rule knows.
  """
  rules = tuple(rules)
  found = {}
  for tensor in tensors:
    _, path = _match(rules, tensor)
    if path is not None:
      found[path] = tensor
  return found


def plan(
  rules: Iterable[Rule],
  tensors: Iterable[Tensor],
  abstract: Mapping[Any, Any],
) -> dict[Path, tuple[Tensor, str]]:
  """Gives every parameter its tensor, or says what does not fit.

  Args:
    rules: the family's table.
    tensors: everything that the files offer.
    abstract: nested dicts of `jax.ShapeDtypeStruct`, the parameters wanted.

  Returns:
    For each parameter's path, its tensor and the name of the transform.

  Raises:
    ValueError: for a tensor that no rule or more than one rule knows, a
      parameter given twice or not at all, or a shape that differs.
  """
  rules = tuple(rules)
  wanted = flatten(abstract)
  given: dict[Path, tuple[Tensor, str]] = {}
  files: dict[str, None] = {}
  for tensor in tensors:
    files[tensor.file] = None
    rule, path = _match(rules, tensor)
    if path is None:
      continue
    if path not in wanted:
      raise ValueError(
        f"{tensor.file}: tensor {tensor.name!r} would be parameter"
        f" {_show(path)}, which the configuration does not have (number of"
        " layers, biases, q/k norms or tie_word_embeddings)"
      )
    if path in given:
      raise ValueError(
        f"parameter {_show(path)} is given twice: by {given[path][0].name!r}"
        f" in {given[path][0].file} and by {tensor.name!r} in {tensor.file}"
      )
    if tuple(wanted[path].shape) != tensor.shape:
      raise ValueError(
        f"{tensor.file}: tensor {tensor.name!r} has shape"
        f" {tensor.shape}; the configuration asks for"
        f" {tuple(wanted[path].shape)}"
      )
    given[path] = (tensor, rule.transform)
  missing = [_show(path) for path in wanted if path not in given]
  if missing:
    more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
    hint = (
      "; the configuration says tie_word_embeddings: false. If the model"
      " shares its embedding, set tie_word_embeddings: true in config.json"
      if missing == ["lm_head.weight"]
      else ""
    )
    raise ValueError(
      f"{', '.join(files) or 'the file'}: no tensor for parameter "
      + ", ".join(missing[:4])
      + more
      + hint
    )
  return {path: given[path] for path in wanted}


def common_dtype(tensors: Iterable[Tensor]) -> np.dtype[Any]:
  """The narrowest float type that holds every tensor without loss."""
  dtypes = {tensor.dtype for tensor in tensors}
  # Of bf16, fp16 and fp32, any two need fp32 to hold both.
  return dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)


def cast(array: np.ndarray, dtype: np.dtype[Any], name: str) -> np.ndarray:
  """Converts floats, refusing to turn a finite value into an infinite one."""
  if array.dtype == dtype:
    return array
  with np.errstate(over="ignore"):
    result = array.astype(dtype)
  if dtype == np.float16 and array.dtype != np.float16:
    wide = array.astype(np.float32, copy=False)
    if np.any(np.isinf(result) & np.isfinite(wide)):
      raise ValueError(
        f"tensor {name!r} holds {float(np.max(np.abs(wide))):.4g}, beyond"
        " float16's 65504; load as bfloat16 or float32"
      )
  return result


def execute(
  planned: Mapping[Path, tuple[Tensor, str]],
  transforms: Mapping[str, Transform],
  dtype: np.dtype[Any],
  progress: Progress | None = None,
  place: Place | None = None,
) -> dict[Any, Any]:
  """Reads, transforms, casts and hands to JAX, one tensor at a time.

  Args:
    planned: what `plan` returned.
    transforms: array functions by the names the rules use.
    dtype: the float type of every parameter.
    progress: called with a line of text about once a tenth.
    place: (path, array) -> the array on its devices; None for the default one.

  Returns:
    Nested dicts of JAX arrays.
  """
  leaves: dict[Path, jax.Array] = {}
  total, shown = len(planned), 0
  for count, (path, (tensor, transform)) in enumerate(planned.items(), 1):
    array = tensor.read()
    if transform:
      array = transforms[transform](array)
    array = np.ascontiguousarray(cast(array, dtype, tensor.name))
    leaves[path] = jnp.asarray(array) if place is None else place(path, array)
    del array
    if progress is not None and count * 10 // total > shown:
      shown = count * 10 // total
      progress(f"read {count} of {total} tensors")
  return unflatten(leaves)
