"""What the host does about pages: sharing, growing, rows that give way."""

import dataclasses
import logging

import jax
import numpy as np
import pytest

import ldjax
from ldjax import _engine, _request, memory

_SYSTEM = "You answer in a single line, and never in two. "
PROMPTS = [_SYSTEM + text for text in ("Why?", "ab ab ab", "x", "Why? Not", "")]
LIMITS = [20, 11, 25, 7, 16]
SETTINGS = {"max_new_tokens": LIMITS, "seed": [1, 2, 3, 4, 5]}


def run(
  model, prompts, batch, share=True, watch=lambda engine: None, **changes
):
  """Runs prompts to their end; generations, and the engine."""
  engine = _engine.Engine(model, batch, share=share)
  count = len(prompts)
  for i, prompt in enumerate(prompts):
    mine = {
      key: value[i] if isinstance(value, list) else value
      for key, value in changes.items()
    }
    for one in _request.make_requests(model, prompt, ldjax.Settings(**mine)):
      engine.submit(one)
  found = {}
  turns = 0
  while not engine.idle:
    turns += 1
    assert turns < 3000, "the host loop does not come to an end"
    for event in engine.advance():
      if event.generation is not None:
        found[event.request] = event.generation
    watch(engine)
  assert len(found) >= count
  return [found[i] for i in range(len(found))], engine


def held(engine):
  """Pages that rows hold, once those kept for later are dropped."""
  engine._state = engine._pages.forget(engine._state)
  stats = memory.cache_stats(engine._state.cache)
  return stats.pages - stats.free


@pytest.fixture(scope="module")
def loaded(tiny_folder):
  def load(**options):
    model = ldjax.load(tiny_folder, page_size=4, max_len=128, **options)
    return dataclasses.replace(model, prefill_chunks=(8, 64))

  return load


@pytest.fixture(scope="module")
def want(loaded):
  """Tokens of the prompts one by one, for each temperature."""
  model = loaded(draft="none")
  found = {}
  for temperature in (0.0, 1.0):
    results = ldjax.generate(
      model, PROMPTS, batch_size=1, temperature=temperature, **SETTINGS
    )
    found[temperature] = [result.tokens for result in results]
  return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
  ("options", "told"),
  [
    ({}, {"preempted": 0, "grown": 0}),
    ({"initial_pages": 12}, {"preempted": 0}),
    ({"num_pages": 24}, {"grown": 0}),
    ({"num_pages": 24, "on_pressure": "offload"}, {"preempted": 0}),
    ({"initial_pages": 9, "num_pages": 24, "on_pressure": "offload"}, {}),
  ],
  ids=["ample", "growing", "preempting", "offloading", "both"],
)
def test_same_texts_however_memory_fares(
  loaded, want, options, told, temperature
):
  model = loaded(**options)
  have, engine = run(model, PROMPTS, 4, temperature=temperature, **SETTINGS)
  assert [each.tokens for each in have] == want[temperature]
  assert not any(each.compressed for each in have)
  counts = dataclasses.asdict(engine.memory_counts)
  assert counts["reused"] > 0
  assert {key: counts[key] for key in told} == told
  if "initial_pages" in options:
    assert counts["grown"] > 0
  if "num_pages" in options:
    gave_way = "offloaded" if "on_pressure" in options else "preempted"
    assert counts[gave_way] > 0 and counts["dropped"] > 0
  assert held(engine) == 0


def test_the_start_is_read_once(loaded):
  model = loaded(draft="none")
  ids = ldjax.encode_prompt(model.tokenizer, PROMPTS[0])
  _, engine = run(model, [ids, ids, [*ids[:-1], 7]], 1, max_new_tokens=4)
  # All full pages of the prompt, but for the last token.
  full = (len(ids) - 1) // 4 * 4
  assert engine.memory_counts.reused == 2 * full


def test_a_text_is_there_for_the_next_turn(loaded):
  model = loaded(draft="none")
  ids = ldjax.encode_prompt(model.tokenizer, "Why?")
  [first], _ = run(model, [ids], 1, max_new_tokens=20)
  longer = [*ids, *first.tokens, 5, 6]
  [_, second], engine = run(model, [ids, longer], 1, max_new_tokens=[20, 9])
  # The last token of the first text was never committed.
  known = (len(ids) + len(first.tokens) - 1) // 4 * 4
  assert engine.memory_counts.reused == known
  [alone], _ = run(model, [longer], 1, share=False, max_new_tokens=9)
  assert second.tokens == alone.tokens


def test_samples_of_a_prompt_share_its_pages(loaded):
  model = loaded()
  full = (len(ldjax.encode_prompt(model.tokenizer, PROMPTS[0])) - 1) // 4
  most = 0

  def watch(engine):
    nonlocal most
    if engine.running == 4:
      references = np.asarray(engine._state.cache.pool.references)
      # The index holds them as well.
      most = max(most, int((references == 5).sum()))

  settings = {"num_samples": 4, "temperature": 1.0, "max_new_tokens": 12}
  have, engine = run(model, PROMPTS[:1], 4, watch=watch, **settings)
  assert most == full
  alone = ldjax.generate(
    loaded(draft="none"), PROMPTS[0], batch_size=1, **settings
  )
  assert [x.tokens for x in have] == [x.tokens for x in alone]
  assert held(engine) == 0


