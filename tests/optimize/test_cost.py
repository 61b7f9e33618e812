"""Cost curves: between, beyond and before what was measured."""

import math

import pytest

from ldjax import optimize


@pytest.fixture
def make():
  def make(**changes):
    fields = {
      "sizes": (1, 2, 4, 8),
      "seconds": (0.10, 0.13, 0.14, 0.18),
      "draft_seconds": (0.0, 0.01, 0.01, 0.03),
      "batch": 1,
      "device": "cpu",
      "model": "m",
    }
    return optimize.CostCurve(**{**fields, **changes})

  return make


@pytest.mark.parametrize(
  ("size", "whole", "part"),
  [
    (1, 0.10, 0.0),
    (2, 0.13, 0.01),
    (3, 0.135, 0.01),
    (6, 0.16, 0.02),
    (8, 0.18, 0.03),
    (12, 0.22, 0.05),
  ],
)
def test_on_lines(make, size, whole, part):
  curve = make()
  assert curve.at(size) == pytest.approx(whole)
  assert curve.draft_at(size) == pytest.approx(part)
  assert curve.ratio(size) == pytest.approx(whole / 0.10)


def test_noise_never_makes_larger_trees_cheaper_beyond(make):
  curve = make(seconds=(0.10, 0.13, 0.14, 0.12))
  assert curve.at(100) == 0.12


def test_one_size(make):
  curve = make(sizes=(1,), seconds=(0.1,), draft_seconds=(0.0,))
  assert curve.at(1) == curve.at(7) == 0.1


@pytest.mark.parametrize("size", [0, -3])
def test_no_size(make, size):
  for ask in (make().at, make().draft_at, make().ratio):
    with pytest.raises(ValueError, match=f"size is {size}"):
      ask(size)
  with pytest.raises(ValueError, match=f"size is {size}"):
    optimize.default_ratio("cpu", size)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"sizes": ()}, "measure size 1 too"),
    ({"sizes": (2, 4, 8, 9)}, "measure size 1 too"),
    ({"sizes": (1, 4, 2, 8)}, "ascending"),
    ({"sizes": (1, 2, 2, 8)}, "ascending"),
    ({"seconds": (0.1, 0.2)}, "2 seconds for 4 sizes"),
    ({"draft_seconds": (0.0,)}, "1 draft_seconds for 4 sizes"),
    ({"seconds": (0.1, 0.2, 0.0, 0.3)}, "size 4 takes 0.0 s"),
    ({"seconds": (0.1, 0.2, math.nan, 0.3)}, "size 4 takes nan s"),
    ({"seconds": (0.1, math.inf, 0.2, 0.3)}, "size 2 takes inf s"),
    ({"draft_seconds": (0.0, 0.2, 0.0, 0.0)}, "of which 0.2 s"),
    ({"draft_seconds": (0.0, -0.1, 0.0, 0.0)}, "of which -0.1 s"),
    ({"draft_seconds": (0.0, math.nan, 0.0, 0.0)}, "of which nan s"),
    ({"batch": 0}, "batch is 0"),
  ],
)
def test_figures_that_cannot_be(make, changes, message):
  with pytest.raises(ValueError, match=message):
    make(**changes)


def test_defaults():
  table = {1: 1.0, 2: 1.30, 4: 1.37, 8: 1.58, 16: 2.26, 32: 3.67, 64: 6.92}
  for rows, ratio in table.items():
    assert optimize.default_ratio("cpu", rows) == pytest.approx(ratio)
  assert optimize.default_ratio("cpu", 128) == pytest.approx(
    6.92 + 64 * (6.92 - 3.67) / 32
  )
  for platform in ("gpu", "tpu", "unheard-of"):
    assert optimize.default_ratio(platform, 1) == 1
    assert 1 < optimize.default_ratio(platform, 16) < 1.1
