"""A corpus that a tiny model wrote."""

import pytest

import ldjax
from ldjax import training


@pytest.fixture(scope="session")
def small():
  """A two-layer random target with 31 tokens and rows of 48."""
  return ldjax.testing.tiny_model()


@pytest.fixture(scope="session")
def write_corpus(small):
  """Returns a function that lets the target write into a folder."""

  def write(folder, prompts, **settings):
    corpus = training.Corpus(folder)
    settings = {"tokens": 10**6, "batch": 3, "max_new_tokens": 20, **settings}
    training.self_distill(
      small.target,
      small.params,
      small.init_cache,
      corpus,
      prompts=prompts,
      max_len=small.max_len,
      feature_size=small.config.hidden_size,
      stop_ids=(7,),
      **settings,
    )
    return corpus

  return write


@pytest.fixture(scope="session")
def corpus(write_corpus, tmp_path_factory):
  """Answers to 130 prompts, read by tests and never written to."""
  prompts = [[1 + i % 30, 1 + i % 7, 1 + i % 11] for i in range(130)]
  return write_corpus(tmp_path_factory.mktemp("corpus"), prompts)
