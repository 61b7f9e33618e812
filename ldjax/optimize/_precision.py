"""Which matrices go to fewer bits within an error that the user sets."""

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from ldjax import assemble, memory, models, typing
from ldjax.optimize import _matrices

Array = typing.Array


@struct.dataclass
class _Switched:
  """A weight in two precisions, of which a flag says which to use.

  So that one program serves whatever is chosen.
  """

  wide: Any
  narrow: Any
  on: Array

  @property
  def shape(self) -> tuple[int, ...]:
    """[out, in]."""
    return self.wide.shape

  def product(self, rows: Array) -> Array:
    """Either product, in float32."""
    return lax.cond(
      self.on,
      lambda: models.linear(rows, self.narrow, out_dtype=jnp.float32),
      lambda: models.linear(rows, self.wide, out_dtype=jnp.float32),
    )


class Difference(NamedTuple):
  """How far a model in fewer bits is from itself."""

  kl: float
  """Mean over positions of the KL divergence from the exact model to it."""
  kl_error: float
  """Standard error of that, over the texts."""
  changed: float
  """Share of positions where the likeliest token is another."""

  @property
  def kl_bound(self) -> float:
    """The mean with two standard errors on top: what is held to a bound."""
    return self.kl + 2 * self.kl_error


class Comparison:
  """Measures choices of precision against the exact model on texts.

  Args:
    model: from `load`, exact.
    texts: token ids [n, S], n texts.
    choice: precision by full name: everything that may be chosen.
    cache_dtype: of keys and values in what is compared with the exact model.
  """

  def __init__(
    self,
    model: assemble.LanguageModel,
    texts: np.ndarray,
    choice: Mapping[str, str],
    cache_dtype: Any = None,
  ):
    self._choice = dict(choice)
    params = model.params.target
    exact = {
      name: weight
      for group in _matrices.groups(model.config)
      for name, weight in _matrices.matrices(params, group).items()
      if name in choice
    }
    self._exact = exact
    self._narrow = {
      name: models.narrow(weight, choice[name])
      for name, weight in exact.items()
    }
    self._config, _ = _matrices.with_weights(model.config, params, exact)
    self._params = params
    dtype = params["embed_tokens"]["weight"].dtype
    self._score = _scorer(
      self._config, dtype, memory.cache_dtype(cache_dtype or dtype)
    )
    self._texts = [jnp.asarray(text, jnp.int32)[None] for text in texts]
    exactly = _scorer(self._config, dtype, memory.cache_dtype(dtype))
    off = self._with(())
    self._reference = [np.asarray(exactly(off, text)) for text in self._texts]

  def _with(self, names: Sequence[str]) -> Any:
    weights = {
      name: _Switched(
        wide=weight, narrow=self._narrow[name], on=jnp.asarray(name in names)
      )
      for name, weight in self._exact.items()
    }
    return _matrices.with_weights(self._config, self._params, weights)[1]

  def difference(self, names: Sequence[str], count: int | None = None) -> Any:
    """The difference with some matrices in fewer bits.

    Args:
      names: full names, of those chosen from.
      count: texts to look at; None for all.

    Returns:
      `Difference`.
    """
    params = self._with(names)
    kls, changed = [], []
    for text, reference in zip(
      self._texts[:count], self._reference[:count], strict=True
    ):
      kl, other = _compare(self._score(params, text), reference)
      kls.append(float(kl))
      changed.append(float(other))
    error = statistics.stdev(kls) / len(kls) ** 0.5 if len(kls) > 1 else 0.0
    return Difference(statistics.mean(kls), error, statistics.mean(changed))


@functools.lru_cache(maxsize=8)
def _scorer(
  config: models.TransformerConfig, dtype: Any, cache_dtype: Any
) -> Any:
  """(params, text [1, S]) -> logits [S, V], as a prompt is read."""
  target, _ = models.functionalize(models.abstract_model(config, dtype))

  def run(params, text):
    size = text.shape[1]
    init_cache = assemble.cache_factory(
      config, max_len=size, page_size=size, dtype=cache_dtype
    )
    chain = jnp.arange(size, dtype=jnp.int32)[None]
    view = init_cache(1).view()
    output = target.forward(params, text, chain, chain - 1, view)
    return target.score(params, output.hidden).logits[0]

  return jax.jit(run)


