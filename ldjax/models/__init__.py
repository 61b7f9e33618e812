"""Target models and draft heads in Flax NNX, and their functional form."""

from ldjax.models._config import RopeScaling, TransformerConfig
from ldjax.models._functionalize import (
  HeadsFn,
  abstract_heads,
  abstract_model,
  abstract_params,
  functionalize,
  functionalize_heads,
)
from ldjax.models._layers import rotary_frequencies
from ldjax.models._linear import linear
from ldjax.models._medusa import MedusaConfig, MedusaHeads
from ldjax.models._transformer import Transformer

__all__ = [
  "HeadsFn",
  "MedusaConfig",
  "MedusaHeads",
  "RopeScaling",
  "Transformer",
  "TransformerConfig",
  "abstract_heads",
  "abstract_model",
  "abstract_params",
  "functionalize",
  "functionalize_heads",
  "linear",
  "rotary_frequencies",
]
