"""How much memory there is, and what fits into it."""

import math
import os
import pathlib
import re
from typing import NamedTuple

import jax

_UNITS = {
  "": 1,
  "B": 1,
  "KB": 10**3,
  "MB": 10**6,
  "GB": 10**9,
  "TB": 10**12,
  "KIB": 2**10,
  "MIB": 2**20,
  "GIB": 2**30,
  "TIB": 2**40,
}
_BUDGET = re.compile(
  r"\s*([0-9]*\.?[0-9]+(?:e\+?[0-9]+)?)\s*([a-z%]*)\s*", re.IGNORECASE
)


def parse_budget(budget: str | float, memory_bytes: int) -> int:
  """Turns a budget as people write it into bytes.

  Args:
    budget: an amount (`"24GB"`, `"512MiB"`, a number above 1 in bytes), or a
      share of the memory (`0.75`, `"0.75"`, `"75%"`, 1).
    memory_bytes: what a share is of, for example `device_memory()`.

  Returns:
    Bytes, at least 1.

  Raises:
    ValueError: for anything else, or for nothing at all.

  Example:
    >>> parse_budget("24GB", 10**12), parse_budget("75%", 1000)
    (24000000000, 750)
  """
  hint = "write an amount like 24GB or 512MiB, or a share like 0.75 or 75%"
  match = _BUDGET.fullmatch(str(budget))
  if isinstance(budget, bool) or match is None:
    raise ValueError(f"budget is {budget!r}; {hint}")
  number, unit = float(match[1]), match[2].upper()
  if unit == "%":
    number, unit = number / 100, ""
    if number > 1:
      raise ValueError(f"budget is {budget!r}, more than all memory; {hint}")
  elif unit not in _UNITS:
    raise ValueError(f"budget is {budget!r}, in an unknown unit; {hint}")
  share = not unit and number <= 1
  found = number * memory_bytes if share else number * _UNITS[unit]
  if not math.isfinite(found) or found < 1:
    raise ValueError(f"budget is {budget!r}, less than a byte; {hint}")
  return int(found)


def _system_memory() -> int:
  total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  try:  # a container may be allowed less than the machine has
    limit = pathlib.Path("/sys/fs/cgroup/memory.max").read_text().strip()
  except OSError:
    return total
  return min(total, int(limit)) if limit.isdigit() else total


def device_memory(device: jax.Device | None = None) -> int:
  """Bytes of memory that a device has for arrays; on a CPU the system's.

  Args:
    device: default the first local one.

  Example:
    >>> device_memory() > 2**20
    True
  """
  if device is None:
    device = jax.local_devices()[0]
  if device.platform != "cpu":
    stats = device.memory_stats() or {}
    if limit := stats.get("bytes_limit"):
      return int(limit)
  return _system_memory()


def pool_limits(
  *,
  initial_pages: int,
  num_pages: int | None,
  budget_bytes: int,
  parameter_bytes: int,
  page_bytes: int,
) -> tuple[int, int]:
  """How many pages a pool begins with and may grow to.

  Args:
    initial_pages: wanted at first.
    num_pages: wanted at most, or None.
    budget_bytes: for weights and pool together.
    parameter_bytes: of the weights.
    page_bytes: of one page over all layers.

  Returns:
    Pages at first and at most.

  Raises:
    ValueError: for less than a page, naming what there is.

  Example:
    >>> pool_limits(
    ...   initial_pages=30, num_pages=None, budget_bytes=1000,
    ...   parameter_bytes=400, page_bytes=10)
    (30, 60)
  """
  if initial_pages < 1:
    raise ValueError(
      f"initial_pages is {initial_pages}; a pool needs at least 1"
    )
  left = budget_bytes - parameter_bytes
  most = max(left, 0) // page_bytes
  if most < 1:
    raise ValueError(
      f"memory_budget is {budget_bytes:,} bytes, of which the weights take"
      f" {parameter_bytes:,}; a page of the cache takes {page_bytes:,}, so give"
      f" at least {parameter_bytes + page_bytes:,}"
    )
  if num_pages is not None:
    most = min(most, num_pages)
  return min(initial_pages, most), most


class MemoryReport(NamedTuple):
  """What fits into a budget, before anything is allocated."""

  budget_bytes: int
  """What may be used."""
  parameter_bytes: int
  """Weights of target and draft."""
  sequence_bytes: int
  """The cache of one sequence of the length in question."""
  page_bytes: int
  """One page of the pool over all its layers; 0 where there is no pool."""
  sequences: int
  """How many such sequences fit beside the weights."""
  pages: int
  """How many pages would; 0 where there is no pool."""


def memory_report(
  *,
  budget_bytes: int,
  parameter_bytes: int,
  sequence_bytes: int,
  page_bytes: int,
) -> MemoryReport:
  """Says how many sequences fit into a budget.

  Args:
    budget_bytes: for weights and cache together.
    parameter_bytes: of target and draft.
    sequence_bytes: of the cache of one sequence, see `held_bytes` of a cache.
    page_bytes: of one page, see `page_bytes` of a cache.

  Raises:
    ValueError: for a sequence that takes nothing.

  Example:
    >>> memory_report(
    ...   budget_bytes=1000, parameter_bytes=400, sequence_bytes=80,
    ...   page_bytes=10).sequences
    7
  """
  if sequence_bytes < 1:
    raise ValueError(
      f"sequence_bytes is {sequence_bytes}; it must be at least 1"
    )
  left = max(budget_bytes - parameter_bytes, 0)
  return MemoryReport(
    budget_bytes=budget_bytes,
    parameter_bytes=parameter_bytes,
    sequence_bytes=sequence_bytes,
    page_bytes=page_bytes,
    sequences=left // sequence_bytes,
    pages=left // page_bytes if page_bytes else 0,
  )
