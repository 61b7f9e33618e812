"""Which matrices may go to fewer bits within an error that the user sets."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from ldjax import assemble, models, typing

Array = typing.Array
Path = tuple[str | int, ...]

HEAD = "lm_head"
"""The group of the output matrix."""

_GAIN = 1.05
"""How much faster a product must be in fewer bits to be worth it."""


def groups(config: models.TransformerConfig) -> list[str]:
  """The parts of a model that are chosen together, by name.

  Args:
    config: of the model.

  Example:
    >>> import ldjax
    >>> groups(ldjax.testing.tiny_model().config)[:2]
    ['layers.0.self_attn', 'layers.0.mlp']
  """
  halves = ("self_attn", "mlp")
  layers = [f"layers.{i}.{h}" for i in range(config.num_layers) for h in halves]
  return [*layers, HEAD]


def matrices(params: Any, group: str) -> dict[str, Any]:
  """The weights of a group by full name, such as `layers.0.mlp.up_proj`.

  Args:
    params: of a target.
    group: see `groups`.
  """
  if group == HEAD:
    matrix = params.get(HEAD, params["embed_tokens"])
    return {HEAD: matrix["weight"]}
  _, number, half = group.split(".")
  inner = params["layers"][int(number)][half]
  return {
    f"{group}.{name}": part["weight"]
    for name, part in inner.items()
    if name.endswith("_proj")
  }


def with_weights(
  config: models.TransformerConfig, params: Any, weights: Mapping[str, Any]
) -> tuple[models.TransformerConfig, Any]:
  """Parameters with some weights in the place of others.

  An output matrix that was the embedding's becomes one of its own.

  Args:
    config: of the target.
    params: of it.
    weights: by full name, see `matrices`.

  Raises:
    ValueError: for a name that the model has not.
  """
  layers = dict(params["layers"])
  changed = {**params, "layers": layers}
  for name, weight in weights.items():
    if name == HEAD:
      changed[HEAD] = {"weight": weight}
      config = dataclasses.replace(config, tie_word_embeddings=False)
      continue
    group, _, last = name.rpartition(".")
    if group not in groups(config) or name not in matrices(params, group):
      raise ValueError(
        f"the model has no matrix {name!r}; there are, for example,"
        f" {', '.join(matrices(params, groups(config)[0]))}"
      )
    _, number, half = group.split(".")
    layer = dict(layers[int(number)])
    layer[half] = {**layer[half], last: {**layer[half][last], "weight": weight}}
    layers[int(number)] = layer
  return config, changed


def narrowed(
  config: models.TransformerConfig, params: Any, choice: Mapping[str, str]
) -> tuple[models.TransformerConfig, Any]:
  """Parameters with the matrices of a choice in fewer bits.

  Args:
    config: of the target.
    params: of it.
    choice: precision by full name of a matrix, see `models.narrow`.

  Raises:
    ValueError: for a matrix or precision that is not known.

  Example:
    >>> import ldjax
    >>> tiny = ldjax.testing.tiny_model()
    >>> _, params = narrowed(
    ...   tiny.config, tiny.params, {"layers.1.mlp.up_proj": "bfloat16"})
    >>> params["layers"][1]["mlp"]["up_proj"]["weight"].dtype.name
    'bfloat16'
  """
  found: dict[str, Any] = {}
  for name, precision in choice.items():
    group = name if name == HEAD else name.rpartition(".")[0]
    known = matrices(params, group) if group in groups(config) else {}
    if name not in known:
      raise ValueError(f"the model has no matrix {name!r}")
    found[name] = models.narrow(known[name], precision)
  return with_weights(config, params, found)


def _median_seconds(calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
  """Medians of calls that take turns."""
  times: dict[str, list[float]] = {name: [] for name in calls}
  for call in calls.values():
    jax.block_until_ready(call())
  for _ in range(9):
    for name, call in calls.items():
      began = time.perf_counter()
      jax.block_until_ready(call())
      times[name].append(time.perf_counter() - began)
  return {name: statistics.median(each) for name, each in times.items()}


@jax.jit
def _products(x: Array, weights: Sequence[Any]) -> Array:
  total = jnp.zeros((), jnp.float32)
  for weight in weights:
    total = total + models.linear(x, weight, out_dtype=jnp.float32).sum()
  return total


_COLD_BYTES = 64 * 2**20
"""Weights that a measurement reads in turn: more than a cache holds."""


def product_seconds(
  shape: tuple[int, int], dtype: Any, rows: int, precisions: Sequence[str]
) -> dict[str, float]:
  """Seconds of a product on this device, in each precision.

  Args:
    shape: [out, in] of the weight.
    dtype: of the model.
    rows: that are multiplied at once.
    precisions: of `models.PRECISIONS`.

  Returns:
    By precision; the one of the model's dtype as "same".
  """
  size = shape[0] * shape[1] * jnp.dtype(dtype).itemsize
  count = min(64, max(1, _COLD_BYTES // size))
  keys = jax.random.split(jax.random.key(0), count)
  exact = [jax.random.normal(key, shape, dtype) for key in keys]
  x = jax.random.normal(jax.random.key(1), (rows, shape[1]), dtype)
  calls = {"same": functools.partial(_products, x, exact)}
  for precision in precisions:
    small = [models.narrow(weight, precision) for weight in exact]
    calls[precision] = functools.partial(_products, x, small)
  found = _median_seconds(calls)
  return {name: seconds / count for name, seconds in found.items()}


def what_gains(
  params: Any,
  config: models.TransformerConfig,
  rows: Sequence[int],
  precisions: Sequence[str] = models.PRECISIONS,
) -> dict[str, dict[str, Any]]:
  """The matrices that this device multiplies faster in fewer bits.

  Args:
    params: of a target.
    config: of it.
    rows: numbers of rows that steps will have, batch times nodes.
    precisions: to try.

  Returns:
    By full name: `precision`, and `gain`, seconds saved a step over the
    numbers of rows; matrices that nothing is faster for are left out.
  """
  dtype = params["embed_tokens"]["weight"].dtype
  by_shape: dict[tuple[int, int], tuple[str, float] | None] = {}
  found = {}
  for group in groups(config):
    for name, weight in matrices(params, group).items():
      shape = tuple(weight.shape)
      if shape not in by_shape:
        by_shape[shape] = _best(shape, dtype, rows, precisions)
      best = by_shape[shape]
      if best is not None:
        found[name] = {"precision": best[0], "gain": best[1]}
  return found


def _best(
  shape: tuple[int, int],
  dtype: Any,
  rows: Sequence[int],
  precisions: Sequence[str],
) -> tuple[str, float] | None:
  each = [product_seconds(shape, dtype, count, precisions) for count in rows]
  total = {name: sum(one[name] for one in each) for name in each[0]}
  best = min(precisions, key=total.__getitem__, default=None)
  if best is None or total["same"] < _GAIN * total[best]:
    return None
  return best, (total["same"] - total[best]) / len(rows)


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
  """

  def __init__(
    self,
    model: assemble.LanguageModel,
    texts: np.ndarray,
    choice: Mapping[str, str],
  ):
    self._choice = dict(choice)
    params = model.params.target
    exact = {
      name: weight
      for group in groups(model.config)
      for name, weight in matrices(params, group).items()
      if name in choice
    }
    self._exact = exact
    self._narrow = {
      name: models.narrow(weight, choice[name])
      for name, weight in exact.items()
    }
    self._config, _ = with_weights(model.config, params, exact)
    self._params = params
    dtype = params["embed_tokens"]["weight"].dtype
    self._score = _scorer(self._config, dtype)
    self._texts = [jnp.asarray(text, jnp.int32)[None] for text in texts]
    off = self._with(())
    self._reference = [
      np.asarray(self._score(off, text)) for text in self._texts
    ]

  def _with(self, names: Sequence[str]) -> Any:
    weights = {
      name: _Switched(
        wide=weight, narrow=self._narrow[name], on=jnp.asarray(name in names)
      )
      for name, weight in self._exact.items()
    }
    return with_weights(self._config, self._params, weights)[1]

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
def _scorer(config: models.TransformerConfig, dtype: Any) -> Any:
  """(params, text [1, S]) -> logits [S, V], as a prompt is read."""
  target, _ = models.functionalize(models.abstract_model(config, dtype))

  def run(params, text):
    size = text.shape[1]
    init_cache = assemble.cache_factory(
      config, max_len=size, page_size=size, dtype=dtype
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
  comparison = Comparison(model, texts, choice)
  by_group: dict[str, list[str]] = {}
  for name in gains:
    group = name if name == HEAD else name.rpartition(".")[0]
    by_group.setdefault(group, []).append(name)
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
    fits, least, over = 0, exact, len(ranked)
    while over - fits > 1:
      middle = (fits + over) // 2
      found = measured(middle)
      if fit(found):
        fits, least = middle, found
      else:
        over = middle
  kept = {name for group in ranked[:fits] for name in group}
  return {n: p for n, p in choice.items() if n in kept}, least
