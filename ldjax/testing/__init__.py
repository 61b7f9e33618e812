"""Fakes and assertions for tests of code that decodes with ldjax."""

from ldjax.testing._assertions import (
  assert_lossless,
  assert_no_recompile,
  decode_tokens,
)
from ldjax.testing._folder import write_tiny_model
from ldjax.testing._tiny import (
  TinyModel,
  pad_prompts,
  random_tree_draft,
  scripted_draft,
  tiny_model,
)

__all__ = [
  "TinyModel",
  "assert_lossless",
  "assert_no_recompile",
  "decode_tokens",
  "pad_prompts",
  "random_tree_draft",
  "scripted_draft",
  "tiny_model",
  "write_tiny_model",
]
