"""Medusa-2 decoding with the tree that is fastest by acceptance and cost."""

import jax
import pytest

import ldjax
from ldjax import checkpoints, contrib, models, optimize


def test_heads_that_nobody_measured(tiny, tiny_heads):
  with pytest.raises(ValueError, match="nobody measured how often these heads"):
    contrib.as_tuned_medusa2(tiny, tiny_heads)


@pytest.mark.slow
def test_the_tuned_tree(tiny, tmp_path, monkeypatch):
  # Costs that are known: two nodes cost nothing, more of them a great deal.
  config = models.MedusaConfig(
    num_heads=2, num_layers=0, hidden_size=24, vocab_size=262
  )
  heads = tmp_path / "heads"
  checkpoints.write_draft(
    heads,
    config,
    models.init_draft(config, jax.random.key(0)),
    target=checkpoints.DraftTarget("x", 24, 262, tiny.config.num_layers),
    calibration={"acceptance": [[0.6, 0.2], [0.5, 0.1]]},
  )
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  measured = []

  def measure(model, sizes, progress):
    measured.append((model, sizes))
    seconds = {1: 1.0, 2: 1.0}
    return optimize.CostCurve(
      sizes=tuple(sizes),
      seconds=tuple(seconds.get(size, 4.0) for size in sizes),
      draft_seconds=(0.0,) * len(sizes),
      batch=1,
      device="cpu",
      model="x",
    )

  monkeypatch.setattr(optimize, "measure_costs", measure)
  tuned = contrib.as_tuned_medusa2(tiny, heads)
  assert tuned.draft_name == f"medusa2 ({heads}), 2 nodes: [[0]]"
  assert [rung.draft.size for rung in tuned.ladder] == [2]
  assert tuned.preallocates
  [(model, sizes)] = measured
  # All nodes that two heads of two ranks have.
  assert sizes == [1, 2, 4, 7]
  # What is measured is what decodes.
  monkeypatch.undo()
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  curve = optimize.measure_costs(model, [1, 2], rounds=1)
  assert curve.sizes == (1, 2)
  assert optimize.load_costs(model) == curve
  plain = ldjax.generate(ldjax.with_draft(tiny, "none"), "a", max_new_tokens=8)
  assert ldjax.generate(tuned, "a", max_new_tokens=8).tokens == plain.tokens
