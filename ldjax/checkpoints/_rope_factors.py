"""The `llama3` rotary stretch, found again from a GGUF file's factors.

GGUF files of Llama 3.1 and later do not name the stretch; they carry its
result, `rope_freqs.weight`, the number by which each rotary frequency is
divided. With x = 1 / wavelength, the stretch says

  1 / factor(x) = 1 / F + (1 - 1 / F) * clip((O x - low) / (high - low), 0, 1)

so F is the largest factor and the rest is one line in x: the common setting is
tried first, else the line is fitted. O, low and high are determined only up to
a common multiple, which changes no frequency. What is found is accepted only if
it gives the file's factors again.

Source: Llama 3.1's reference code (`apply_scaling`).
"""

import math

import numpy as np

from ldjax import models

# The file holds float32 of a float64 computation: half an ulp, times a margin.
_TOLERANCE = 1e-5
_USUAL_LOW, _USUAL_HIGH, _USUAL_CONTEXT = 1.0, 4.0, 8192


def factors(
  scaling: models.RopeScaling, theta: float, head_dim: int
) -> np.ndarray:
  """The divisors of the H/2 rotary frequencies.

  Args:
    scaling: the stretch.
    theta: base of the rotary frequencies.
    head_dim: H.

  Returns:
    `[H / 2]`, float64.
  """
  exponent = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
  cycles = theta**-exponent / (2 * math.pi)
  smooth = (
    scaling.original_max_position_embeddings * cycles - scaling.low_freq_factor
  ) / (scaling.high_freq_factor - scaling.low_freq_factor)
  share = np.clip(smooth, 0.0, 1.0)
  return 1.0 / ((1.0 - share) / scaling.factor + share)


def recover(
  found: np.ndarray,
  theta: float,
  head_dim: int,
  original_context: int | None,
  file: str,
) -> models.RopeScaling | None:
  """The stretch that gives these factors, or an error.

  Args:
    found: `[H / 2]`, the file's factors.
    theta: base of the rotary frequencies.
    head_dim: H.
    original_context: the context before stretching in tokens, if the file
      says.
    file: its name, for messages.

  Returns:
    The stretch; None if every factor is 1.

  Raises:
    ValueError: if no `llama3` stretch gives these factors.
  """
  found = np.asarray(found, np.float64).reshape(-1)
  if found.size != head_dim // 2:
    raise ValueError(
      f"{file}: tensor 'rope_freqs.weight' has {found.size} factors and the"
      f" head {head_dim // 2} frequencies"
    )
  if not np.all(np.isfinite(found)) or np.any(found <= 0):
    raise ValueError(f"{file}: tensor 'rope_freqs.weight' is damaged")
  if np.all(found == 1.0):
    return None
  largest = float(found.max())
  context = original_context or _USUAL_CONTEXT
  guesses = [
    models.RopeScaling(
      factor=largest,
      low_freq_factor=_USUAL_LOW,
      high_freq_factor=_USUAL_HIGH,
      original_max_position_embeddings=context,
    )
  ]
  exponent = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
  cycles = theta**-exponent / (2 * math.pi)
  between = (found > 1.0 + 1e-6) & (found < largest * (1.0 - 1e-6))
  if np.sum(between) >= 2:
    share = (1 / found[between] - 1 / largest) / (1 - 1 / largest)
    slope, offset = np.polyfit(cycles[between], share, 1)
    if slope > 0:
      width = context / slope
      guesses.append(
        models.RopeScaling(
          factor=largest,
          low_freq_factor=float(-offset * width),
          high_freq_factor=float((1 - offset) * width),
          original_max_position_embeddings=context,
        )
      )
  for guess in guesses:
    if np.allclose(
      factors(guess, theta, head_dim), found, rtol=_TOLERANCE, atol=0.0
    ):
      return guess
  raise ValueError(
    f"{file}: the factors in tensor 'rope_freqs.weight' (1 to {largest:g}) are"
    " not those of a llama3 stretch; this rope scaling is not supported"
  )
