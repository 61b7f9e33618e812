"""What every reader of a published draft checks and warns of alike."""

import pathlib
import warnings
from collections.abc import Iterable, Mapping
from typing import Any


def check_made_for(
  folder: pathlib.Path, sizes: Iterable[tuple[str, int, int]]
) -> None:
  """Raises ValueError for a draft of another model.

  Args:
    folder: of the draft, for the message.
    sizes: names, what the draft has, and what its target has.
  """
  for field, have, want in sizes:
    if have != want:
      raise ValueError(
        f"{folder}: the draft's {field} is {have}, the target's is {want}; it"
        " was made for another model"
      )


def warn_of_counts(
  says: Mapping[str, Any],
  file: pathlib.Path,
  weights: str,
  counts: Iterable[tuple[str, int, str]],
) -> None:
  """Warns where a config.json counts otherwise than its tensors do.

  Args:
    says: the config.json.
    file: where it was.
    weights: the name of the file of tensors.
    counts: keys, how many there are by the tensors, and of what.
  """
  for key, number, what in counts:
    said = says.get(key)
    if said not in (None, number):
      warnings.warn(
        f"{file}: {key} is {said}, but {weights} holds {number} {what}; using"
        f" the {number} of the file",
        stacklevel=3,
      )
