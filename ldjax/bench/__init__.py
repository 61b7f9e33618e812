"""Comparisons of decoding methods, measured in one run."""

from ldjax.bench._breakdown import breakdown, predicted_tokens_per_second
from ldjax.bench._compare import BASELINE, compare, make_methods
from ldjax.bench._margin import NEAR_TIE, is_near_tie, margin, next_logits
from ldjax.bench._memory import TraceEntry, compare_memory, memory_trace
from ldjax.bench._prompts import read_prompts

__all__ = [
  "BASELINE",
  "NEAR_TIE",
  "TraceEntry",
  "breakdown",
  "compare",
  "compare_memory",
  "is_near_tie",
  "make_methods",
  "margin",
  "memory_trace",
  "next_logits",
  "predicted_tokens_per_second",
  "read_prompts",
]
