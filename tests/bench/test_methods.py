"""Which methods there are, by name."""

import sys

import jax
import pytest

import ldjax
from ldjax import _drafts, bench, checkpoints, contrib, models, optimize


def test_names(tiny, tiny_plain, tiny_heads):
  methods = bench.make_methods(
    tiny,
    [
      "autoregressive",
      "ngram",
      "ldjax",
      str(tiny_heads),
      f"ldjax:{tiny_heads}",
      f"medusa2:{tiny_heads}",
    ],
  )
  assert list(methods) == [
    "autoregressive",
    "ngram",
    "ldjax",
    "tiny-heads",
    f"ldjax:{tiny_heads}",
    "medusa2",
  ]
  assert methods["ldjax"] is tiny
  plain = ldjax.with_draft(tiny, None)
  assert methods["autoregressive"].decoder is plain.decoder
  ngram = ldjax.with_draft(tiny, "ngram")
  assert methods["ngram"].decoder is ngram.decoder
  for name in ("tiny-heads", f"ldjax:{tiny_heads}"):
    assert methods[name].draft_name == str(tiny_heads)
    assert not methods[name].preallocates
  assert methods["medusa2"].preallocates


def test_the_heads_of_medusa2(tiny, tiny_heads, monkeypatch):
  # Both sides have the heads that come for the model, and the tuned one says
  # so to what measures.
  monkeypatch.setattr(_drafts, "medusa_heads_of", lambda name: tiny_heads)
  seen = []
  monkeypatch.setattr(
    contrib,
    "as_tuned_medusa2",
    lambda model, folder, progress: seen.append((folder, progress)) or model,
  )
  methods = bench.make_methods(
    tiny,
    ["ldjax:medusa", "medusa2", "medusa2-tuned"],
    progress=print,
  )
  assert list(methods) == ["ldjax:medusa", "medusa2", "medusa2-tuned"]
  assert methods["ldjax:medusa"].draft_name == str(tiny_heads)
  assert methods["medusa2"].draft_name == f"medusa2 ({tiny_heads})"
  assert seen == [(str(tiny_heads), print)]


@pytest.mark.parametrize("name", ["eagle", "ngram:3", "autoregressive:x"])
def test_unknown(tiny, name):
  with pytest.raises(ValueError, match=f"no method is called '{name}'") as e:
    bench.make_methods(tiny, ["autoregressive", name])
  for known in ("autoregressive", "ngram", "ldjax", "medusa2[:FOLDER]"):
    assert known in str(e.value)


def test_twice(tiny):
  with pytest.raises(ValueError, match="ngram is there twice"):
    bench.make_methods(tiny, ["ngram", "autoregressive", "ngram"])


def test_heads_that_nobody_measured(tiny, tiny_heads):
  with pytest.raises(ValueError, match="nobody measured how often these heads"):
    bench.make_methods(tiny, [f"medusa2-tuned:{tiny_heads}"])


def test_transformers_need_a_folder_and_the_extra(
  tiny, tiny_folder, monkeypatch
):
  with pytest.raises(ValueError, match=r"'tiny.*' is no Hugging Face folder"):
    bench.make_methods(tiny, ["transformers"])
  monkeypatch.setitem(sys.modules, "torch", None)
  with pytest.raises(ImportError, match=r"pip install 'ldjax\[torch\]'"):
    bench.make_methods(tiny, ["transformers"], path=tiny_folder)


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
