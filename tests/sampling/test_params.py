"""Settings: what is refused, and what the accepted ones become."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldjax import sampling


@pytest.mark.parametrize(
  ("setting", "value", "message"),
  [
    ("top_k", -1, "top_k is -1; .* at least 1"),
    ("top_k", 0.5, "top_k is 0.5; .*whole number"),
    ("top_k", float("nan"), "top_k is nan; .*whole number"),
    ("top_k", [3, -2], "top_k is -2"),
    ("temperature", float("nan"), "temperature is nan; .* finite"),
    ("temperature", float("inf"), "temperature is inf; .* finite"),
    ("temperature", -1, "temperature is -1.0; .* at least 0"),
    ("top_p", 0, "top_p is 0.0; .* above 0 and at most 1"),
    ("top_p", 1.1, "top_p is 1.1; .* above 0 and at most 1"),
    ("top_p", float("nan"), "top_p is nan"),
    ("seed", -1, r"seed is -1; .*\[0, 2\*\*64\)"),
    ("temperature", [1.0], "temperature has 1 entries for 2 rows"),
    ("top_k", (1, 2, 3), "top_k has 3 entries for 2 rows"),
    ("top_p", np.ones(5), "top_p has 5 entries for 2 rows"),
    ("seed", [1, 2, 3], "seed has 3 entries for 2 rows"),
  ],
)
def test_refusals_name_the_setting_and_its_limit(setting, value, message):
  with pytest.raises(ValueError, match=message):
    sampling.make_sampling(2, **{setting: value})


def test_defaults_are_greedy_and_whole():
  settings = sampling.make_sampling(3)
  assert settings.temperature.tolist() == [0, 0, 0]
  assert settings.top_k.tolist() == [0, 0, 0]
  assert settings.top_p.tolist() == [1, 1, 1]
  # One seed means the same in whatever row a prompt stands.
  np.testing.assert_array_equal(
    settings.key, np.stack([sampling.sequence_key(0)] * 3)
  )


def test_lists_and_arrays_are_one_a_row():
  for make in (list, tuple, np.array, jnp.array):
    settings = sampling.make_sampling(
      2,
      temperature=make([0.5, 2.0]),
      top_k=make([3, 0]),
      top_p=make([0.25, 1.0]),
      seed=make([7, 8]),
    )
    assert settings.temperature.tolist() == [0.5, 2.0]
    assert settings.top_k.tolist() == [3, 0]
    assert settings.top_p.tolist() == [0.25, 1.0]
    for row, seed in enumerate((7, 8)):
      np.testing.assert_array_equal(
        settings.key[row], sampling.sequence_key(seed)
      )
  settings = sampling.make_sampling(
    2, temperature=[None, 1.0], top_k=[None, 2], top_p=[None, 0.5]
  )
  assert settings.temperature.tolist() == [0.0, 1.0]
  assert settings.top_k.tolist() == [0, 2]
  assert settings.top_p.tolist() == [1.0, 0.5]


def test_scalars_of_numpy_and_jax():
  for make in (np.float32, np.array, jnp.float32):
    assert sampling.make_sampling(
      2, temperature=make(0.5)
    ).temperature.tolist() == [0.5, 0.5]
  keys = jax.random.split(jax.random.key(3), 2)
  settings = sampling.make_sampling(2, seed=keys)
  for row in range(2):
    np.testing.assert_array_equal(
      settings.key[row], sampling.sequence_key(keys[row])
    )
  mixed = sampling.make_sampling(2, seed=[3, jax.random.key(3)])
  np.testing.assert_array_equal(mixed.key[0], mixed.key[1])


def test_dtypes_and_no_rows():
  settings = sampling.make_sampling(0)
  assert settings.key.shape == (0, 2)
  for field, dtype in (
    ("temperature", jnp.float32),
    ("top_k", jnp.int32),
    ("top_p", jnp.float32),
    ("key", jnp.uint32),
  ):
    assert getattr(settings, field).dtype == dtype
  assert sampling.make_sampling(1, top_k=2**40).top_k.tolist() == [2**31 - 1]


def test_a_traced_integer_is_no_seed():
  with pytest.raises(TypeError, match=r"pass jax\.random\.key\(seed\)"):
    jax.vmap(lambda seed: sampling.make_sampling(1, seed=seed).key)(
      jnp.arange(3)
    )
  keys = jax.vmap(jax.random.key)(jnp.arange(3))
  have = jax.vmap(lambda key: sampling.make_sampling(1, seed=key).key)(keys)
  want = [sampling.make_sampling(1, seed=seed).key for seed in range(3)]
  assert (have == jnp.stack(want)).all()
