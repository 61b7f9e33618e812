"""Target models and draft heads in Flax NNX, and their functional form."""

from ldjax.models._config import (
  FUSIONS,
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
from ldjax.models._eagle3 import Eagle3Config, Eagle3Draft
from ldjax.models._functionalize import (
  DraftConfig,
  abstract_model,
  abstract_params,
  feature_layers,
  functionalize,
  functionalize_draft,
)
from ldjax.models._fuse import fuse, possible_fusions
from ldjax.models._heads import Heads, target_width
from ldjax.models._hydra import (
  HydraConfig,
  HydraHeads,
  HydraMlpConfig,
  HydraMlpHeads,
)
from ldjax.models._layers import rotary_frequencies
from ldjax.models._linear import OtherWeight, linear
from ldjax.models._medusa import MedusaConfig, MedusaHeads
from ldjax.models._quantized import PRECISIONS, NarrowWeight, narrow
from ldjax.models._recurrent import RecurrentConfig, RecurrentDraft
from ldjax.models._transformer import Transformer

__all__ = [
  "FUSIONS",
  "PRECISIONS",
  "DraftConfig",
  "Eagle3Config",
  "Eagle3Draft",
  "EagleConfig",
  "EagleDraft",
  "Heads",
  "HydraConfig",
  "HydraHeads",
  "HydraMlpConfig",
  "HydraMlpHeads",
  "LinearRopeScaling",
  "MedusaConfig",
  "MedusaHeads",
  "NarrowWeight",
  "OtherWeight",
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
  "feature_layers",
  "functionalize",
  "functionalize_draft",
  "fuse",
  "init_draft",
  "linear",
  "narrow",
  "output_rows",
  "partition_draft",
  "possible_fusions",
  "rotary_frequencies",
  "target_width",
]
