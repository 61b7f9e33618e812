"""How the target's token at a position is drawn."""

from ldjax.sampling._draw import draw, warp
from ldjax.sampling._noise import gumbel, sequence_key, threefry2x32
from ldjax.sampling._params import Sampling, make_sampling
from ldjax.sampling._thresholds import top_k_mask, top_p_mask

__all__ = [
  "Sampling",
  "draw",
  "gumbel",
  "make_sampling",
  "sequence_key",
  "threefry2x32",
  "top_k_mask",
  "top_p_mask",
  "warp",
]
