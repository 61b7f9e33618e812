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
  Observation,
  Round,
  Scores,
  Status,
  TargetFn,
  TargetOutput,
)
from ldjax.decoding._acceptance import accept
from ldjax.decoding._draft import Heads, last_observed, medusa, ngram, root_only
from ldjax.decoding._loop import decode, trace
from ldjax.decoding._speculative import autoregressive, speculative
from ldjax.decoding._state import (
  MAX_STOP_IDS,
  DecodeState,
  stop_ids_row,
)
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
  "Heads",
  "Observation",
  "Round",
  "Scores",
  "Status",
  "TargetFn",
  "TargetOutput",
  "TokenTree",
  "accept",
  "autoregressive",
  "decode",
  "last_observed",
  "medusa",
  "ngram",
  "root_only",
  "speculative",
  "stop_ids_row",
  "trace",
]
