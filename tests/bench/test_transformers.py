"""Hugging Face transformers as a method: the same text, or a clear refusal."""

import pytest

import ldjax
from ldjax import bench

pytestmark = pytest.mark.slow


@pytest.mark.filterwarnings("default")
def test_the_same_text(tiny, tiny_folder):
  pytest.importorskip("torch", reason="torch is not installed")
  pytest.importorskip("transformers", reason="transformers is not installed")
  methods = bench.make_methods(
    tiny,
    ["autoregressive", "transformers", f"transformers-lookup:{tiny_folder}"],
    path=tiny_folder,
  )
  prompts = ["hello", "one two one two one"]
  report = bench.compare(methods, prompts, max_new_tokens=12)
  for row in report["methods"].values():
    assert row["equal"] == [2, 2]
    assert row["tokens_per_second"] > 0
    assert row["time_to_first_token_s"] > 0
  assert report["methods"]["transformers"]["mean_accepted"] == 1.0
  assert report["methods"]["transformers"]["flops_per_token"] is None
  # 5 + 12 bytes and a token of the template at least, of which the last is
  # not in the cache: keys and values of two layers, 8 wide, in four bytes.
  held = 2 * 2 * 8 * 4
  size = report["methods"]["transformers"]["peak_cache_bytes"]
  assert size % held == 0 and size >= 16 * held
  with pytest.raises(ValueError, match="in greedy decoding alone"):
    bench.compare(methods, prompts, temperature=0.7)
  words = ["one two a", "one two b"]
  right = [bench.last_words(each, words) for each in methods.values()]
  assert right[0] == right[1] == right[2]
  report = bench.first_token(
    {"transformers": methods["transformers"]}, rounds=1
  )
  assert report["methods"]["transformers"]["short"] > 0
  one = methods["transformers"].generate(
    ["hello"], ldjax.Settings(max_new_tokens=5)
  )
  assert "".join(one[0].pieces) == one[0].text
