"""Weights of a folder: safetensors or PyTorch files, one or shards."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Container

from ldjax.checkpoints import _rules, _safetensors, _torch_file


@dataclasses.dataclass(frozen=True)
class Format:
  """Names of the files that hold a model's weights."""

  single: str
  """Of all of them in one file."""
  index: str
  """Of what says which shard holds which."""


# Safetensors first: where a folder holds both, the other is the older copy.
FORMATS = (
  Format("model.safetensors", "model.safetensors.index.json"),
  Format("pytorch_model.bin", "pytorch_model.bin.index.json"),
)


def _indexed(index: pathlib.Path) -> dict[str, str]:
  weights = _safetensors.read_json(index).get("weight_map")
  if not isinstance(weights, dict) or not weights:
    raise ValueError(f"{index}: has no weight_map")
  for tensor, name in weights.items():
    if (
      not isinstance(name, str)
      or pathlib.PurePosixPath(name).name != name
      or pathlib.PureWindowsPath(name).name != name
    ):
      raise ValueError(
        f"{index}: tensor {tensor!r} is said to be in {name!r}, which is not a"
        " plain file name inside the folder; refused"
      )
  return weights


def named(folder: pathlib.Path, kind: Format) -> tuple[str, ...]:
  """The files of a folder in one format: those of its index, or a single one.

  Raises:
    ValueError: for a damaged index, or a shard outside the folder.
  """
  index = folder / kind.index
  if index.is_file():
    return tuple(dict.fromkeys(_indexed(index).values()))
  return (kind.single,)


def is_there(folder: pathlib.Path, kind: Format) -> bool:
  """Whether a folder holds weights in a format, whole or in part."""
  return (folder / kind.index).is_file() or (folder / kind.single).is_file()


def names(folder: pathlib.Path) -> list[str]:
  """Names of a folder's tensors, by its index if it has one; none without.

  Raises:
    ValueError: for a damaged index or file.
  """
  for kind in FORMATS:
    if (folder / kind.index).is_file():
      return list(_indexed(folder / kind.index))
    if (folder / kind.single).is_file():
      with Reader() as reader:
        file = folder / kind.single
        tensors = reader.tensors(file, unneeded=lambda name: True)
        return [tensor.name for tensor in tensors]
  return []


def offered(
  reader: "Reader",
  folder: pathlib.Path,
  integers: Container[str] = (),
  unneeded: Callable[[str], bool] = lambda name: False,
) -> list[_rules.Tensor]:
  """All tensors of a folder, checked against its index if it has one.

  Args:
    reader: keeps the files open.
    folder: of a model or a draft.
    integers: see `Reader.tensors`, as is `unneeded`.
    unneeded: whether a tensor of that name will not be read.

  Raises:
    FileNotFoundError: without weights, or with a shard missing.
    ValueError: for a damaged index or file, a shard outside the folder, or
      shards that hold other tensors than the index says.
  """
  kinds = [kind for kind in FORMATS if is_there(folder, kind)]
  if not kinds:
    singles = " or ".join(kind.single for kind in FORMATS)
    raise FileNotFoundError(
      f"{folder}: no weights; {singles} is needed, or shards with their index"
    )
  index = folder / kinds[0].index
  files = [folder / name for name in named(folder, kinds[0])]
  for file in files:
    if not file.is_file():
      raise FileNotFoundError(
        f"{file}: this shard is named by {index.name} and is missing; fetch the"
        " model again"
      )
  tensors = [
    each for file in files for each in reader.tensors(file, integers, unneeded)
  ]
  if index.is_file():
    _check_strays(folder, kinds[0], files)
    _check_index(tensors, _indexed(index), index)
  return tensors


class Reader(contextlib.ExitStack):
  """Files of tensors of either format, open while weights are read."""

  def tensors(
    self,
    path: pathlib.Path,
    integers: Container[str] = (),
    unneeded: Callable[[str], bool] = lambda name: False,
  ) -> list[_rules.Tensor]:
    """What one file offers.

    Args:
      path: the file; by its suffix `.safetensors`, else one of `torch.save`.
      integers: names of tensors that must be integers or truth values; all
        others are floats.
      unneeded: whether a tensor of that name will not be read and may be of
        any type.

    Raises:
      ValueError: for a damaged file, or a tensor of another type.
    """
    if path.suffix == ".safetensors":
      return self.enter_context(_safetensors.Reader()).tensors(
        path, integers, unneeded
      )
    return self.enter_context(_torch_file.Reader()).tensors(
      path, integers, unneeded
    )


def _check_strays(
  folder: pathlib.Path, kind: Format, files: list[pathlib.Path]
) -> None:
  stem, _, suffix = kind.single.rpartition(".")
  for file in sorted(folder.glob(f"{stem}-*-of-*.{suffix}")):
    if file not in files:
      raise ValueError(
        f"{file}: {kind.index} does not name this shard, so it is of another"
        " version of the model; remove what does not belong there"
      )


def _check_index(
  tensors: list[_rules.Tensor], weights: dict[str, str], index: pathlib.Path
) -> None:
  where = {(tensor.name, tensor.file) for tensor in tensors}
  for name, file in weights.items():
    if (name, file) not in where:
      raise ValueError(f"{index}: says {name!r} is in {file}, which lacks it")
  for tensor in tensors:
    if tensor.name not in weights:
      raise ValueError(
        f"{tensor.file}: tensor {tensor.name!r} is not named by {index.name};"
        " it would be left over"
      )
