"""A state saved in mid-run and restored in another process goes on."""

import json
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from ldjax import checkpoints, decoding, sampling, testing

PROMPTS = [[1, 2, 3], [9, 8, 7, 6], [30]]

# Run by both processes.
_PROGRAM = """
import sys, json, jax, numpy as np
from ldjax import checkpoints, decoding, testing
tiny = testing.tiny_model(max_len=32)
decoder = decoding.speculative(
  tiny.target, testing.random_tree_draft(9, 3, 31), tiny.init_cache,
  max_len=tiny.max_len)
params = decoding.DecoderParams(tiny.params)
like = jax.eval_shape(lambda: decoder.empty(params, 3))
state = checkpoints.restore_state(sys.argv[1], like)
step = jax.jit(decoder.step, donate_argnums=1)
while np.asarray(state.live).any():
  state, _ = step(params, state)
print(json.dumps([np.asarray(state.tokens).tolist(), state.length.tolist()]))
"""


@pytest.mark.slow
def test_goes_on_in_another_process(tmp_path):
  tiny = testing.tiny_model(max_len=32)
  decoder = decoding.speculative(
    tiny.target,
    testing.random_tree_draft(9, 3, 31),
    tiny.init_cache,
    max_len=tiny.max_len,
  )
  params = decoding.DecoderParams(tiny.params)
  tokens, lengths = testing.pad_prompts(PROMPTS)
  state = jax.jit(decoder.init)(
    params,
    tokens,
    lengths,
    sampling=sampling.make_sampling(3, temperature=[0, 1, 0.7], seed=5),
    max_new_tokens=24,
  )
  step = jax.jit(decoder.step)
  for _ in range(5):
    state, _ = step(params, state)
  assert np.asarray(state.live).all()
  checkpoints.save_state(tmp_path / "run", state)
  done = subprocess.run(
    [sys.executable, "-c", _PROGRAM, str(tmp_path / "run")],
    capture_output=True,
    text=True,
    check=True,
    cwd=pathlib.Path(decoding.__file__).parents[2],
  )
  while np.asarray(state.live).any():
    state, _ = step(params, state)
  got = json.loads(done.stdout)
  assert got == [state.tokens.tolist(), state.length.tolist()]
  assert state.emitted.tolist() == [24] * 3
