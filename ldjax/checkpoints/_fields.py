"""Objects of a JSON file that must hold certain keys of certain types.

Every function raises ValueError that names the file and the key.
"""

import dataclasses
import pathlib
import typing
from collections.abc import Container
from typing import Any


def section(raw: dict[str, Any], key: str, file: pathlib.Path) -> Any:
  """The object under a key."""
  value = raw.get(key)
  if not isinstance(value, dict):
    raise ValueError(f"{file}: {key} is {value!r}; an object is wanted there")
  return value


def only(
  says: dict[str, Any],
  wanted: Any,
  what: str,
  file: Any,
  optional: Container[str] = (),
) -> None:
  """Checks that an object has these keys; the optional ones may be absent."""
  for key in says:
    if key not in wanted:
      raise ValueError(
        f"{file}: {what} holds {key}, which this version does not know"
      )
  for key in wanted:
    if key not in says and key not in optional:
      raise ValueError(f"{file}: {what} lacks {key}")


def word(kind: Any) -> str:
  """A type as a message names it."""
  return kind.__name__ if isinstance(kind, type) else str(kind)


def parse(cls: Any, says: dict[str, Any], what: str, file: pathlib.Path) -> Any:
  """A dataclass from its fields; one with a default may be left out."""
  fields = {field.name: field for field in dataclasses.fields(cls)}
  optional = [
    name
    for name, field in fields.items()
    if field.default is not dataclasses.MISSING
  ]
  only(says, fields, what, file, optional)
  values = {}
  for key, value in says.items():
    kind: Any = fields[key].type
    inner = [x for x in typing.get_args(kind) if dataclasses.is_dataclass(x)]
    if inner and isinstance(value, dict):
      value = parse(inner[0], value, key, file)
    elif kind is float and type(value) is int:
      value = float(value)
    if not isinstance(value, kind) or (
      isinstance(value, bool) and kind is not bool
    ):
      raise ValueError(
        f"{file}: {key} is {value!r}; {word(kind)} is wanted there"
      )
    values[key] = value
  try:
    return cls(**values)
  except ValueError as error:
    raise ValueError(f"{file}: {error}") from error
