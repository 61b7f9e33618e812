"""Target models and draft heads in Flax NNX, and their functional form."""

from ldjax.models._config import (
  LinearRopeScaling,
  RopeFactors,
  RopeScaling,
  TransformerConfig,
)
from ldjax.models._draft_params import (
  abstract_draft,
  borrow,
  check_token_ids,
  combine_draft,
  init_draft,
  output_rows,
  partition_draft,
)
from ldjax.models._eagle import EagleConfig, EagleDraft
from ldjax.models._functionalize import (
  DraftConfig,
  abstract_model,
  abstract_params,
  functionalize,
  functionalize_draft,
)
from ldjax.models._heads import Heads
from ldjax.models._hydra import HydraConfig, HydraHeads
from ldjax.models._layers import rotary_frequencies
from ldjax.models._linear import linear
from ldjax.models._medusa import MedusaConfig, MedusaHeads
from ldjax.models._recurrent import RecurrentConfig, RecurrentDraft
from ldjax.models._transformer import Transformer

__all__ = [
  "DraftConfig",
  "EagleConfig",
  "EagleDraft",
  "Heads",
  "HydraConfig",
  "HydraHeads",
  "LinearRopeScaling",
  "MedusaConfig",
  "MedusaHeads",
  "RecurrentConfig",
  "RecurrentDraft",
  "RopeFactors",
  "RopeScaling",
  "Transformer",
  "TransformerConfig",
  "abstract_draft",
  "abstract_model",
  "abstract_params",
  "borrow",
  "check_token_ids",
  "combine_draft",
  "functionalize",
  "functionalize_draft",
  "init_draft",
  "linear",
  "output_rows",
  "partition_draft",
  "rotary_frequencies",
]
