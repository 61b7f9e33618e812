"""What decoding costs here, what it could gain, and which tree to use next."""

from ldjax.optimize._adapt import LadderPlan, LadderTrack, make_plan
from ldjax.optimize._ceiling import Ceiling, chain_ceiling, tree_ceiling
from ldjax.optimize._cost import CostCurve, default_ratio
from ldjax.optimize._costs_file import load_costs
from ldjax.optimize._measure import measure_costs
from ldjax.optimize._oracle import OracleParams, oracle, oracle_params
from ldjax.optimize._plan import plan_ladder
from ldjax.optimize._tune_kernels import tune_kernels

__all__ = [
  "Ceiling",
  "CostCurve",
  "LadderPlan",
  "LadderTrack",
  "OracleParams",
  "chain_ceiling",
  "default_ratio",
  "load_costs",
  "make_plan",
  "measure_costs",
  "oracle",
  "oracle_params",
  "plan_ladder",
  "tree_ceiling",
  "tune_kernels",
]
