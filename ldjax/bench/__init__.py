"""Comparisons of decoding methods, measured in one run."""

from ldjax.bench._compare import BASELINE, compare, make_methods
from ldjax.bench._margin import NEAR_TIE, is_near_tie, margin, next_logits
from ldjax.bench._prompts import read_prompts

__all__ = [
  "BASELINE",
  "NEAR_TIE",
  "compare",
  "is_near_tie",
  "make_methods",
  "margin",
  "next_logits",
  "read_prompts",
]
