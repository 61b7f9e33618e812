"""Time to the first token: what is asked for, and of whom."""

import dataclasses
import json

import pytest

from ldjax import bench
from ldjax.bench import _first_token


def test_a_repeated_prompt_is_not_read_again(tiny, tiny_plain):
  done = []
  methods = {
    "autoregressive": tiny_plain,
    "medusa2": dataclasses.replace(tiny_plain, preallocates=True),
  }
  report = bench.first_token(methods, rounds=2, on_round=done.append)
  assert json.loads(json.dumps(report)) == report
  assert done == [1, 2, 3]
  # The model holds 256 tokens, the last two of which are generated.
  assert report["tokens"] == {"short": 32, "long": 254, "system": 238}
  for row in report["methods"].values():
    assert set(row) == {"short", "long", "new", "repeated", "ratio"}
    assert all(value > 0 for value in row.values())


def test_who_shares(tiny, tiny_plain, monkeypatch):
  # Of a prompt seen before a method with shared pages computes the rest alone,
  # the reference all of it again.
  prompt = list(range(100, 180))
  for preallocates, reused in ((False, 80 - 16), (True, 0)):
    method = dataclasses.replace(tiny_plain, preallocates=preallocates)
    runner = _first_token._Runner(method)
    for question in (5, 6):
      assert runner.seconds([*prompt[:-1], question]) > 0
    assert runner._engine.memory_counts.reused == reused
    runner.close()


@pytest.mark.parametrize(
  ("max_len", "rounds", "message"),
  [(256, 0, "rounds is 0"), (50, 1, "max_len is 50; give at least 51")],
)
def test_what_is_refused(tiny, max_len, rounds, message):
  method = dataclasses.replace(tiny, max_len=max_len)
  with pytest.raises(ValueError, match=message):
    bench.first_token({"autoregressive": method}, rounds=rounds)
