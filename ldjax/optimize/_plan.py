"""The plan of a model's ladder: its costs, measured or assumed."""

from ldjax import assemble
from ldjax.optimize import _adapt, _cost, _costs_file


def plan_ladder(
  model: assemble.LanguageModel, batch: int = 1
) -> _adapt.LadderPlan:
  """What adaptive decoding needs to know of a model before it begins.

  Costs are those of the curve kept for this batch; or of the one kept for
  batch 1, of which a round of B rows and T nodes takes the place B T; or what
  is usual on the platform.

  Args:
    model: from `load`, with a ladder that begins with a tree of one node.
    batch: B, rows that run together.

  Example:
    plan = ldjax.optimize.plan_ladder(model)
    rung, track = plan.choose(plan.begin())
  """
  sizes = [rung.draft.size for rung in model.ladder]
  curve = _costs_file.load_costs(model, batch=batch)
  if curve is not None:
    costs = [curve.at(size) for size in sizes]
  elif batch > 1 and (one := _costs_file.load_costs(model)) is not None:
    costs = [one.at(batch * size) for size in sizes]
  else:
    platform = _costs_file.device_of(model).platform
    costs = [_cost.default_ratio(platform, batch * size) for size in sizes]
  return _adapt.make_plan(
    costs,
    [rung.draft.depth for rung in model.ladder],
    [rung.expected for rung in model.ladder],
    model.start,
  )
