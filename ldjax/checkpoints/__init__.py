"""Models, drafts and states on disk: GGUF, Hugging Face, Medusa, Orbax."""

from ldjax._cache_folder import cache_folder
from ldjax.checkpoints._convert import convert
from ldjax.checkpoints._demo import fetch_demo
from ldjax.checkpoints._draft import (
  DraftFile,
  DraftTarget,
  read_draft,
  write_draft,
)
from ldjax.checkpoints._gguf_file import read_gguf_metadata
from ldjax.checkpoints._inspect import Contents, inspect
from ldjax.checkpoints._medusa import (
  has_medusa_heads,
  read_medusa,
  write_medusa,
)
from ldjax.checkpoints._read import Checkpoint, read, read_config
from ldjax.checkpoints._resolve import resolve
from ldjax.checkpoints._state import restore_state, save_state

__all__ = [
  "Checkpoint",
  "Contents",
  "DraftFile",
  "DraftTarget",
  "cache_folder",
  "convert",
  "fetch_demo",
  "has_medusa_heads",
  "inspect",
  "read",
  "read_config",
  "read_draft",
  "read_gguf_metadata",
  "read_medusa",
  "resolve",
  "restore_state",
  "save_state",
  "write_draft",
  "write_medusa",
]
