"""Settings: one definition, checked when they are made."""

import dataclasses
import inspect

import jax
import numpy as np
import pytest

import ldjax
from ldjax import _settings, bench, sampling


def test_every_setting_of_the_draw_reaches_it():
  settings = ldjax.Settings(
    temperature=0.5,
    top_k=3,
    top_p=0.9,
    min_p=0.1,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    frequency_penalty=0.3,
    banned_ids=[4, 2],
    min_new_tokens=6,
    logprobs=True,
    seed=9,
  )
  have = settings.sampling(sample=2)
  want = sampling.make_sampling(
    1,
    sample=2,
    **{name: getattr(settings, name) for name in _settings._SAMPLING},
  )
  assert jax.tree.structure(have) == jax.tree.structure(want)
  neutral = ldjax.Settings().sampling()
  for field in dataclasses.fields(have):
    one, two = getattr(have, field.name), getattr(want, field.name)
    assert isinstance(one, np.ndarray)
    np.testing.assert_array_equal(one, two)
    assert not np.array_equal(one, getattr(neutral, field.name)), field.name


def test_lists_become_tuples_and_one_string_a_tuple():
  settings = ldjax.Settings(stop="x", stop_ids=[1, 2], banned_ids=np.array([3]))
  assert settings.stop == ("x",)
  assert settings.stop_ids == (1, 2)
  assert settings.banned_ids == (3,)
  assert ldjax.Settings(stop=["x", "yz"]).stop == ("x", "yz")


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"max_new_tokens": -1}, "max_new_tokens is -1; it must be at least 0"),
    ({"num_samples": 0}, "num_samples is 0; it must be at least 1"),
    ({"min_new_tokens": 9, "max_new_tokens": 8}, "9, more than max_new_tok"),
    ({"stop": ""}, "stop holds ''"),
    ({"stop": ["a", ""]}, "stop holds ''"),
    ({"stop": [3]}, "stop holds 3"),
    ({"stop_ids": [-1]}, "stop id -1"),
    ({"temperature": -1}, "temperature is -1"),
    ({"min_p": 2}, "min_p is 2"),
    ({"seed": -1}, "seed is -1"),
    ({"banned_ids": [-2]}, "banned id -2"),
  ],
)
def test_errors(settings, message):
  with pytest.raises(ValueError, match=message):
    ldjax.Settings(**settings)


def test_a_name_that_is_none_is_told_with_the_nearest():
  with pytest.raises(TypeError, match=r"'temprature'; did you mean temperatur"):
    _settings.settle(None, {"temprature": 1.0})
  with pytest.raises(TypeError, match=r"'xyz'; there are max_new_tokens, "):
    _settings.settle_each(None, {"xyz": 1}, 2)


def test_what_is_no_settings():
  for settings in ({"temperature": 1.0}, 0.8):
    with pytest.raises(TypeError, match=r"give ldjax\.Settings\("):
      _settings.settle(settings, {})
  with pytest.raises(TypeError, match="settings is 0"):
    _settings.settle_each([ldjax.Settings(), 0], {}, 2)
  assert ldjax.Settings(stop=None, stop_ids=None, banned_ids=None) == (
    ldjax.Settings()
  )


class TestEach:
  def test_one_value_or_one_a_prompt(self):
    base = ldjax.Settings(top_k=5)
    each = _settings.settle_each(
      base,
      {"seed": [1, 2], "temperature": 0.5, "stop": ["a", "b"]},
      2,
    )
    assert [one.seed for one in each] == [1, 2]
    assert [one.temperature for one in each] == [0.5, 0.5]
    # A list of strings is what one prompt may have.
    assert [one.stop for one in each] == [("a", "b")] * 2
    assert [one.top_k for one in each] == [5, 5]

  def test_settings_a_prompt(self):
    each = [ldjax.Settings(seed=1), ldjax.Settings(seed=2)]
    assert _settings.settle_each(each, {}, 2) == each
    with pytest.raises(ValueError, match="settings has 2 entries for 3 prom"):
      _settings.settle_each(each, {}, 3)

  def test_keys_and_arrays(self):
    key = jax.random.key(3)
    each = _settings.settle_each(None, {"seed": key, "top_k": np.int64(4)}, 2)
    assert [one.seed is key for one in each] == [True, True]
    keys = jax.random.split(key, 2)
    each = _settings.settle_each(None, {"seed": keys, "max_new_tokens": 3}, 2)
    for one, wanted in zip(each, keys, strict=True):
      assert (
        jax.random.key_data(one.seed) == jax.random.key_data(wanted)
      ).all()
    with pytest.raises(ValueError, match="seed has 2 entries for 3 prompts"):
      _settings.settle_each(None, {"seed": keys}, 3)


def test_signatures_show_the_settings():
  names = [field.name for field in dataclasses.fields(ldjax.Settings)]
  for function in (
    ldjax.generate,
    ldjax.stream,
    ldjax.Server.submit,
    bench.compare,
  ):
    parameters = inspect.signature(function).parameters
    assert [*parameters][-len(names) :] == names
    assert parameters["max_new_tokens"].default == 128
    assert "changes" not in parameters
