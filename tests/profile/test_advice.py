"""Each line of what would help, worked by hand."""

import pytest

from ldjax import profile
from ldjax.profile import _advice

# Of `report`: 100 rounds of 1.04 tokens, which at the costs of their sizes
# alone take 40 x 40 + 60 x 60 ms: 104 / 5.2 = 20 tokens/s.


def test_a_fixed_size(report):
  found = _advice.fixed_size(report)
  # Size 8 has fewer than 16 rounds, so its 200 tokens/s do not count.
  assert found["gain"] == pytest.approx(30 / 20)
  assert "4 nodes" in found["what"]
  assert "1.80 tokens in 60.0 ms, 30.00 tokens/s" in found["arithmetic"]
  assert found["arithmetic"].endswith("30.00 / 20.00")
  assert found["do"].startswith("dataclasses.replace")


@pytest.mark.parametrize(
  ("draft", "size", "flag"),
  [
    ("ngram", 4, "--tree chain:3"),
    ("ngram", 1, "--draft none"),
    ("heads", 1, "--draft none"),
  ],
)
def test_the_flag_of_a_size(report, draft, size, flag):
  report["draft"] = draft
  report["sizes"] = [x for x in report["sizes"] if x["size"] == size]
  assert _advice.fixed_size(report)["do"] == flag


def test_costs_that_nobody_measured(report):
  # By the curve 1.8 tokens in 80 ms are better than 1 in 50 ms.
  found = _advice.measured_costs(report)
  assert (found["do"], found["gain"]) == ("ldjax costs", pytest.approx(30 / 20))
  assert "1.80 tokens in a step of 80.0 ms" in found["arithmetic"]
  # What the curve picks counts, not what was fastest.
  report["costs"]["seconds"][1] = 0.1
  assert _advice.measured_costs(report)["gain"] == pytest.approx(25 / 20)
  report["costs"]["source"] = "kept"
  assert _advice.measured_costs(report) is None


def test_the_ngram_draft(report):
  found = _advice.ngram_draft(report)
  # A round of 4 nodes takes 60 ms, 10 of them the draft's; proposing takes 5.
  assert found["gain"] == pytest.approx(2.42 / 0.055 / 20)
  assert found["do"] == "--draft ngram --tree chain:3"
  assert "takes 55.0 ms: 44.00 / 20.00" in found["arithmetic"]
  # Plain decoding has no rounds of 4: there the curve says how much longer.
  report["sizes"] = report["sizes"][:1]
  report["speed"]["rounds_by_size"] = {"1": 100}
  report["costs"]["draft_seconds"] = [0.0] * 4
  now = 104 / (100 * 0.04)
  assert _advice.ngram_draft(report)["gain"] == pytest.approx(
    2.42 / (0.04 * 0.08 / 0.05 + 0.005) / now
  )
  report["ngram"] = []
  assert _advice.ngram_draft(report) is None


def test_a_smaller_cache(report):
  found = _advice.smaller_cache(report)
  # 3/4 of 200 MB of 500 MB in 70 ms.
  less = 0.07 * 0.75 * 200 / 500
  assert found["gain"] == pytest.approx(0.08 / (0.08 - less))
  assert found["do"] == "--cache-dtype int8"
  assert "of 500.0 MB a step 150.0 MB fewer" in found["arithmetic"]
  assert "80.00 ms / (80.00 - 21.00)" in found["arithmetic"]


@pytest.mark.parametrize(
  ("share_of_read", "share_of_flops", "ratio"),
  [(0.49, 0.1, 0.25), (0.6, 0.7, 0.25), (0.9, 0.1, 1.0)],
)
def test_a_smaller_cache_only_where_reading_limits(
  report, share_of_read, share_of_flops, ratio
):
  report["step"][1] |= {
    "share_of_read": share_of_read,
    "share_of_flops": share_of_flops,
  }
  report["cache"]["int8_ratio"] = ratio
  assert _advice.smaller_cache(report) is None


def test_more_rows(report):
  # 4 rows of 4 nodes are 16, the largest size measured; 5 prompts are there.
  found = _advice.more_rows(report)
  assert found["do"] == "--batch-size 4"
  assert found["gain"] == pytest.approx(4 * 0.08 / 0.16)
  assert "4 x 80.0 ms / 160.0 ms" in found["arithmetic"]
  report["prompts"] = 3
  assert _advice.more_rows(report)["gain"] == pytest.approx(2 * 0.08 / 0.11)
  report["prompts"] = 1
  assert _advice.more_rows(report) is None
  report |= {"prompts": 5, "batch_size": 2}
  assert _advice.more_rows(report) is None


def test_an_idle_device(report):
  found = _advice.idle_device(report)
  assert found["at_most"] and found["gain"] == pytest.approx(83.9 / 67.9)
  assert found["arithmetic"].endswith("83.90 / 67.90")
  report["round"]["idle"] = 0.0
  assert _advice.idle_device(report) is None


def test_a_cheaper_draft(report):
  found = _advice.cheaper_draft(report)
  assert found["at_most"] and found["gain"] == pytest.approx(80 / 70)
  assert "80.00 ms a step, 10.00 ms of them the draft's" in found["arithmetic"]
  report["costs"]["draft_seconds"] = [0.0] * 4
  assert _advice.cheaper_draft(report) is None


def test_the_largest_gain_comes_first(report):
  gains = [each["gain"] for each in profile.advise(report)]
  assert gains == sorted(gains, reverse=True) and len(gains) == 7


def test_a_slow_while_is_on_neither_side(report):
  before = _advice.fixed_size(report)["gain"]
  # The same rounds, all of which took twice as long.
  report["speed"] |= {"tokens_per_second": 6.5, "seconds_a_round": 0.16}
  assert _advice.fixed_size(report)["gain"] == pytest.approx(before)
  # Where a size was not decoded alone, what was measured counts.
  report["speed"]["rounds_by_size"] = {"3": 100}
  assert _advice.fixed_size(report)["gain"] == pytest.approx(30 / 6.5)


def test_nothing_is_said_where_nothing_helps(report):
  report["speed"]["tokens_per_second"] = 19.5
  report["sizes"] = report["sizes"][:2]
  report["ngram"] = []
  report["prompts"] = 1
  report["cache"]["int8_ratio"] = 1.0
  report["round"]["idle"] = 0.002
  report["costs"]["draft_seconds"] = [0.0, 0.001, 0.001, 0.001]
  assert profile.advise(report) == []
