"""Lossless speculative decoding for JAX."""

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

__all__ = [
  "checkpoints",
  "decoding",
  "memory",
  "models",
  "pallas_kernels",
  "sampling",
  "testing",
  "text",
]
