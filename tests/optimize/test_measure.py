"""Measured cost curves, and what is kept of them."""

import dataclasses
import json
import warnings

import jax.numpy as jnp
import pytest

import ldjax
from ldjax import decoding, optimize


@pytest.fixture(scope="module")
def measured(tiny, tmp_path_factory):
  """A curve of the tiny model, with what was said and the file kept."""
  lines = []
  with pytest.MonkeyPatch.context() as patch:
    folder = tmp_path_factory.mktemp("cache")
    patch.setenv("XDG_CACHE_HOME", str(folder))
    curve = optimize.measure_costs(
      tiny, (8, 2), rounds=2, progress=lines.append
    )
  return curve, lines, folder


class TestMeasure:
  def test_curve(self, measured):
    curve, lines, _ = measured
    assert curve.sizes == (1, 2, 8)
    assert curve.batch == 1
    assert curve.draft_seconds[0] == 0
    assert all(0 < part < 1 for part in curve.draft_seconds[1:])
    assert len(lines) == 4
    assert all(line.startswith("Compiling ") for line in lines)
    assert "8 nodes for 1 rows" in lines[-1]

  def test_sizes_that_the_ladder_has_not(self, scripted, bigram):
    # Plain decoding, three rows, few positions: the text begins anew.
    model = scripted(bigram(), draft="none", max_len=24)
    curve = optimize.measure_costs(model, (3,), batch=3, rounds=9)
    assert (curve.sizes, curve.batch) == ((1, 3), 3)

  @pytest.mark.parametrize(
    ("arguments", "message"),
    [
      ({"sizes": (0, 4)}, "size is 0"),
      ({"sizes": (4, -1)}, "size is -1"),
      ({"sizes": (128,)}, "size 128 does not fit .* 256 pos.* up to 127"),
      ({"batch": 0}, "batch is 0"),
      ({"rounds": 0}, "rounds is 0"),
    ],
  )
  def test_what_is_refused(self, tiny, arguments, message):
    with pytest.raises(ValueError, match=message):
      optimize.measure_costs(
        tiny, progress=lambda line: pytest.fail("work began"), **arguments
      )

  def test_where_nothing_can_be_written(
    self, scripted, bigram, tmp_path, monkeypatch
  ):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    model = scripted(bigram(), draft="none")
    with pytest.warns(UserWarning, match="could not be kept"):
      curve = optimize.measure_costs(model, (1,), rounds=1)
    assert curve.sizes == (1,)


class TestKept:
  @pytest.fixture
  def kept(self, measured, monkeypatch):
    """The file of the measured curve, in place."""
    _, _, folder = measured
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    [file] = folder.glob("ldjax/costs/*.json")
    before = file.read_bytes()
    yield file
    file.write_bytes(before)

  def test_nothing_yet(self, tiny):
    assert optimize.load_costs(tiny) is None

  def test_what_was_measured(self, tiny, tiny_folder, measured, kept):
    assert optimize.load_costs(tiny) == measured[0]
    assert optimize.load_costs(ldjax.load(tiny_folder)) == measured[0]
    says = json.loads(kept.read_text())
    assert says["of"]["draft"] == "ngram"
    assert says["of"]["config"]["hidden_size"] == 24
    # Nothing that was begun is left.
    assert list(kept.parent.iterdir()) == [kept]

  def test_of_something_else(self, tiny, tiny_plain, tiny_folder, kept):
    del kept
    assert optimize.load_costs(tiny, batch=2) is None
    assert optimize.load_costs(tiny_plain) is None
    assert optimize.load_costs(dataclasses.replace(tiny, name="x")) is None
    other = ldjax.load(tiny_folder, dtype="bfloat16")
    assert optimize.load_costs(other) is None
    other = ldjax.load(tiny_folder, cache_dtype=jnp.bfloat16)
    assert optimize.load_costs(other) is None

  @pytest.mark.parametrize(
    "text",
    [
      b"",
      b"{",
      b"[]",
      b"null",
      b"{}",
      b'{"curve": 3}',
      b'{"curve": {"sizes": [1]}}',
      b"\xff\xfe",
    ],
  )
  def test_damaged(self, tiny, kept, text):
    kept.write_bytes(text)
    with pytest.warns(UserWarning, match="damaged") as caught:
      assert optimize.load_costs(tiny) is None
    assert str(kept) in str(caught[0].message)

  @pytest.mark.parametrize(
    ("field", "value"),
    [
      ("seconds", [1, 2]),
      ("seconds", ["a", 1, 2]),
      ("seconds", [1, -1, 2]),
      ("seconds", [1, float("nan"), 2]),
      ("sizes", [1, 1e999, 8]),
      ("sizes", None),
      ("model", "another"),
      ("batch", 2),
    ],
  )
  def test_damaged_figures(self, tiny, kept, field, value):
    says = json.loads(kept.read_text())
    says["curve"][field] = value
    kept.write_text(json.dumps(says))
    with pytest.warns(UserWarning, match="damaged"):
      assert optimize.load_costs(tiny) is None

  def test_cut_off_anywhere(self, tiny, kept):
    whole = kept.read_bytes().rstrip()
    for length in range(0, len(whole), 37):
      kept.write_bytes(whole[:length])
      with pytest.warns(UserWarning, match="damaged"):
        assert optimize.load_costs(tiny) is None


