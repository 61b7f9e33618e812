"""What draft heads are trained for, and how well they do it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ldjax import _base, typing

Array = typing.Array


class Batch(NamedTuple):
  """Windows of texts; a window may span several."""

  tokens: Array
  """[B, S] int32."""
  features: Array
  """[B, S, X] float16, the target's, of each token."""
  texts: Array
  """[B, S] int32, which text a token belongs to."""
  answers: Array
  """[B, S] bool, whether the target wrote the token."""


class Teacher(NamedTuple):
  """The target's opinion, over the draft's vocabulary."""

  output: Array
  """[W, X], the rows of the target's output matrix."""
  lookup: Array
  """[V] int32, where each of the target's ids stands in the draft's
  vocabulary; -1 for those that it lacks."""
  soft_cap: Array | None = None
  """[] float32, of the target's logits; None for no cap."""


def _ahead(x: Array, by: int) -> Array:
  """x [B, S, ...] with entry t from position t + by; its end is zero."""
  pad = [(0, 0)] * x.ndim
  pad[1] = (0, by)
  return jnp.pad(x[:, by:], pad)


def guessable(texts: Array, answers: Array, depth: int) -> Array:
  """Where a guess of depth d counts: [B, S, D] bool.

  Entry (b, t, d) is true iff the token at t + 2 + d is the target's own and
  belongs to the text of position t.
  """
  size = texts.shape[1]

  def at(by):
    inside = jnp.arange(size, dtype=jnp.int32)[None] + by < size
    return inside & (_ahead(texts, by) == texts) & _ahead(answers, by)

  return jnp.stack([at(2 + d) for d in range(depth)], axis=-1)


class Losses(NamedTuple):
  """Of one batch, each a mean over the places that count."""

  total: Array
  """[] what is minimised."""
  loss: Array
  """[D] cross-entropy by depth."""
  accuracy: Array
  """[D] how often the best guess is the token; a token that the draft's
  vocabulary lacks counts as missed."""
  places: Array
  """[D] float32, how many places counted."""


def loss(
  heads: _base.HeadsFn,
  params: Any,
  teacher: Teacher,
  batch: Batch,
  *,
  hardness: float,
  depth_decay: float,
) -> Losses:
  """The cross-entropy of the heads' guesses against the target.

  Args:
    heads: as pure functions.
    params: of the heads, borrowed parts included.
    teacher: the target over the draft's vocabulary.
    batch: of windows.
    hardness: between 0, the target's probabilities, and 1, its tokens.
    depth_decay: weight of each depth against the one before.
  """
  features = batch.features.astype(teacher.output.dtype)
  states = heads.unroll(params, features, batch.tokens)
  logits = jnp.einsum(
    "bsx,wx->bsw",
    features,
    teacher.output,
    preferred_element_type=jnp.float32,
  )
  if teacher.soft_cap is not None:
    logits = teacher.soft_cap * jnp.tanh(logits / teacher.soft_cap)
  opinion = jax.nn.softmax(logits)
  labels = teacher.lookup[batch.tokens]
  counts = guessable(batch.texts, batch.answers, heads.depth)
  by_depth = []
  for d in range(heads.depth):
    label, count = _ahead(labels, 2 + d), counts[:, :, d]
    logits = heads.score(params, states[:, :, d])
    likely = jax.nn.log_softmax(logits)
    soft = jnp.sum(_ahead(opinion, 1 + d) * likely, axis=-1)
    hard = jnp.take_along_axis(
      likely, jnp.maximum(label, 0)[..., None], axis=-1
    )[..., 0]
    known = (count & (label >= 0)).astype(jnp.float32)
    value = -known * ((1 - hardness) * soft + hardness * hard)
    right = (jnp.argmax(logits, -1) == label) & count
    by_depth.append(
      (
        jnp.sum(value) / jnp.maximum(jnp.sum(known), 1.0),
        jnp.sum(right.astype(jnp.float32)),
        jnp.sum(count.astype(jnp.float32)),
      )
    )
  value, right, places = (
    jnp.stack(parts) for parts in zip(*by_depth, strict=True)
  )
  weights = depth_decay ** jnp.arange(heads.depth, dtype=jnp.float32)
  return Losses(
    jnp.sum(weights * value) / jnp.sum(weights),
    value,
    right / jnp.maximum(places, 1.0),
    places,
  )


def ranks(
  heads: _base.HeadsFn,
  params: Any,
  index: Array,
  batch: Batch,
  most: int,
) -> Array:
  """How often the target's token has each rank among the guesses.

  A place counts at a depth if the tokens of the depths before were all among
  the first R guesses: elsewhere no tree would have come so far.

  Args:
    heads: as pure functions.
    params: of the heads, borrowed parts included.
    index: [V], the `lookup` of a `Teacher`.
    batch: of windows.
    most: R, ranks to tell apart.

  Returns:
    [D, R + 1] float32 counts: of rank r, from 0; last, of places.
  """
  dtype = jax.tree.leaves(params)[0].dtype
  states = heads.unroll(params, batch.features.astype(dtype), batch.tokens)
  labels = index[batch.tokens]
  counts = guessable(batch.texts, batch.answers, heads.depth)
  reached = jnp.ones(labels.shape, bool)
  found = []
  for d in range(heads.depth):
    logits = heads.score(params, states[:, :, d])
    label = _ahead(labels, 2 + d)
    own = jnp.take_along_axis(logits, jnp.maximum(label, 0)[..., None], axis=-1)
    rank = jnp.sum((logits > own).astype(jnp.int32), -1)
    count = counts[:, :, d] & reached
    known = count & (label >= 0)
    reached = known & (rank < most)
    hits = jax.nn.one_hot(rank, most) * known[..., None].astype(jnp.float32)
    found.append(
      jnp.append(
        jnp.sum(hits, (0, 1)),
        jnp.sum(count.astype(jnp.float32)),
      )
    )
  return jnp.stack(found)
