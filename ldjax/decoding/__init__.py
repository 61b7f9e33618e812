"""Token trees, drafts, and the round that verifies them."""

from ldjax._base import (
  Acceptance,
  Cache,
  CacheView,
  Candidates,
  Decoder,
  DecoderParams,
  DraftContext,
  DraftFn,
  Draws,
  HeadsFn,
  Observation,
  Round,
  Scores,
  Status,
  TargetFn,
  TargetOutput,
  last_observed,
)
from ldjax.decoding._acceptance import accept
from ldjax.decoding._draft import root_only
from ldjax.decoding._dynamic_tree import dynamic_tree
from ldjax.decoding._loop import decode, trace
from ldjax.decoding._model_heads import model_heads
from ldjax.decoding._ngram import NgramGuess, ngram
from ldjax.decoding._rows import park, resume
from ldjax.decoding._search import best_tree, expected_length
from ldjax.decoding._speculative import autoregressive, speculative
from ldjax.decoding._state import (
  MAX_STOP_IDS,
  DecodeState,
  stop_ids_row,
)
from ldjax.decoding._static_tree import static_tree
from ldjax.decoding._tree import TokenTree

__all__ = [
  "MAX_STOP_IDS",
  "Acceptance",
  "Cache",
  "CacheView",
  "Candidates",
  "DecodeState",
  "Decoder",
  "DecoderParams",
  "DraftContext",
  "DraftFn",
  "Draws",
  "HeadsFn",
  "NgramGuess",
  "Observation",
  "Round",
  "Scores",
  "Status",
  "TargetFn",
  "TargetOutput",
  "TokenTree",
  "accept",
  "autoregressive",
  "best_tree",
  "decode",
  "dynamic_tree",
  "expected_length",
  "last_observed",
  "model_heads",
  "ngram",
  "park",
  "resume",
  "root_only",
  "speculative",
  "static_tree",
  "stop_ids_row",
  "trace",
]
