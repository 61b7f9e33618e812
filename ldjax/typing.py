"""Array aliases and the axis alphabet.

Every shape in ldjax is written in one alphabet, that of
`jax.nn.dot_product_attention`:

  B batch rows            T query tokens (tree nodes in a verify pass)
  S key/value positions   N query heads        K key/value heads
  H head size             E model width        F feed-forward width
  V vocabulary            L layers             C draft heads
  D tree depth            P pages in the pool  Z slots in a page
  M pages a sequence      R rows selected out of B
"""

from typing import Any, TypeAlias

import jax

Array: TypeAlias = jax.Array
"""A JAX array; its shape is given where it is used."""

Params: TypeAlias = Any
"""A nested plain dict of arrays."""
