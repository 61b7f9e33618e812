"""The parts of a round."""

import pytest

from ldjax import bench


@pytest.mark.slow
def test_parts_are_there(tiny_medusa):
  parts = bench.breakdown(tiny_medusa, "hello", rounds=3)
  assert set(parts) == {
    "draft",
    "verify",
    "accept",
    "commit",
    "step",
    "round",
    "host",
  }
  assert all(seconds >= 0 for seconds in parts.values())
  assert min(parts["verify"], parts["step"], parts["round"]) > 0


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"size": 5}, r"the model's ladder has sizes \[7\]"),
    ({"rounds": 0}, "rounds is 0"),
    ({"rounds": 400}, "do not fit into"),
  ],
)
def test_what_is_refused(tiny_medusa, settings, message):
  with pytest.raises(ValueError, match=message):
    bench.breakdown(tiny_medusa, "hello", **settings)
