"""What would help most, from the figures of a report alone."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ldjax import optimize

_LEAST_GAIN = 1.03
"""What is said to help must promise this much."""
_LEAST_ROUNDS = 16
"""Rounds that a figure must come from."""

Report = Mapping[str, Any]


def _entry(
  do: str, what: str, gain: float, arithmetic: str, at_most: bool = False
) -> dict[str, Any]:
  return {
    "do": do,
    "what": what,
    "gain": gain,
    "at_most": at_most,
    "arithmetic": arithmetic,
  }


def _curve(report: Report) -> optimize.CostCurve:
  costs = report["costs"]
  return optimize.CostCurve(
    sizes=tuple(costs["sizes"]),
    seconds=tuple(costs["seconds"]),
    draft_seconds=tuple(costs["draft_seconds"]),
    batch=report["batch_size"],
    device=report["device"],
    model=report["model"],
  )


def _main_size(report: Report) -> int:
  """Of the trees that most rounds had."""
  counts = report["speed"]["rounds_by_size"]
  return int(max(counts, key=lambda size: (counts[size], -int(size))))


def _now(report: Report) -> float:
  """Tokens/s of the rounds as they were chosen, each size at its cost alone.

  So that what slowed the machine for a while is on neither side of a gain.
  """
  speed = report["speed"]
  alone = {str(x["size"]): x["seconds_a_round"] for x in report["sizes"]}
  counts = speed["rounds_by_size"]
  if not all(alone.get(size) for size in counts):
    return speed["tokens_per_second"]
  tokens_a_round = speed["tokens_per_second"] * speed["seconds_a_round"]
  seconds = sum(count * alone[size] for size, count in counts.items())
  return tokens_a_round * sum(counts.values()) / seconds


def _flag_of_size(report: Report, size: int) -> str:
  if size == 1:
    return "--draft none"
  if report["draft"] == "ngram":
    return f"--tree chain:{size - 1}"
  return "dataclasses.replace(model, ladder=(rung,), start=0)"


def _tried(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
  """Those that had rounds enough to go by."""
  return [each for each in entries if each["rounds"] >= _LEAST_ROUNDS]


def fixed_size(report: Report) -> dict[str, Any] | None:
  """Whether rounds of one size were faster than those that were chosen."""
  now, tried = _now(report), _tried(report["sizes"])
  if not tried or not now:
    return None
  best = max(tried, key=lambda each: each["tokens_per_second"])
  return _entry(
    _flag_of_size(report, best["size"]),
    f"always trees of {best['size']} nodes",
    best["tokens_per_second"] / now,
    f"rounds of {best['size']} alone brought {best['tokens_a_round']:.2f}"
    f" tokens in {1e3 * best['seconds_a_round']:.1f} ms,"
    f" {best['tokens_per_second']:.2f} tokens/s; the sizes chosen, each at its"
    f" cost alone, {now:.2f}:"
    f" {best['tokens_per_second']:.2f} / {now:.2f}",
  )


def measured_costs(report: Report) -> dict[str, Any] | None:
  """Whether the size that measured costs pick was faster."""
  now, tried = _now(report), _tried(report["sizes"])
  if report["costs"]["source"] == "kept" or not tried or not now:
    return None
  curve = _curve(report)
  best = max(tried, key=lambda x: x["tokens_a_round"] / curve.at(x["size"]))
  return _entry(
    "ldjax costs",
    "sizes are chosen by usual costs; measured ones pick"
    f" {best['size']} nodes here",
    best["tokens_per_second"] / now,
    f"{best['tokens_a_round']:.2f} tokens in a step of"
    f" {1e3 * curve.at(best['size']):.1f} ms is the best of the sizes; rounds"
    f" of it alone brought {best['tokens_per_second']:.2f} tokens/s:"
    f" {best['tokens_per_second']:.2f} / {now:.2f}",
  )


def ngram_draft(report: Report) -> dict[str, Any] | None:
  """Whether looking the text up in itself would have been faster."""
  now, tried = _now(report), _tried(report["ngram"])
  if not tried or not now:
    return None
  curve = _curve(report)
  alone = {x["size"]: x["seconds_a_round"] for x in report["sizes"]}

  def seconds(each: Mapping[str, Any]) -> float:
    size = each["size"]
    # Without a draft there are no rounds of more nodes than one.
    whole = alone.get(size) or alone[1] * curve.ratio(size)
    return whole - curve.draft_at(size) + each["propose_seconds"]

  def rate(each: Mapping[str, Any]) -> float:
    return report["batch_size"] * each["tokens_a_round"] / seconds(each)

  best = max(tried, key=rate)
  return _entry(
    f"--draft ngram --tree chain:{best['size'] - 1}",
    "the n-gram draft on these texts",
    rate(best) / now,
    f"replayed, it brings {best['tokens_a_round']:.2f} tokens a round of"
    f" {best['size']} nodes, which without the draft's"
    f" {1e3 * curve.draft_at(best['size']):.1f} ms and with its own"
    f" {1e3 * best['propose_seconds']:.1f} takes {1e3 * seconds(best):.1f} ms:"
    f" {rate(best):.2f} / {now:.2f}",
  )


def smaller_cache(report: Report) -> dict[str, Any] | None:
  """What int8 keys and values would save where memory is what limits."""
  size = _main_size(report)
  step = next((x for x in report["step"] if x["size"] == size), None)
  ratio = report["cache"]["int8_ratio"]
  if (
    step is None
    or ratio >= 1
    or step["share_of_read"] < 0.5
    or step["share_of_read"] < step["share_of_flops"]
  ):
    return None
  saved = step["cache_bytes"] * (1 - ratio)
  now = _curve(report).at(size)
  less = step["seconds"] * saved / step["bytes"]
  return _entry(
    "--cache-dtype int8",
    "keys and values in eight bits; the text may change",
    now / (now - less),
    f"of {step['bytes'] / 1e6:.1f} MB a step {saved / 1e6:.1f} MB fewer, at"
    f" {100 * step['share_of_read']:.0f}% of the read ceiling:"
    f" {1e3 * now:.2f} ms / ({1e3 * now:.2f} - {1e3 * less:.2f})",
  )


def more_rows(report: Report) -> dict[str, Any] | None:
  """What decoding prompts together would bring, by the cost curve."""
  batch, prompts = report["batch_size"], report["prompts"]
  if batch != 1:
    return None  # the curve is of that batch
  size, curve = _main_size(report), _curve(report)
  rows = 1
  while 2 * rows <= prompts and 2 * rows * size <= curve.sizes[-1]:
    rows *= 2
  if rows == 1:
    return None
  one, all_ = curve.at(size), curve.at(rows * size)
  return _entry(
    f"--batch-size {rows}",
    f"{rows} prompts at once: more tokens/s in all, each text slower",
    rows * one / all_,
    f"{rows} rows of {size} nodes cost about a step of {rows * size}:"
    f" {rows} x {1e3 * one:.1f} ms / {1e3 * all_:.1f} ms",
  )


def idle_device(report: Report) -> dict[str, Any] | None:
  """What could be gained if the device never waited for the host."""
  now, idle = report["round"]["round"], report["round"]["idle"]
  if not 0 < idle < now:
    return None
  return _entry(
    "a larger --batch-size",
    "the device waits for the host, whose work is once a round for all rows",
    now / (now - idle),
    f"{1e3 * now:.2f} ms a round, {1e3 * idle:.2f} ms of them idle:"
    f" {1e3 * now:.2f} / {1e3 * (now - idle):.2f}",
    at_most=True,
  )


def cheaper_draft(report: Report) -> dict[str, Any] | None:
  """What could be gained if proposing a tree cost nothing."""
  size, curve = _main_size(report), _curve(report)
  now, draft = curve.at(size), curve.draft_at(size)
  if not 0 < draft < now:
    return None
  return _entry(
    "--draft FOLDER, of one that costs less",
    "proposing the tree is a part of each step",
    now / (now - draft),
    f"{1e3 * now:.2f} ms a step, {1e3 * draft:.2f} ms of them the draft's:"
    f" {1e3 * now:.2f} / {1e3 * (now - draft):.2f}",
    at_most=True,
  )


_RULES: tuple[Callable[[Report], dict[str, Any] | None], ...] = (
  fixed_size,
  measured_costs,
  ngram_draft,
  smaller_cache,
  more_rows,
  idle_device,
  cheaper_draft,
)


def advise(report: Report) -> list[dict[str, Any]]:
  """Ranks what would help, by the gain that the report's figures give.

  Args:
    report: from `profile`, without `advice`.

  Returns:
    The largest gain first: `do` (a flag or a command), `what`, `gain` (tokens/s
    over those of the report), `at_most` (whether the gain is a bound rather
    than an estimate) and `arithmetic`. Nothing under 1.03.
  """
  found = [rule(report) for rule in _RULES]
  return sorted(
    (each for each in found if each and each["gain"] >= _LEAST_GAIN),
    key=lambda each: -each["gain"],
  )