@jax.jit
def _compare(logits: Array, reference: Array) -> tuple[Array, Array]:
  ours, theirs = jax.nn.log_softmax(logits), jax.nn.log_softmax(reference)
  kl = jnp.sum(jnp.exp(theirs) * (theirs - ours), axis=-1)
  other = jnp.argmax(logits, axis=-1) != jnp.argmax(reference, axis=-1)
  return jnp.mean(kl), jnp.mean(other.astype(jnp.float32))


def choose_precision(
  model: assemble.LanguageModel,
  texts: np.ndarray,
  gains: Mapping[str, Mapping[str, Any]],
  *,
  max_kl: float,
  max_changed: float = 1.0,
  cache_dtype: Any = None,
  on_group: Callable[[int, int], None] | None = None,
) -> tuple[dict[str, str], Difference]:
  """Chooses the matrices that go to fewer bits within a bound.

  Each group (half a layer, or the output matrix) is measured alone; then they
  are taken in the order of time saved per error, and as many as together stay
  below the bound, which the mean and two standard errors of what was measured
  on all texts must.

  Args:
    model: from `load`, exact.
    texts: token ids [n, S] to measure on.
    gains: from `what_gains`.
    max_kl: the bound of the mean KL divergence, nats a token.
    max_changed: the largest share of greedy tokens that may change.
    cache_dtype: of keys and values, whose error counts too.
    on_group: called with the number of groups measured, and of all.

  Returns:
    Precision by full name of a matrix, and the difference of that choice.

  Raises:
    ValueError: for a bound below 0 or texts without two tokens.
  """
  if not max_kl >= 0 or not 0 <= max_changed <= 1:
    raise ValueError(
      f"max_kl is {max_kl} and max_changed {max_changed}; give a divergence of"
      " at least 0 and a share between 0 and 1"
    )
  if texts.ndim != 2 or texts.shape[0] < 1 or texts.shape[1] < 2:
    raise ValueError(
      f"texts have shape {texts.shape}; give at least one text of at least 2"
      " tokens"
    )
  exact = Difference(0.0, 0.0, 0.0)
  if not gains or max_kl == 0 or max_changed == 0:
    return {}, exact
  choice = {name: gain["precision"] for name, gain in gains.items()}
  comparison = Comparison(model, texts, choice, cache_dtype)
  by_group: dict[str, list[str]] = {}
  for name in gains:
    by_group.setdefault(_matrices.group_of(name), []).append(name)
  few = max(1, min(len(texts), 3))
  order = []
  for done, (group, names) in enumerate(by_group.items(), 1):
    cost = comparison.difference(names, few).kl
    gain = sum(gains[name]["gain"] for name in names)
    order.append((max(cost, 1e-12) / gain, group))
    if on_group is not None:
      on_group(done, len(by_group))
  ranked = [by_group[group] for _, group in sorted(order)]

  def measured(count: int) -> Difference:
    names = [name for group in ranked[:count] for name in group]
    return comparison.difference(names)

  def fit(found: Difference) -> bool:
    return found.kl_bound <= max_kl and found.changed <= max_changed

  # The largest number that fits, if more groups never do less harm; whatever
  # it is, it was measured itself.
  fits, least = len(ranked), measured(len(ranked))
  if not fit(least):
    fits, least, over = 0, measured(0), len(ranked)
    while over - fits > 1:
      middle = (fits + over) // 2
      found = measured(middle)
      if fit(found):
        fits, least = middle, found
      else:
        over = middle
  kept = {name for group in ranked[:fits] for name in group}
  return {n: p for n, p in choice.items() if n in kept}, least
