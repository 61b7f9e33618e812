"""Typed access to a config.json."""

import pathlib
from collections.abc import Mapping
from typing import Any

# Twice what any published model has: of more each would be laid out
# before the tensors could tell that a number is damaged.
_MOST_LAYERS = 256


def check_layers(num_layers: int, name: str, file: pathlib.Path) -> int:
  """The number of layers, if a model can have that many.

  Raises:
    ValueError: naming the limit.
  """
  if num_layers > _MOST_LAYERS:
    raise ValueError(
      f"{file}: {name} is {num_layers}; models of at most {_MOST_LAYERS} layers"
      " are read, so the file may be damaged"
    )
  return num_layers


class Keys:
  """Typed access to a config.json, with errors that name file and key.

  Args:
    raw: the JSON object.
    absent: what a missing key stands for.
    file: where it was, for messages.
    names: what the file calls a key, where that differs.
  """

  def __init__(
    self,
    raw: Mapping[str, Any],
    absent: Mapping[str, Any],
    file: pathlib.Path,
    names: Mapping[str, str] | None = None,
  ):
    self.raw = raw
    self.absent = absent
    self.file = file
    self.names = names or {}

  def name(self, key: str) -> str:
    """What the file calls a key."""
    return self.names.get(key, key)

  def get(self, key: str, default: Any = None) -> Any:
    """The value of a key; the family's for a missing one, None for a null."""
    name = self.name(key)
    return self.raw[name] if name in self.raw else self.absent.get(key, default)

  def integer(self, key: str, default: int | None = None) -> int:
    """An integer; the default also for a null."""
    value = self.get(key, default)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int):
      found = "missing" if value is None else repr(value)
      raise ValueError(
        f"{self.file}: {self.name(key)} is {found}; an integer is needed"
      )
    return value

  def number(self, key: str, default: float) -> float:
    """A float; the default also for a null."""
    value = self.get(key, default)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float):
      raise ValueError(
        f"{self.file}: {self.name(key)} is {value!r}, not a number"
      )
    return float(value)

  def flag(self, key: str) -> bool:
    """True or false; false also for a null."""
    value = self.get(key)
    if value is not None and not isinstance(value, bool):
      raise ValueError(
        f"{self.file}: {self.name(key)} is {value!r}; true or false is needed"
      )
    return bool(value)

  def layers(self, key: str, num_layers: int) -> list[Any] | None:
    """A list with an entry for each layer, or None."""
    value = self.get(key)
    if value is None:
      return None
    if not isinstance(value, list) or len(value) < num_layers:
      raise ValueError(
        f"{self.file}: {self.name(key)} is {value!r:.80}; a list with an entry"
        f" for each of the {num_layers} layers is needed"
      )
    return value[:num_layers]
