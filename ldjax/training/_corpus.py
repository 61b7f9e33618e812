"""Texts of a target with its features, in a folder that grows by shards."""

import os
import pathlib
import zipfile
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ldjax.training import _rollout

_FORMAT = 1


class Shard(NamedTuple):
  """Some texts, one after the other."""

  names: np.ndarray
  """[N] int64, which conversation each text is."""
  tokens: np.ndarray
  """[sum S] int32."""
  ends: np.ndarray
  """[N] int64, where each text ends in `tokens`."""
  starts: np.ndarray
  """[N] int64, where the answer begins, counted from the text's beginning."""
  features: np.ndarray
  """[sum S, X] float16; that of a text's last token is zero, for the target
  never read it."""

  def texts(self) -> Iterator[_rollout.Sequence]:
    """The texts, one by one."""
    begins = np.concatenate([[0], self.ends[:-1]])
    for name, begin, end, start in zip(
      self.names.tolist(),
      begins.tolist(),
      self.ends.tolist(),
      self.starts.tolist(),
      strict=True,
    ):
      yield _rollout.Sequence(
        name,
        self.tokens[begin:end],
        start,
        self.features[begin : end - 1],
      )


class Corpus:
  """A folder of shards, each written whole or not at all.

  Args:
    folder: made if it is not there.

  Raises:
    ValueError: for a shard that cannot be read, naming the file.
  """

  def __init__(self, folder: str | os.PathLike[str]):
    self.folder = pathlib.Path(folder)
    self.folder.mkdir(parents=True, exist_ok=True)

  @property
  def files(self) -> list[pathlib.Path]:
    """The shards, in the order in which they were written."""
    return sorted(self.folder.glob("shard_?????.npz"))

  def read(self, file: pathlib.Path, *, features: bool = True) -> Shard:
    """Reads a shard, with or without its features."""
    try:
      # Opened here, for np.load leaves a file that is no archive open.
      with file.open("rb") as raw, np.load(raw, allow_pickle=False) as data:
        if int(data["format"]) != _FORMAT:
          raise ValueError(f"format {int(data['format'])}, not {_FORMAT}")
        tokens = data["tokens"].astype(np.int32)
        return Shard(
          data["names"],
          tokens,
          data["ends"],
          data["starts"],
          data["features"] if features else np.zeros((len(tokens), 0)),
        )
    except (KeyError, ValueError, EOFError, OSError, zipfile.BadZipFile) as e:
      raise ValueError(
        f"{file} is not a whole shard of a corpus ({e}); delete it, and its"
        " texts will be made again"
      ) from e

  def counts(self) -> tuple[set[int], int]:
    """The conversations that are there, and tokens of their answers."""
    names: set[int] = set()
    tokens = 0
    for file in self.files:
      shard = self.read(file, features=False)
      names.update(shard.names.tolist())
      lengths = np.diff(shard.ends, prepend=0)
      tokens += int((lengths - shard.starts).sum())
    return names, tokens

  def write(self, texts: Sequence[_rollout.Sequence]) -> pathlib.Path:
    """Adds a shard.

    Args:
      texts: at least one.
    """
    files = self.files
    number = int(files[-1].stem[-5:]) + 1 if files else 0
    file = self.folder / f"shard_{number:05d}.npz"
    width = texts[0].features.shape[1]
    empty = np.zeros((1, width), np.float16)
    partial = file.with_suffix(".part")
    with partial.open("wb") as out:
      np.savez(
        out,
        format=_FORMAT,
        names=np.array([text.name for text in texts], np.int64),
        tokens=np.concatenate([text.tokens for text in texts]).astype(np.int32),
        ends=np.cumsum([len(text.tokens) for text in texts], dtype=np.int64),
        starts=np.array([text.start for text in texts], np.int64),
        features=np.concatenate(
          [part for text in texts for part in (text.features, empty)]
        ),
      )
    partial.replace(file)
    return file
