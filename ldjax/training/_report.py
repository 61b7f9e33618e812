"""What trained heads are worth, on text that they were not trained on."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ldjax import _base, decoding
from ldjax.training import _loss, _windows


class Calibration(NamedTuple):
  """Measured acceptance of a draft's guesses."""

  acceptance: np.ndarray
  """[D, R] how often the guess of rank r at depth d + 1 was the target's
  token, where the tokens before were among the first R guesses too."""
  places: np.ndarray
  """[D] how many places that was measured at."""
  coverage: float
  """Share of the target's tokens that the draft's vocabulary has."""

  def as_json(self) -> dict[str, Any]:
    """As it is kept in a draft's `config.json`."""
    return {
      "acceptance": [
        [round(float(x), 5) for x in row] for row in self.acceptance
      ],
      "places": self.places.tolist(),
      "coverage": round(self.coverage, 5),
    }

  def expected_tokens(self, size: int) -> float:
    """Tokens a round of the best tree of that size."""
    tree = decoding.best_tree(self.acceptance, size)
    return decoding.expected_length(tree, self.acceptance)


def calibrate(
  heads: _base.HeadsFn,
  params: Any,
  token_index: np.ndarray,
  windows: _windows.Windows,
  *,
  ranks: int = 8,
  batch: int = 16,
) -> Calibration:
  """Measures acceptance by depth and rank along the target's own texts.

  Args:
    heads: as pure functions.
    params: of the heads, borrowed parts included.
    token_index: [V], see `inverse`.
    windows: held-out texts.
    ranks: R.
    batch: windows at a time.
  """
  index = jnp.asarray(token_index)
  count = jax.jit(
    lambda params, part: _loss.ranks(heads, params, index, part, ranks)
  )
  total = np.zeros((heads.depth, ranks + 1))
  answers = known = 0
  for make in windows.in_order(batch):
    part = make()
    total += np.asarray(count(params, part))
    written = token_index[np.asarray(part.tokens)[np.asarray(part.answers)]]
    answers += written.size
    known += int((written >= 0).sum())
  places = total[:, -1]
  return Calibration(
    total[:, :-1] / np.maximum(places, 1)[:, None],
    places.astype(np.int64),
    known / max(answers, 1),
  )
