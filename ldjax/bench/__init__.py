"""Comparisons of decoding methods, measured in one run."""

from ldjax.bench._breakdown import breakdown, predicted_tokens_per_second
from ldjax.bench._compare import compare
from ldjax.bench._first_token import first_token
from ldjax.bench._last_words import compare_last_words, last_words
from ldjax.bench._logits import next_logits, read_logits
from ldjax.bench._margin import NEAR_TIE, is_near_tie, margin
from ldjax.bench._memory import TraceEntry, compare_memory, memory_trace
from ldjax.bench._methods import BASELINE, Method, make_methods
from ldjax.bench._prompts import read_prompts
from ldjax.bench._transformers import TransformersModel
from ldjax.bench._work import Work, work_of

__all__ = [
  "BASELINE",
  "NEAR_TIE",
  "Method",
  "TraceEntry",
  "TransformersModel",
  "Work",
  "breakdown",
  "compare",
  "compare_last_words",
  "compare_memory",
  "first_token",
  "is_near_tie",
  "last_words",
  "make_methods",
  "margin",
  "memory_trace",
  "next_logits",
  "predicted_tokens_per_second",
  "read_logits",
  "read_prompts",
  "work_of",
]
