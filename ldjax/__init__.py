"""Lossless speculative decoding for JAX.

`load` a model, `generate` or `stream` text; or take the pieces: a target
(`models`), a cache (`memory`), a draft and a decoder (`decoding`) are pure
functions for your own `jit`.
"""

from ldjax import (
  checkpoints,
  contrib,
  decoding,
  memory,
  models,
  pallas_kernels,
  sampling,
  testing,
  text,
)
from ldjax._convert import convert
from ldjax._generate import Stream, generate, stream
from ldjax._generation import Generation
from ldjax._load import load
from ldjax._pages import MemoryCounts
from ldjax._plan import plan
from ldjax._request import encode_prompt
from ldjax._serve import Server, ServerStats, serve
from ldjax._settings import Settings
from ldjax._show import RoundView, show_round
from ldjax._ticket import Ticket
from ldjax.assemble import (
  LanguageModel,
  Rung,
  parse_tree,
  with_draft,
  with_target,
)

__all__ = [
  "Generation",
  "LanguageModel",
  "MemoryCounts",
  "RoundView",
  "Rung",
  "Server",
  "ServerStats",
  "Settings",
  "Stream",
  "Ticket",
  "checkpoints",
  "contrib",
  "convert",
  "decoding",
  "encode_prompt",
  "generate",
  "load",
  "memory",
  "models",
  "pallas_kernels",
  "parse_tree",
  "plan",
  "sampling",
  "serve",
  "show_round",
  "stream",
  "testing",
  "text",
  "with_draft",
  "with_target",
]
