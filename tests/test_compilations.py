"""Programs are counted by the block in which they are compiled."""

import jax
import numpy as np

from ldjax import _compilations


def test_compilations_are_counted_by_block():
  with _compilations.counted_compilations() as outer:
    jax.block_until_ready(jax.jit(lambda x: x * 3 + 17)(np.float32(1)))
    with _compilations.counted_compilations() as inner:
      pass
  before = outer.programs
  jax.block_until_ready(jax.jit(lambda x: x * 5 + 19)(np.float32(1)))
  assert (inner.programs, outer.programs) == (0, before)
  assert before >= 1 and outer.seconds > 0
