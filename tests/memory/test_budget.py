"""Budgets as people write them, and what fits into one."""

import pytest

from ldjax import memory


@pytest.mark.parametrize(
  ("budget", "want"),
  [
    ("24GB", 24 * 10**9),
    ("24 gb", 24 * 10**9),
    ("1.5GiB", 3 * 2**29),
    ("512MiB", 2**29),
    ("2e3kb", 2_000_000),
    (24_000_000_000, 24 * 10**9),
    ("4096", 4096),
    ("7B", 7),
    (0.75, 750),
    ("0.75", 750),
    (".5", 500),
    ("75%", 750),
    ("100 %", 1000),
    (1, 1000),
    ("1", 1000),
  ],
)
def test_parsed(budget, want):
  assert memory.parse_budget(budget, 1000) == want


@pytest.mark.parametrize(
  "budget",
  [
    *("", "GB", "-1", "-3GB", "24XB", "24 G B", "1,5GB", "1e999", "101%"),
    *(
      "0",
      0,
      "0GB",
      "0%",
      "nan",
      "inf",
      float("nan"),
      float("inf"),
      None,
      True,
    ),
  ],
)
def test_refused(budget):
  with pytest.raises(ValueError, match="like 24GB"):
    memory.parse_budget(budget, 1000)


def test_the_devices_memory():
  found = memory.device_memory()
  # This machine's, or what its container may use.
  assert 2**28 < found < 2**50


@pytest.mark.parametrize(
  ("budget", "pages", "sequences"),
  # Weights of 400; a sequence takes 8 pages of 10 bytes.
  [(1000, 60, 7), (480, 8, 1), (479, 7, 0), (400, 0, 0), (10, 0, 0)],
)
def test_report(budget, pages, sequences):
  found = memory.memory_report(
    budget_bytes=budget,
    parameter_bytes=400,
    sequence_bytes=80,
    page_bytes=10,
  )
  assert (found.pages, found.sequences) == (pages, sequences)


def test_report_without_a_pool():
  sizes = {"parameter_bytes": 1, "sequence_bytes": 3, "page_bytes": 0}
  found = memory.memory_report(budget_bytes=10, **sizes)
  assert (found.pages, found.sequences) == (0, 3)
  with pytest.raises(ValueError, match="sequence_bytes is 0"):
    memory.memory_report(budget_bytes=10, **sizes | {"sequence_bytes": 0})


@pytest.mark.parametrize(
  ("initial", "most", "budget", "want"),
  [
    (30, None, 1000, (30, 60)),
    (90, None, 1000, (60, 60)),
    (30, 40, 1000, (30, 40)),
    (30, 20, 1000, (20, 20)),
    (30, 99, 410, (1, 1)),
  ],
)
def test_limits(initial, most, budget, want):
  assert want == memory.pool_limits(
    initial_pages=initial,
    num_pages=most,
    budget_bytes=budget,
    parameter_bytes=400,
    page_bytes=10,
  )


def test_limits_that_leave_no_page():
  with pytest.raises(ValueError) as caught:
    memory.pool_limits(
      initial_pages=3,
      num_pages=None,
      budget_bytes=409,
      parameter_bytes=400,
      page_bytes=10,
    )
  for part in ("is 409 bytes", "take 400", "takes 10", "at least 410"):
    assert part in str(caught.value)
