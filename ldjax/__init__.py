"""Lossless speculative decoding for JAX.

`load` a model, `generate` or `stream` text; or take the pieces: a target
(`models`), a cache (`memory`), a draft and a decoder (`decoding`) are pure
functions for your own `jit`.
"""

from ldjax import (
  checkpoints,
  decoding,
  memory,
  models,
  pallas_kernels,
  sampling,
  testing,
  text,
)
from ldjax._generate import Generation, Stream, encode_prompt, generate, stream
from ldjax.assemble import LanguageModel, load, parse_tree, with_draft

__all__ = [
  "Generation",
  "LanguageModel",
  "Stream",
  "checkpoints",
  "decoding",
  "encode_prompt",
  "generate",
  "load",
  "memory",
  "models",
  "pallas_kernels",
  "parse_tree",
  "sampling",
  "stream",
  "testing",
  "text",
  "with_draft",
]
