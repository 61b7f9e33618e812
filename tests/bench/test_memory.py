"""Pages against preallocation, on a tiny model's cache."""

import jax
import pytest

import ldjax
from ldjax import bench


@pytest.fixture(scope="module")
def report(tiny_folder):
  model = ldjax.load(tiny_folder, draft="none")
  done = []
  trace = bench.memory_trace([70, 90, 60, 120], count=40, seed=3)
  found = bench.compare_memory(model, trace, rows=4, on_request=done.append)
  assert done == [*range(1, 41)] * 3
  return model, trace, found


def test_every_token_is_made(report):
  _, trace, found = report
  assert found["new_tokens"] == sum(entry.new_tokens for entry in trace)
  for run in ("preallocated", "same_work", "same_bytes"):
    # No more tokens a round than rows.
    assert found[run]["steps"] * 16 >= found["new_tokens"]


def test_bytes_are_those_of_arrays(report):
  model, trace, found = report
  longest = max(map(sum, trace))
  page = jax.eval_shape(lambda: model.init_cache(1)).page_bytes
  whole = 4 * -(-longest // 16) * page
  assert found["preallocated"]["bytes"] == whole
  assert found["same_bytes"]["bytes"] == whole
  assert found["same_work"]["bytes"] % page == 0
  assert found["peak_reduction"] == 1 - found["same_work"]["bytes"] / whole


def test_pages_save(report):
  _, _, found = report
  assert found["same_work"]["preempted"] == 0
  assert found["same_work"]["steps"] <= found["preallocated"]["steps"] + 8
  assert 0 < found["waste"] < 0.05
  assert 0 <= found["fragmentation"] < 0.15
  assert found["concurrency_ratio"] > 1.5
  assert found["peak_reduction"] > 0.2


@pytest.mark.slow
def test_an_int8_pool_runs_more(report):
  model, trace, found = report
  narrow = bench.compare_memory(model, trace, rows=4, cache_dtype="int8")
  assert narrow["concurrency_ratio"] > found["concurrency_ratio"]
  assert narrow["peak_reduction"] > found["peak_reduction"]


def test_trace():
  trace = bench.memory_trace(count=500)
  assert trace == bench.memory_trace(count=500)
  assert {entry.new_tokens for entry in trace} <= {*range(16, 513)}
  prompts = [entry.prompt_tokens for entry in trace]
  assert 70 < sum(prompts) / 500 < 95 and min(prompts) >= 16


def test_refused(tiny_folder):
  model = ldjax.load(tiny_folder, draft="none")
  with pytest.raises(ValueError, match="0 requests and 4 rows"):
    bench.compare_memory(model, [], rows=4)
