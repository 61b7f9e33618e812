"""What a round costs by the size of its tree."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

# SmolLM2-135M in float32 on two cores of an x86 CPU: see the README.
_CPU: tuple[tuple[int, ...], tuple[float, ...]] = (
  (1, 2, 4, 8, 16, 32, 64),
  (1.0, 1.30, 1.37, 1.58, 2.26, 3.67, 6.92),
)
# Where weights are read once for all rows, up to hundreds of them.
_ACCELERATOR: tuple[tuple[int, ...], tuple[float, ...]] = (
  (1, 64),
  (1.0, 1.25),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostCurve:
  """Median seconds of a decoder's step by the size of its tree.

  Args:
    sizes: T, nodes of a tree with the root, ascending from 1.
    seconds: of a whole step at each size.
    draft_seconds: of them, those of proposing a tree; 0 at size 1.
    batch: B, rows of a step.
    device: what it was measured on.
    model: what was measured, see `fingerprint`.

  Raises:
    ValueError: for figures that no measurement gives.

  Example:
    >>> curve = CostCurve(
    ...   sizes=(1, 4), seconds=(0.05, 0.08), draft_seconds=(0.0, 0.01),
    ...   batch=1, device="cpu", model="tiny")
    >>> round(curve.at(2), 3), round(curve.at(7), 3), round(curve.ratio(4), 3)
    (0.06, 0.11, 1.6)
  """

  sizes: tuple[int, ...]
  seconds: tuple[float, ...]
  draft_seconds: tuple[float, ...]
  batch: int
  device: str
  model: str

  def __post_init__(self):
    if not self.sizes or self.sizes[0] != 1:
      raise ValueError(
        f"sizes are {self.sizes}; measure size 1 too, all others are compared"
        " with it"
      )
    if list(self.sizes) != sorted(set(self.sizes)):
      raise ValueError(
        f"sizes are {self.sizes}; give them ascending, once each"
      )
    for name in ("seconds", "draft_seconds"):
      values = getattr(self, name)
      if len(values) != len(self.sizes):
        raise ValueError(
          f"{len(values)} {name} for {len(self.sizes)} sizes; give one each"
        )
    for size, whole, part in zip(
      self.sizes, self.seconds, self.draft_seconds, strict=True
    ):
      if not (math.isfinite(whole) and whole > 0 and 0 <= part <= whole):
        raise ValueError(
          f"a step of size {size} takes {whole} s, of which {part} s for the"
          " draft; give a positive time and a part of it"
        )
    if self.batch < 1:
      raise ValueError(f"batch is {self.batch}; it must be at least 1")

  def at(self, size: int) -> float:
    """Seconds of a step with a tree of any size.

    On a line between the measured sizes around it; beyond the largest, as the
    last two go on, but never downwards.

    Args:
      size: T, at least 1.

    Raises:
      ValueError: for a size below 1.
    """
    return _line(self.sizes, self.seconds, size)

  def draft_at(self, size: int) -> float:
    """Seconds of proposing a tree of any size.

    Args:
      size: T, at least 1.

    Raises:
      ValueError: for a size below 1.
    """
    return _line(self.sizes, self.draft_seconds, size)

  def ratio(self, size: int) -> float:
    """A step of a size over one of size 1.

    Args:
      size: T, at least 1.

    Raises:
      ValueError: for a size below 1.
    """
    return self.at(size) / self.seconds[0]


def _line(sizes: Sequence[int], values: Sequence[float], size: int) -> float:
  if size < 1:
    raise ValueError(f"size is {size}; a tree has at least its root, so 1")
  if size <= sizes[-1]:
    return float(np.interp(size, sizes, values))
  if len(sizes) == 1:
    return float(values[0])
  slope = (values[-1] - values[-2]) / (sizes[-1] - sizes[-2])
  return float(values[-1] + max(slope, 0.0) * (size - sizes[-1]))


def default_ratio(platform: str, rows: int) -> float:
  """What a forward over some rows costs, over one row, where nobody measured.

  On a CPU as measured with a model of 135 million parameters; elsewhere
  nearly flat, as where weights are read once for all rows.

  Args:
    platform: as JAX calls it, `"cpu"`, `"gpu"` or `"tpu"`.
    rows: batch times size of the tree.

  Raises:
    ValueError: for fewer than 1 row.

  Example:
    >>> default_ratio("cpu", 4), default_ratio("gpu", 1)
    (1.37, 1.0)
  """
  sizes, ratios = _CPU if platform == "cpu" else _ACCELERATOR
  return _line(sizes, ratios, rows)
