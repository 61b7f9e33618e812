"""Decoding as the Medusa-2 reference does: the baseline of the benchmarks."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from ldjax import _base, _drafts, assemble, decoding, models, sampling, typing

Array = typing.Array
Acceptance: TypeAlias = Literal["exact", "typical"]

_THRESHOLD, _ALPHA = 0.09, 0.3


@functools.lru_cache(maxsize=16)
def with_heads(target: _base.TargetFn, heads: _base.HeadsFn) -> _base.TargetFn:
  """A target whose features are the logits of all heads at every node.

  Args:
    target: the plain one.
    heads: Medusa heads.

  Returns:
    A target whose weights are (those of `target`, those of `heads`).
  """

  def forward(params, tokens, positions, parents, view):
    weights, draft_params = params
    output = target.forward(weights, tokens, positions, parents, view)
    rows, num_nodes, _ = output.hidden.shape
    flat = output.hidden.reshape(rows * num_nodes, -1)
    level, _ = heads.begin(draft_params, flat, jnp.zeros(len(flat), jnp.int32))
    return output._replace(features=level.values.reshape(rows, num_nodes, -1))

  def score(params, hidden):
    return target.score(params[0], hidden)

  return _base.TargetFn(forward, score)


@functools.lru_cache(maxsize=16)
def propose_tree(
  heads: _base.HeadsFn, tree: decoding.TokenTree
) -> _base.DraftFn:
  """The tree from the logits of the last committed position.

  Args:
    heads: Medusa heads, whose logits `with_heads` shows.
    tree: no deeper than there are heads.
  """
  width = heads.depth * heads.vocab_size
  depths = jnp.array(tree.depths[1:], jnp.int32) - 1
  ranks = jnp.array(tree.ranks[1:], jnp.int32)
  parents = (-1, *tree.parents[1:])

  def init(draft_params, batch):
    del draft_params
    return jnp.zeros((batch, width), jnp.float32)

  def propose(draft_params, draft_state, context):
    batch = context.length.shape[0]
    logits = draft_state.reshape(batch, heads.depth, heads.vocab_size)
    _, best = lax.top_k(logits, max(tree.ranks) + 1)
    ids = heads.token_ids(draft_params)
    best = best.astype(jnp.int32) if ids is None else ids[best]
    root = jnp.full((batch, 1), -1, jnp.int32)
    tokens = jnp.concatenate([root, best[:, depths, ranks]], axis=1)
    stand = jnp.array(parents, jnp.int32)
    candidates = _base.Candidates(
      tokens, jnp.broadcast_to(stand[None], tokens.shape)
    )
    return candidates, draft_state

  return _base.DraftFn(
    init=init,
    propose=propose,
    observe=lambda draft_params, draft_state, observation: _base.last_observed(
      observation, draft_state
    ),
    release=lambda draft_state, mask: jnp.where(mask[:, None], 0, draft_state),
    size=tree.size,
    depth=tree.depth,
  )


@functools.lru_cache(maxsize=16)
def _decoder(
  target: _base.TargetFn,
  draft: _base.DraftFn,
  init_cache: Callable[[int], Any],
  max_len: int,
  accept: Callable[..., _base.Acceptance],
) -> _base.Decoder:
  inner = decoding.speculative(
    target, draft, init_cache, max_len=max_len, accept=accept
  )

  def with_both(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(params: _base.DecoderParams, *args: Any, **options: Any) -> Any:
      both = params._replace(target=(params.target, params.draft))
      return function(both, *args, **options)

    return call

  return inner._replace(
    init=with_both(inner.init),
    step=with_both(inner.step),
    empty=with_both(inner.empty),
    prefill=with_both(inner.prefill),
  )


def read_heads(
  model: assemble.LanguageModel, draft: str | pathlib.Path
) -> tuple[_base.HeadsFn, Any]:
  """Medusa heads for a model, and their weights.

  Args:
    model: on one device.
    draft: see `as_medusa2`.

  Raises:
    FileNotFoundError, ValueError: see `as_medusa2`.
  """
  if model.mesh is not None:
    raise ValueError("the Medusa-2 mode is for one device; load without mesh")
  dtype = jax.tree.leaves(model.params.target)[0].dtype
  drafts = _drafts.read(
    draft,
    "root",
    model_name=model.name,
    config=model.config,
    dtype=dtype,
    max_len=model.max_len,
  )
  if not isinstance(drafts.config, models.MedusaConfig):
    raise ValueError(
      f"{draft}: a draft of kind {getattr(drafts.config, 'kind', 'none')!r};"
      " the Medusa-2 mode wants Medusa heads"
    )
  heads, _ = models.functionalize_draft(drafts.config, dtype)
  return heads, _drafts.borrow(drafts, model.params.target)


def as_medusa2(
  model: assemble.LanguageModel,
  draft: str | pathlib.Path,
  *,
  tree: assemble.Tree | None = None,
  acceptance: Acceptance = "exact",
) -> assemble.LanguageModel:
  """The same target, decoded as the Medusa-2 reference does.

  One fixed tree of 64 nodes in every round; logits of all heads at every node
  of it and at every position of a prompt; keys and values of `max_len`
  positions taken for each sequence from the start. What differs from the
  reference: compiled by XLA on the same kernels as everything else here, so
  that a comparison is one of methods.

  Args:
    model: from `load`, on one device.
    draft: a folder with Medusa heads in any layout.
    tree: see `parse_tree`; None for what the reference picks by the model's
      name, else its default, `mc_sim_7b_63`. It is cut to the depth of the
      heads.
    acceptance: `"exact"` gives the text of plain decoding; `"typical"` accepts
      what is likely enough at the request's temperature, and then the text is
      another one. At temperature 0 they are the same.

  Returns:
    A `LanguageModel`.

  Raises:
    FileNotFoundError: for a folder that is not there.
    ValueError: for a draft that is not of Medusa heads or not of this model, an
      unknown `acceptance`, or a model on a mesh.

  Example:
    baseline = ldjax.contrib.as_medusa2(model, "medusa_heads")

  Source: Cai et al. 2024, and its code (`FasterDecoding/Medusa`).
  """
  rules = {"exact": decoding.accept, "typical": typical_accept}
  if acceptance not in rules:
    raise ValueError(
      f"acceptance is {acceptance!r}; known are {', '.join(map(repr, rules))}"
    )
  heads, weights = read_heads(model, draft)
  if tree is None:
    wanted = _drafts.medusa_tree(model.name, heads.depth)
  else:
    wanted = assemble.parse_tree(tree).cut(heads.depth)
  proposes = propose_tree(heads, wanted)
  target = with_heads(model.target, heads)

  def build(draft: _base.DraftFn) -> _base.Decoder:
    rule = rules[acceptance]
    return _decoder(target, draft, model.init_cache, model.max_len, rule)

  return dataclasses.replace(
    model,
    draft_name=f"medusa2 ({draft})",
    params=decoding.DecoderParams(model.params.target, weights),
    ladder=(assemble.Rung(proposes, build(proposes), None),),
    start=0,
    fallback=build(decoding.root_only(proposes)),
    preallocates=True,
  )


def typical_accept(
  scores: _base.Scores,
  candidates: _base.Candidates,
  sampling_params: sampling.Sampling,
  history: sampling.History,
  *,
  depth: int,
  stop_ids: Array,
  remaining: Array,
  threshold: float = _THRESHOLD,
  alpha: float = _ALPHA,
) -> _base.Acceptance:
  """Accepts the longest path of tokens that the target finds likely enough.

  A token is if its probability, at the row's temperature, exceeds the lesser
  of `threshold` and `alpha * exp(-entropy)` of what the target expects there.
  Among paths of one length the likeliest is taken; the token after it is the
  target's best. Rows of temperature 0 are accepted exactly. The text is not
  that of plain decoding, and depends on the draft.

  Args:
    scores: see `decoding.accept`, as are the others.
    candidates: [B, T].
    sampling_params: of B rows; of them the temperature counts.
    history: of B rows.
    depth: D.
    stop_ids: [B, X].
    remaining: [B].
    threshold: epsilon, a probability.
    alpha: delta, at most 1.

  Returns:
    `Acceptance` with D + 1 columns.

  Source: Cai et al. 2024 (Medusa), section 3.3.1.
  """
  exact = decoding.accept(
    scores,
    candidates,
    sampling_params,
    history,
    depth=depth,
    stop_ids=stop_ids,
    remaining=remaining,
  )
  temperature = sampling_params.temperature
  warm = jnp.where(temperature > 0, temperature, 1.0)
  logits = scores.logits / warm[:, None, None]
  logprobs = jax.nn.log_softmax(logits)
  entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
  limit = jnp.minimum(threshold, alpha * jnp.exp(-entropy))
  parents = candidates.parents
  above = jnp.maximum(parents, 0)
  tokens = jnp.maximum(candidates.tokens, 0)
  batch, size = parents.shape

  def of_parent(x):
    return jnp.take_along_axis(x, above, axis=1)

  # [B, T], of each node's token where its parent stands.
  row = jnp.arange(batch, dtype=jnp.int32)[:, None]
  said = logprobs[row, above, tokens]
  likely = (parents >= 0) & (candidates.tokens >= 0)
  likely &= jnp.exp(said) > of_parent(limit)

  def add(node, carry):
    level, total = carry
    parent = above[:, node][:, None]
    before = jnp.take_along_axis(level, parent, axis=1)[:, 0]
    sums = jnp.take_along_axis(total, parent, axis=1)[:, 0] + said[:, node]
    good = likely[:, node] & (before >= 0)
    return (
      level.at[:, node].set(jnp.where(good, before + 1, -1)),
      total.at[:, node].set(jnp.where(good, sums, -jnp.inf)),
    )

  # How deep each accepted node stands; -1 for one that is not.
  level = jnp.full((batch, size), -1, jnp.int32).at[:, 0].set(0)
  total = jnp.full((batch, size), -jnp.inf).at[:, 0].set(0.0)
  level, total = lax.fori_loop(1, size, add, (level, total))
  deepest = jnp.max(level, axis=1)
  longest = level == deepest[:, None]
  end = jnp.argmax(jnp.where(longest, total, -jnp.inf), axis=1)
  columns = jnp.arange(depth + 1, dtype=jnp.int32)[None]

  def up(_, carry):
    node, path = carry
    at = jnp.take_along_axis(level, node[:, None], axis=1)
    path = jnp.where(columns == at, node[:, None], path)
    return jnp.take_along_axis(above, node[:, None], axis=1)[:, 0], path

  path = jnp.zeros((batch, depth + 1), jnp.int32)
  _, path = lax.fori_loop(0, depth + 1, up, (end.astype(jnp.int32), path))
  best = jnp.argmax(scores.logits, axis=-1).astype(jnp.int32)
  follows = jnp.take_along_axis(
    tokens, jnp.concatenate([path[:, 1:], path[:, :1]], axis=1), axis=1
  )
  bonus = jnp.take_along_axis(best, path, axis=1)
  emitted = jnp.where(columns < deepest[:, None], follows, bonus)
  stops = jnp.any(emitted[:, :, None] == stop_ids[:, None], axis=-1)
  stops &= columns <= deepest[:, None]
  until = jnp.where(
    jnp.any(stops, axis=1), jnp.argmax(stops, axis=1) + 1, depth + 1
  )
  finite = jnp.isfinite(jnp.max(scores.logits[:, 0], axis=-1))
  count = jnp.minimum(jnp.minimum(deepest + 1, until), remaining)
  count = jnp.where(finite, count, 0).astype(jnp.int32)
  typical = _base.Acceptance(
    path=path,
    tokens=jnp.where(columns < count[:, None], emitted, -1),
    logprobs=jnp.zeros(path.shape, jnp.float32),
    count=count,
    stopped=jnp.any(stops & (columns < count[:, None]), axis=1),
    finite=finite | (remaining == 0),
  )

  def choose(x, y):
    cold = (temperature == 0).reshape(-1, *[1] * (x.ndim - 1))
    return jnp.where(cold, x, y)

  return jax.tree.map(choose, exact, typical)
