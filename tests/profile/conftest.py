"""A report with round figures, as `profile` would return it."""

import copy

import pytest

REPORT = {
  "model": "<tiny & Co>",
  "draft": "heads",
  "device": "cpu",
  "jax": "0.10.2",
  "dtype": "float32",
  "prompts": 5,
  "max_new_tokens": 64,
  "batch_size": 1,
  "context": 149,
  "speed": {
    "tokens": 193,
    "rounds": 100,
    "tokens_per_second": 13.0,
    "tokens_a_round": 1.04,
    "seconds_a_round": 0.08,
    "mean_accepted": 1.57,
    "rounds_by_size": {"1": 40, "4": 60},
    "decode_seconds": 8.0,
    "prefill_seconds": 0.71,
  },
  "round": {
    "size": 4,
    "draft": 0.0041,
    "verify": 0.0567,
    "accept": 0.0013,
    "commit": 0.0017,
    "step": 0.0613,
    "round": 0.0839,
    "host": 0.0163,
    "idle": 0.016,
  },
  "sizes": [
    {
      "size": 1,
      "depth": 0,
      "rounds": 160,
      "tokens_a_round": 1.0,
      "seconds_a_round": 0.04,
      "tokens_per_second": 25.0,
      "step_seconds": 0.05,
      "draft_seconds": 0.0,
    },
    {
      "size": 4,
      "depth": 3,
      "rounds": 89,
      "tokens_a_round": 1.8,
      "seconds_a_round": 0.06,
      "tokens_per_second": 30.0,
      "step_seconds": 0.08,
      "draft_seconds": 0.01,
    },
    {
      "size": 8,
      "depth": 4,
      "rounds": 15,
      "tokens_a_round": 4.0,
      "seconds_a_round": 0.02,
      "tokens_per_second": 200.0,
      "step_seconds": 0.11,
      "draft_seconds": 0.012,
    },
  ],
  "acceptance": [
    {"depth": 1, "tried": 97, "accepted": 61, "rate": 0.6289},
    {"depth": 2, "tried": 61, "accepted": 29, "rate": 0.4754},
  ],
  "machine": {
    "bytes_per_second": 12.5e9,
    "flops_per_second": 43.75e9,
    "read_bytes": 134217728,
    "matmul_size": 1024,
    "dtype": "float32",
  },
  "step": [
    {
      "size": 1,
      "seconds": 0.05,
      "flops": 2.79e8,
      "bytes": 4.5e8,
      "weight_bytes": 4.1e8,
      "cache_bytes": 3.7e7,
      "bytes_per_second": 9.01e9,
      "flops_per_second": 5.59e9,
      "share_of_read": 0.721,
      "share_of_flops": 0.128,
    },
    {
      "size": 4,
      "seconds": 0.07,
      "flops": 1.12e9,
      "bytes": 5e8,
      "weight_bytes": 2.9e8,
      "cache_bytes": 2e8,
      "bytes_per_second": 7.14e9,
      "flops_per_second": 1.59e10,
      "share_of_read": 0.571,
      "share_of_flops": 0.366,
    },
  ],
  "work": "formula",
  "costs": {
    "source": "measured",
    "sizes": [1, 4, 8, 16],
    "seconds": [0.05, 0.08, 0.11, 0.16],
    "draft_seconds": [0.0, 0.01, 0.012, 0.013],
  },
  "ceiling": [
    {
      "acceptance": 0.3,
      "size": 3,
      "tokens": 1.39,
      "speedup": 1.11,
      "free_size": 4,
      "free_tokens": 1.417,
      "free_speedup": 1.23,
    }
  ],
  "compilations": {
    "programs": 13,
    "seconds": 68.7,
    "from_cache": 3,
    "while_measuring": 7,
  },
  "cache": {
    "dtype": "float32",
    "int8_ratio": 0.25,
    "page_size": 16,
    "page_bytes": 737280,
    "total_bytes": 94371840,
    "peak_used_bytes": 7372800,
    "waste_at_peak": 0.094,
    "mean_waste": 0.053,
    "fragmentation": 0.011,
  },
  "ngram": [
    {
      "size": 4,
      "rounds": 111,
      "tokens_a_round": 2.42,
      "propose_seconds": 0.005,
    },
    {"size": 16, "rounds": 9, "tokens_a_round": 9.0, "propose_seconds": 0.0},
  ],
}


@pytest.fixture
def report():
  """A report without advice, free to be changed."""
  return copy.deepcopy(REPORT)
