"""What decoding costs here, what it could gain, and which tree to use next."""

from ldjax.optimize._adapt import LadderPlan, LadderTrack, make_plan
from ldjax.optimize._ceiling import Ceiling, chain_ceiling, tree_ceiling
from ldjax.optimize._cost import CostCurve, default_ratio
from ldjax.optimize._costs_file import load_costs
from ldjax.optimize._decode_plan import (
  DecodePlan,
  apply,
  machine,
  make_mesh,
  model_key,
)
from ldjax.optimize._gains import what_gains
from ldjax.optimize._matrices import narrowed
from ldjax.optimize._measure import compare_steps, measure_costs
from ldjax.optimize._oracle import OracleParams, oracle, oracle_params
from ldjax.optimize._plan import plan_ladder
from ldjax.optimize._precision import Comparison, Difference, choose_precision
from ldjax.optimize._programs import (
  ProgramCounts,
  block_kernels,
  count_program,
  step_program,
)
from ldjax.optimize._tune_kernels import tune_kernels

__all__ = [
  "Ceiling",
  "Comparison",
  "CostCurve",
  "DecodePlan",
  "Difference",
  "LadderPlan",
  "LadderTrack",
  "OracleParams",
  "ProgramCounts",
  "apply",
  "block_kernels",
  "chain_ceiling",
  "choose_precision",
  "compare_steps",
  "count_program",
  "default_ratio",
  "load_costs",
  "machine",
  "make_mesh",
  "make_plan",
  "measure_costs",
  "model_key",
  "narrowed",
  "oracle",
  "oracle_params",
  "plan_ladder",
  "step_program",
  "tree_ceiling",
  "tune_kernels",
  "what_gains",
]