def test_a_draft_that_needs_every_position_begins_at_the_start(loaded):
  model = loaded()
  needy = dataclasses.replace(
    model,
    ladder=tuple(
      rung._replace(draft=rung.draft._replace(observes_all=True))
      for rung in model.ladder
    ),
  )
  _, engine = run(needy, PROMPTS[:2], 1, max_new_tokens=3)
  assert engine.memory_counts.reused == 0


def test_rows_that_wait_keep_their_order(loaded, want):
  model = loaded(num_pages=24, on_pressure="offload")
  prompts = [*PROMPTS, *PROMPTS]
  settings = {key: value * 2 for key, value in SETTINGS.items()}
  have, engine = run(model, prompts, 3, temperature=0.0, **settings)
  assert [each.tokens for each in have] == want[0.0] * 2
  assert held(engine) == 0


def test_error(loaded):
  model = loaded(num_pages=24, on_pressure="error")
  with pytest.raises(MemoryError) as caught:
    run(model, PROMPTS, 4, **SETTINGS)
  for part in (
    "rows need more than the 24 pages of 4",
    "batch_size",
    "preempt",
  ):
    assert part in str(caught.value)


def test_compress(loaded, want):
  model = loaded(num_pages=24, on_pressure="compress", draft="none")
  with pytest.warns(UserWarning, match="becomes int8 .* rms 0"):
    have, engine = run(model, PROMPTS, 4, temperature=0.0, **SETTINGS)
  assert engine.memory_counts.compressed == 1
  assert have[-1].compressed
  cache = engine._state.cache
  assert cache.pages[0].dtype == np.int8
  # As many bytes as before at most, and more pages.
  plain = jax.eval_shape(lambda: model.init_cache(4))
  assert cache.pool.num_pages > 24
  assert cache.pool.num_pages * cache.page_bytes <= 24 * plain.page_bytes
  assert [len(each.tokens) for each in have] == [len(x) for x in want[0.0]]
  assert held(engine) == 0


def test_a_cache_in_eight_bits_is_not_compressed_again(loaded):
  model = loaded(num_pages=24, on_pressure="compress", cache_dtype="int8")
  have, engine = run(model, PROMPTS, 4, **SETTINGS)
  assert (
    engine.memory_counts.preempted > 0 and not engine.memory_counts.compressed
  )
  assert not any(each.compressed for each in have)


def test_all_that_is_done_is_logged(loaded, caplog):
  model = loaded(initial_pages=9, num_pages=24, on_pressure="offload")
  with caplog.at_level(logging.INFO, logger="ldjax.memory"):
    run(model, PROMPTS, 4, **SETTINGS)
  for part in ("grows from 9 to 18", "grows from 18 to 24", "to the host"):
    assert part in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("on_pressure", ["preempt", "offload"])
@pytest.mark.parametrize("seed", range(6))
def test_random_requests(loaded, on_pressure, seed):
  rng = np.random.default_rng(seed)
  model = loaded(initial_pages=8, num_pages=32, on_pressure=on_pressure)
  stem = rng.integers(1, 250, 60).tolist()
  prompts = []
  for _ in range(16):
    kept = stem[: int(rng.integers(0, 60))]
    prompts.append(
      kept + rng.integers(1, 250, int(rng.integers(1, 9))).tolist()
    )
  settings = {
    "max_new_tokens": rng.integers(1, 50, 16).tolist(),
    "temperature": rng.choice([0.0, 1.0], 16).tolist(),
    "seed": rng.integers(0, 99, 16).tolist(),
  }
  have, engine = run(model, prompts, 4, **settings)
  alone, _ = run(loaded(draft="none"), prompts, 1, share=False, **settings)
  assert [x.tokens for x in have] == [x.tokens for x in alone]
  assert held(engine) == 0


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"on_pressure": "panic"}, "on_pressure is 'panic'; give one of preempt"),
    ({"initial_pages": 0}, "initial_pages is 0"),
    ({"memory_budget": "1KB"}, "memory_budget is 1,000 bytes, of which the"),
    ({"memory_budget": "much"}, "budget is 'much'; write an amount"),
  ],
)
def test_refused(loaded, options, message):
  with pytest.raises(ValueError, match=message):
    loaded(**options)


def test_the_budget_bounds_the_pool(loaded):
  whole = loaded()
  weights = sum(x.nbytes for x in jax.tree.leaves(whole.params))
  page = jax.eval_shape(lambda: whole.init_cache(1)).page_bytes
  model = loaded(memory_budget=weights + 10 * page + 1)
  assert (model.initial_pages, model.num_pages) == (10, 10)
  with pytest.raises(ValueError, match=r"needs 12 pages .* has 10 at most"):
    ldjax.generate(model, [1] * 40, max_new_tokens=9)
