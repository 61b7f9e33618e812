"""The formula against counts that know nothing of it, and projections."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldjax import models, profile, testing
from ldjax.profile import _machine, _work


def config(**changes):
  given = dict(
    vocab_size=31,
    hidden_size=24,
    intermediate_size=40,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=64,
  )
  return models.TransformerConfig(**(given | changes))


@pytest.mark.parametrize(
  "changes",
  [
    {},
    {"tie_word_embeddings": True},
    {"mlp_gate": False, "learned_positions": True, "norm": "layer"},
  ],
)
def test_weights_are_those_of_the_parameters(changes):
  shape = config(**changes)
  params = models.abstract_params(shape, jnp.bfloat16)
  paths = jax.tree_util.tree_leaves_with_path(params)
  looked_up = 0
  if not shape.tie_word_embeddings:
    looked_up += 31 * 24
  if shape.learned_positions:
    looked_up += 64 * 24
  matrices = sum(math.prod(x.shape) for _, x in paths if len(x.shape) == 2)
  every = sum(math.prod(x.shape) for _, x in paths)
  assert _work.product_weights(shape) == matrices - looked_up
  assert _work.weight_bytes(shape, params) == 2 * (every - looked_up)


def test_operations_are_those_of_a_loop():
  shape = config(windows=(5, None, 50))
  params = models.abstract_params(shape)
  batch, size, context = 2, 3, 11
  flops = moved = 0
  for _ in range(batch):
    for layer in range(3):
      seen = min(context, (5, 999, 50)[layer])
      moved += seen * 2 * 2 * 8 * 2  # positions, heads, K and V, H, bf16
      for _ in range(size):
        for _ in range(6):  # heads: scores and the weighted sum, 2 H each
          flops += (seen + size) * (2 * 8 + 2 * 8)
        for rows, columns in (
          *[(48, 24), (16, 24), (16, 24), (24, 48)],
          *[(40, 24), (40, 24), (24, 40)],
        ):
          flops += 2 * rows * columns
    flops += size * 2 * 31 * 24
  work = profile.step_work(
    shape,
    params,
    size=size,
    batch=batch,
    context=context,
    cache_dtype="bfloat16",
  )
  assert (work.flops, work.cache_bytes) == (flops, moved)
  assert work.other_bytes == batch * size * (3 * 2 * 2 * 8 * 2 + 2 * 4 * 31)
  assert work.bytes == work.weight_bytes + work.cache_bytes + work.other_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_position_is_what_a_page_holds(dtype):
  tiny = testing.tiny_model(cache_dtype=dtype, page_size=4)
  cache = jax.eval_shape(lambda: tiny.init_cache(1))
  layers = tiny.config.num_layers
  assert 4 * layers * _work.position_bytes(tiny.config, dtype) == (
    cache.page_bytes
  )


@pytest.mark.parametrize(
  ("given", "message"),
  [
    ({"size": 0}, "size is 0"),
    ({"size": 1, "batch": 0}, "batch is 0"),
    ({"size": 1, "context": -1}, "context is -1"),
  ],
)
def test_work_that_is_refused(given, message):
  shape = config()
  with pytest.raises(ValueError, match=message):
    profile.step_work(shape, models.abstract_params(shape), **given)


def test_projection_is_the_roofline():
  shape = config()
  chip = profile.Accelerator("chip", 1e6, 1e5, 1e9, "nowhere")
  found = profile.project(
    shape,
    {1: 1.0, 4: 2.0},
    batch=2,
    context=7,
    draft_bytes={4: 500.0},
    accelerators=[chip],
  )
  [on] = found["accelerators"]
  params = models.abstract_params(shape, jnp.bfloat16)
  for entry, tokens, draft in zip(
    on["sizes"], (1.0, 2.0), (0, 500), strict=True
  ):
    work = profile.step_work(
      shape,
      params,
      size=entry["size"],
      batch=2,
      context=7,
      cache_dtype="bfloat16",
    )
    moving, computing = (work.bytes + draft) / 1e5, work.flops / 1e6
    assert entry["step_seconds"] == max(moving, computing)
    assert entry["limit"] == ("memory" if moving > computing else "compute")
    assert entry["tokens_per_second"] == pytest.approx(
      2 * tokens / max(moving, computing)
    )
  plain, four = (entry["tokens_per_second"] for entry in on["sizes"])
  assert on["speedup"] == pytest.approx(max(four / plain, 1.0))
  assert on["fits"] and found["note"].startswith("Projection")


def test_a_model_too_large_is_said_not_to_fit():
  small = profile.Accelerator("small", 1e6, 1e5, 10.0, "nowhere")
  found = profile.project(config(), {1: 1.0}, accelerators=[small])
  assert not found["accelerators"][0]["fits"]


@pytest.mark.parametrize(
  ("tokens", "message"),
  [
    ({4: 2.0}, "give those of size 1 too"),
    ({1: 1.0, 4: 4.5}, "a tree of 4 nodes brings 4.5"),
    ({1: 1.0, 4: 0.5}, "a tree of 4 nodes brings 0.5"),
  ],
)
def test_projections_that_are_refused(tokens, message):
  with pytest.raises(ValueError, match=message):
    profile.project(config(), tokens)


def test_published_figures_are_plausible():
  for each in profile.ACCELERATORS:
    # Operations a byte: from the 4090's 160 to the v6e's 560.
    assert 100 < each.flops_per_second / each.bytes_per_second < 700
    assert each.source


def test_ceilings_come_from_the_fastest_call(monkeypatch):
  ticks = iter(np.cumsum([0, 3, 1, 2, 1, 5] * 4).tolist())
  monkeypatch.setattr(_machine.time, "perf_counter", lambda: next(ticks))
  # Calls of 3, 2 and 5 s.
  assert _machine._fastest(lambda: jnp.ones(()), 3) == 2


def test_ceilings_that_are_refused():
  with pytest.raises(ValueError, match="read_bytes is 100"):
    profile.measure_machine(read_bytes=100)
  with pytest.raises(ValueError, match="repeats is 0"):
    profile.measure_machine(repeats=0)
