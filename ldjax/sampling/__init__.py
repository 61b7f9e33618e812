"""How the target's token at a position is drawn."""

from ldjax.sampling._adjust import History, adjust
from ldjax.sampling._draw import deciding, draw, warp
from ldjax.sampling._noise import (
  gumbel,
  gumbel_at,
  gumbel_tile,
  sequence_key,
  threefry2x32,
)
from ldjax.sampling._params import (
  MAX_BANNED_IDS,
  Sampling,
  host_sampling,
  id_row,
  make_sampling,
)
from ldjax.sampling._thresholds import min_p_mask, top_k_mask, top_p_mask

__all__ = [
  "MAX_BANNED_IDS",
  "History",
  "Sampling",
  "adjust",
  "deciding",
  "draw",
  "gumbel",
  "gumbel_at",
  "gumbel_tile",
  "host_sampling",
  "id_row",
  "make_sampling",
  "min_p_mask",
  "sequence_key",
  "threefry2x32",
  "top_k_mask",
  "top_p_mask",
  "warp",
]
