"""The tables: one rule a tensor, one tensor a parameter."""

import jax
import numpy as np
import pytest

from ldjax.checkpoints import _gguf_rules, _hugging_face, _rules

F32 = np.dtype(np.float32)


def _tensor(name, shape=(2,)):
  return _rules.Tensor(name, "file", shape, F32, lambda: np.ones(shape, F32))


_WANTED = {"a": {0: {"w": jax.ShapeDtypeStruct((2,), F32)}}}
_RULES = (
  _rules.Rule(r"x\.(\d+)\.(w)", "a/{0}/{1}", "double"),
  _rules.Rule(r"junk.*", None),
)


def test_plan_and_execute():
  planned = _rules.plan(_RULES, [_tensor("junk"), _tensor("x.0.w")], _WANTED)
  params = _rules.execute(
    _rules.Plan(planned, {"double": lambda x: 2 * x}, F32)
  )
  assert list(params) == ["a"]
  assert params["a"][0]["w"].tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
  ("names", "message"),
  [
    (["x.0.w", "y"], "'y' is not part"),
    (["x.0.w", "prefix.x.0.w"], "'prefix.x.0.w' is not part"),
    (["x.0.w", "x.1.w"], "'x.1.w' would be parameter a.1.w"),
    (["x.0.w", "x.00.w"], "given twice: by 'x.0.w'"),
    ([], r"no tensor for parameter a\.0\.w"),
  ],
)
def test_faults_name_the_tensor(names, message):
  with pytest.raises(ValueError, match=message):
    _rules.plan(_RULES, [_tensor(name) for name in names], _WANTED)


def test_two_rules_for_one_tensor():
  rules = (*_RULES, _rules.Rule(r"x\..*", None))
  with pytest.raises(ValueError, match=r"'x\.0\.w' matches 2 rules"):
    _rules.plan(rules, [_tensor("x.0.w")], _WANTED)


def test_no_weight_is_read_before_all_is_checked():
  def explode():
    raise AssertionError("read")

  bad = _rules.Tensor("x.0.w", "file", (3,), F32, explode)
  with pytest.raises(ValueError, match=r"shape \(3,\).*asks for \(2,\)"):
    _rules.plan(_RULES, [bad], _WANTED)


@pytest.mark.parametrize("size", [0, 1, 65_536, 131_101])
def test_what_is_not_finite_is_counted(bfloat16, size):
  rng = np.random.default_rng(size)
  for dtype in (np.float32, bfloat16, np.float16):
    array = rng.standard_normal(size).astype(dtype)
    # The largest, the least and both zeros are finite.
    some = (np.finfo(np.float16).max, 6e-8, 0.0, -0.0)
    array[:4] = np.array(some, dtype)[:size]
    assert _rules.count_not_finite(array) == 0
    bad = rng.choice(size, min(size, 7), replace=False)
    array[bad] = rng.choice(np.array([np.nan, np.inf, -np.inf, -np.nan]), 7)[
      : len(bad)
    ].astype(dtype)
    assert _rules.count_not_finite(array) == len(bad)
    table = array.reshape(1, -1).T
    assert _rules.count_not_finite(table) == len(bad)


@pytest.mark.parametrize(
  "rules",
  [
    *(
      _hugging_face.rules_of(kind, tied)
      for kind in ("llama", *_hugging_face.TABLES)
      for tied in (True, False)
    ),
    *_gguf_rules.RULES.values(),
  ],
)
def test_transforms_are_known(rules):
  known = {"", "split_query_halves", "split_key_halves"}
  assert {rule.transform for rule in rules} <= known
