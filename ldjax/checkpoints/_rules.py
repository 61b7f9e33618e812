"""Which tensor of a file becomes which parameter, as data, applied strictly.

A family's table is a tuple of `Rule`. Every tensor of the file must match
exactly one rule, every parameter must be given exactly once, and every shape
must be the configuration's; what does not fit is an error that names the
tensor. All of this is decided before the first weight is read.
"""

import dataclasses
import itertools
import pathlib
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Progress = Callable[[str], None]
Path = tuple[str | int, ...]
Transform = Callable[[np.ndarray], np.ndarray]
Place = Callable[[Path, np.ndarray], jax.Array]


_PART = 1 << 16


@dataclasses.dataclass(frozen=True)
class Rule:
  """One line of a family's table.

  Args:
    pattern: a regular expression that must match a whole tensor name.
    target: the parameter's path, segments joined by "/", with `{0}`, `{1}`, …
      for the pattern's groups; a tuple of several if the tensor holds their
      rows one after the other; None for a tensor that is known and not needed.
    transform: the name of what is done to the array; "" for nothing.
    transposed: whether the file holds the axes in the other order.
  """

  pattern: str
  target: str | tuple[str, ...] | None
  transform: str = ""
  transposed: bool = False


class Source(NamedTuple):
  """Where a parameter comes from.

  Args:
    tensor: the tensor that holds it.
    rule: what is done to that.
    rows: those of the result that are the parameter; None for all.
  """

  tensor: "Tensor"
  rule: Rule
  rows: slice | None


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


def count_not_finite(array: np.ndarray) -> int:
  """How many floats of an array are NaN or infinite.

  By their bits: a bfloat16 takes a third of the time of `np.isfinite`.
  """
  bits = np.ascontiguousarray(array).reshape(-1)
  bits = bits.view(f"u{array.dtype.itemsize}")
  infinite = np.array(np.inf, array.dtype).view(bits.dtype)
  without_sign = bits.dtype.type(np.iinfo(bits.dtype).max >> 1)
  # In parts that fit a cache.
  return sum(
    int(np.count_nonzero((bits[i : i + _PART] & without_sign) >= infinite))
    for i in range(0, bits.size, _PART)
  )


def _warn_not_finite(array: np.ndarray, tensor: Tensor) -> None:
  bad = count_not_finite(array)
  if bad:
    warnings.warn(
      f"{tensor.file}: tensor {tensor.name!r} holds {bad} values that are not"
      f" finite, of {array.size}",
      stacklevel=2,
    )


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


def knows(rules: Iterable[Rule], name: str) -> bool:
  """Whether a table has a line for a tensor."""
  return any(re.fullmatch(rule.pattern, name) for rule in rules)


def unneeded(rules: Iterable[Rule], name: str) -> bool:
  """Whether a table knows a tensor as one that is not needed."""
  return any(
    rule.target is None and re.fullmatch(rule.pattern, name) for rule in rules
  )


def _match(
  rules: Iterable[Rule], tensor: Tensor
) -> tuple[Rule, tuple[Path, ...]]:
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
    return rule, ()
  named = (rule.target,) if isinstance(rule.target, str) else rule.target
  paths = []
  for target in named:
    parts = target.format(*found.groups()).split("/")
    paths.append(tuple(int(p) if p.isdecimal() else p for p in parts))
  return rule, tuple(paths)


def _sources(
  rule: Rule, tensor: Tensor, shapes: Sequence[tuple[int, ...]]
) -> list[Source]:
  """What a tensor gives each of the parameters of these shapes."""
  rows = [shape[0] for shape in shapes]
  asked = (sum(rows), *shapes[0][1:])
  if rule.transposed:
    asked = asked[::-1]
  if asked != tensor.shape:
    raise ValueError(
      f"{tensor.file}: tensor {tensor.name!r} has shape"
      f" {tensor.shape}; the configuration asks for {asked}"
    )
  if len(shapes) == 1:
    return [Source(tensor, rule, None)]
  ends = list(itertools.accumulate(rows))
  return [
    Source(tensor, rule, slice(end - size, end))
    for end, size in zip(ends, rows, strict=True)
  ]


