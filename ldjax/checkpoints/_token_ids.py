"""The map of ids of a draft that guesses a part of the vocabulary."""

import pathlib
from typing import Any

import jax.numpy as jnp

from ldjax import models
from ldjax.checkpoints import _rules

NAME = "token_ids"


def read_ids(
  config: models.DraftConfig,
  planned: dict[_rules.Path, _rules.Source],
  file: pathlib.Path,
  place: _rules.Place | None,
) -> dict[str, Any]:
  """Takes the map out of a plan and reads it.

  It is small, and what is wrong with it is to be told before weights are read.

  Args:
    config: of the draft.
    planned: from `_rules.plan`; the map's entry is removed.
    file: for messages.
    place: (path, host array) -> the array on its devices; None for the default
      one.

  Returns:
    `{"token_ids": [W] int32}`, or nothing where there is no map.

  Raises:
    ValueError: for another length, an id twice, or one that the target lacks.
  """
  found = planned.pop((NAME,), None)
  if found is None:
    return {}
  try:
    ids = models.check_token_ids(config, found.tensor.read())
  except ValueError as error:
    raise ValueError(f"{file}: {error}") from error
  return {NAME: jnp.asarray(ids) if place is None else place((NAME,), ids)}
