"""Which methods there are, by name."""

import sys

import pytest

import ldjax
from ldjax import _drafts, bench, contrib


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


def test_transformers_need_a_folder_and_the_extra(
  tiny, tiny_folder, monkeypatch
):
  with pytest.raises(ValueError, match=r"'tiny.*' is no Hugging Face folder"):
    bench.make_methods(tiny, ["transformers"])
  monkeypatch.setitem(sys.modules, "torch", None)
  with pytest.raises(ImportError, match=r"pip install 'ldjax\[torch\]'"):
    bench.make_methods(tiny, ["transformers"], path=tiny_folder)