class TestPlan:
  def write(self, model, seconds, batch=1):
    from ldjax.optimize import _costs_file

    sizes = tuple(rung.draft.size for rung in model.ladder)
    curve = optimize.CostCurve(
      sizes=sizes,
      seconds=seconds,
      draft_seconds=(0.0,) * len(sizes),
      batch=batch,
      device="cpu",
      model=_costs_file.fingerprint(model, batch),
    )
    _costs_file.save_costs(model, curve)

  def test_assumed(self, tiny):
    plan = optimize.plan_ladder(tiny)
    assert plan.limits == (1, 2, 4, 8, 16)
    assert plan.costs == (1.0, 1.30, 1.37, 1.58, 2.26)
    assert plan.begin().rung == 2
    # Two rows of four nodes are eight rows.
    assert optimize.plan_ladder(tiny, 2).costs[:4] == pytest.approx(
      (1.30, 1.37, 1.58, 2.26)
    )

  def test_measured(self, tiny):
    self.write(tiny, (1.0, 1.1, 1.2, 1.3, 1.4))
    plan = optimize.plan_ladder(tiny)
    assert plan.costs == (1.0, 1.1, 1.2, 1.3, 1.4)
    assert optimize.plan_ladder(tiny, 2).costs == pytest.approx(
      (1.1, 1.2, 1.3, 1.4, 1.6)
    )
    self.write(tiny, (2.0, 3.0, 4.0, 5.0, 6.0), batch=2)
    assert optimize.plan_ladder(tiny, 2).costs == (2.0, 3.0, 4.0, 5.0, 6.0)
    assert optimize.plan_ladder(tiny, 1).costs == plan.costs

  def test_trees_that_cost_too_much_are_left_alone(self, tiny):
    self.write(tiny, (1.0, 3.0, 5.0, 9.0, 17.0))
    assert optimize.plan_ladder(tiny).begin().rung == 0
    with warnings.catch_warnings():
      warnings.simplefilter("error")
      result = ldjax.generate(tiny, "hello", max_new_tokens=20)
    assert result.round_sizes[1:8] == (1,) * 7

  def test_of_your_own_draft(self, tiny):
    model = ldjax.with_draft(
      tiny,
      optimize.oracle(4),
      draft_params=optimize.oracle_params([[1] * 256], 0.5),
    )
    plan = optimize.plan_ladder(model)
    assert plan.limits == (1, 4)
    assert (plan.start, plan.begin().rung) == (1, 1)
    assert isinstance(model.ladder[0].draft, decoding.DraftFn)