def targets(
  rules: Iterable[Rule], tensors: Iterable[Tensor]
) -> dict[Path, Tensor]:
  """The tensors of a file by the parameters that they would be.

  For what a file's shapes tell of its configuration; `plan` checks the rest.

  Raises:
    ValueError: for a tensor that no rule or more than one rule knows.
  """
  rules = tuple(rules)
  found: dict[Path, Tensor] = {}
  for tensor in tensors:
    _, paths = _match(rules, tensor)
    found |= dict.fromkeys(paths, tensor)
  return found


def plan(
  rules: Iterable[Rule],
  tensors: Iterable[Tensor],
  abstract: Mapping[Any, Any],
) -> dict[Path, Source]:
  """Gives every parameter its tensor, or says what does not fit.

  Args:
    rules: the family's table.
    tensors: everything that the files offer.
    abstract: nested dicts of `jax.ShapeDtypeStruct`, the parameters wanted.

  Returns:
    For each parameter's path, where it comes from.

  Raises:
    ValueError: for a tensor that no rule or more than one rule knows, a
      parameter given twice or not at all, or a shape that differs.
  """
  rules = tuple(rules)
  wanted = flatten(abstract)
  given: dict[Path, Source] = {}
  files: dict[str, None] = {}
  for tensor in tensors:
    files[tensor.file] = None
    rule, paths = _match(rules, tensor)
    for path in paths:
      if path not in wanted:
        raise ValueError(
          f"{tensor.file}: tensor {tensor.name!r} would be parameter"
          f" {_show(path)}, which the configuration does not have (number of"
          " layers, biases, q/k norms or tie_word_embeddings)"
        )
      if path in given:
        raise ValueError(
          f"parameter {_show(path)} is given twice: by"
          f" {given[path].tensor.name!r} in {given[path].tensor.file} and by"
          f" {tensor.name!r} in {tensor.file}"
        )
    if paths:
      shapes = [tuple(wanted[path].shape) for path in paths]
      given |= zip(paths, _sources(rule, tensor, shapes), strict=True)
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


class Plan(NamedTuple):
  """Where all parameters come from, and what is done to them."""

  sources: Mapping[Path, Source]
  """What `plan` returned."""
  transforms: Mapping[str, Transform]
  """Array functions by the names the rules use."""
  dtype: np.dtype[Any]
  """The float type of every parameter."""

  @property
  def order(self) -> list[list[Path]]:
    """The parameters of each tensor, in the order in which they are read."""
    pieces: dict[str, list[Path]] = {}
    for path, source in self.sources.items():
      pieces.setdefault(source.tensor.name, []).append(path)
    return list(pieces.values())


def arrays(
  whole: Plan, progress: Progress | None = None, *, warn: bool = True
) -> Iterator[tuple[Path, np.ndarray]]:
  """Reads, transforms and casts, one tensor at a time.

  Args:
    whole: the plan.
    progress: called with a line of text about once a tenth.
    warn: whether to warn of tensors with values that are not finite, by name.

  Yields:
    Each parameter's path and array, in the plan's order.
  """
  total, shown = len(whole.order), 0
  for count, paths in enumerate(whole.order, 1):
    tensor, rule, _ = whole.sources[paths[0]]
    array = tensor.read()
    if warn:
      _warn_not_finite(array, tensor)
    if rule.transform:
      array = whole.transforms[rule.transform](array)
    array = cast(array, whole.dtype, tensor.name)
    if rule.transposed:
      array = array.T
    for path in paths:
      rows = whole.sources[path].rows
      yield path, np.ascontiguousarray(array if rows is None else array[rows])
    del array
    if progress is not None and count * 10 // total > shown:
      shown = count * 10 // total
      progress(f"read {count} of {total} tensors")


def execute(
  whole: Plan,
  progress: Progress | None = None,
  place: Place | None = None,
) -> dict[Any, Any]:
  """Hands what `arrays` reads to JAX.

  Args:
    whole: the plan.
    progress: called with a line of text about once a tenth.
    place: (path, array) -> the array on its devices; None for the default one.

  Returns:
    Nested dicts of JAX arrays.
  """
  leaves: dict[Path, jax.Array] = {}
  for path, array in arrays(whole, progress):
    leaves[path] = jnp.asarray(array) if place is None else place(path, array)
  return unflatten({path: leaves[path] for path in whole.sources})
