"""Published figures of accelerators."""

from typing import NamedTuple


class Accelerator(NamedTuple):
  """One chip or card, by its maker's figures."""

  name: str
  """As it is called."""
  flops_per_second: float
  """Peak of dense bf16 products, sums in float32."""
  bytes_per_second: float
  """Peak of its memory."""
  memory_bytes: float
  """Its memory."""
  source: str
  """Where the figures stand."""


ACCELERATORS = (
  Accelerator("TPU v5e", 197e12, 819e9, 16e9, "cloud.google.com/tpu/docs/v5e"),
  Accelerator("TPU v5p", 459e12, 2765e9, 95e9, "cloud.google.com/tpu/docs/v5p"),
  Accelerator("TPU v6e", 918e12, 1640e9, 32e9, "cloud.google.com/tpu/docs/v6e"),
  Accelerator("A100 SXM 80GB", 312e12, 2039e9, 80e9, "NVIDIA A100 datasheet"),
  Accelerator("H100 SXM", 989e12, 3350e9, 80e9, "NVIDIA H100 datasheet"),
  Accelerator("H200 SXM", 989e12, 4800e9, 141e9, "NVIDIA H200 datasheet"),
  Accelerator(
    "RTX 4090", 165e12, 1008e9, 24e9, "NVIDIA Ada architecture whitepaper"
  ),
)
"""Those that `project` knows."""
