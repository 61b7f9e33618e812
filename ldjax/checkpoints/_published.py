"""Drafts of others: which kind a folder holds, and that it fits its target."""

import pathlib
from typing import Any

from ldjax import models
from ldjax.checkpoints import _draft_checks, _eagle_file, _hydra_file, _medusa


def is_there(folder: pathlib.Path) -> bool:
  """Whether a folder has files that may hold a draft of others."""
  return _medusa.is_there(folder) or _hydra_file.holds_hydra(folder)


def read_published(
  folder: pathlib.Path,
  target_config: models.TransformerConfig,
  **options: Any,
) -> tuple[models.DraftConfig, dict[Any, Any]]:
  """Reads Medusa, Hydra or EAGLE drafts, by the files and tensors there are.

  Args:
    folder: with the draft, or a Medusa-2 model.
    target_config: of the model that is to be drafted for.
    **options: `dtype`, `progress` and `place`, as for `read_draft`.

  Returns:
    The draft's shape, and its own parameters.

  Raises:
    FileNotFoundError: for missing files.
    ValueError: for a draft of another model, and for what is not supported or
      does not fit, naming it.
  """
  if _hydra_file.holds_hydra(folder):
    return _hydra_file.read_hydra(folder, target_config, **options)
  if _eagle_file.holds_eagle(folder):
    return _eagle_file.read_eagle(folder, target_config, **options)
  config, params = _medusa.read_medusa(
    folder, vocab_size=target_config.vocab_size, **options
  )
  vocab = config.target_vocab_size or config.vocab_size
  _draft_checks.check_made_for(
    folder,
    (
      ("hidden_size", config.hidden_size, target_config.hidden_size),
      ("vocab_size", vocab, target_config.vocab_size),
    ),
  )
  return config, params
