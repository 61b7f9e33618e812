"""Whether a first difference between two texts is a near tie."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ldjax import _request, _settings, assemble
from ldjax import sampling as sampling_lib
from ldjax.bench import _logits

NEAR_TIE = 1e-3
"""Below this margin two forwards may disagree by rounding alone."""

# Its branches would be compiled anew at every call without jit.
_warp = jax.jit(sampling_lib.warp)
_adjust = jax.jit(sampling_lib.adjust)


def margin(
  logits: np.ndarray, sampling: sampling_lib.Sampling, position: int
) -> float:
  """How much the logits would have to move for another token to be drawn.

  The smaller of two distances: between the best two perturbed scores, and to
  the cut of top-k, top-p or min-p where a token on its other side would have
  won.

  Args:
    logits: [V] float32, after penalties and bans.
    sampling: of one row.
    position: that the token takes.

  Returns:
    The margin, in logits (or probability, for the cut of top-p).

  Example:
    >>> import numpy as np
    >>> from ldjax import sampling
    >>> logits = np.array([1., 3., 2.75], np.float32)
    >>> margin(logits, sampling.make_sampling(1), 5)
    0.25
  """
  # A banned token is as far from being drawn as can be.
  row = np.maximum(logits.astype(np.float64), -1e30)
  if not float(sampling.temperature[0]):
    second, first = np.sort(row)[-2:]
    return float(first - second)
  scores = row / float(sampling.temperature[0])
  noise = np.asarray(
    sampling_lib.gumbel(
      sampling.key, jnp.asarray([position], jnp.int32), len(row)
    )
  )[0]
  perturbed = scores + noise
  keep = np.isfinite(np.asarray(_warp(jnp.asarray(logits)[None], sampling))[0])
  winner = int(np.argmax(np.where(keep, perturbed, -np.inf)))
  behind = np.maximum(perturbed[winner] - perturbed, 0.0)
  if keep.all():
    return float(np.min(np.delete(behind, winner)))
  # How far each token is from the other side of the cut: in logits, and for
  # the nucleus in the probability that decides.
  lowest_kept, highest_cut = scores[keep].min(), scores[~keep].max()
  to_cut = np.where(keep, scores - highest_cut, lowest_kept - scores)
  top_p = float(sampling.top_p[0])
  if top_p < 1:
    by_k = np.asarray(
      sampling_lib.top_k_mask(
        jnp.asarray(scores, jnp.float32)[None], sampling.top_k
      )
    )[0]
    weight = np.where(by_k, np.exp(scores - scores.max()), 0.0)
    weight /= weight.sum()
    order = np.argsort(-scores, kind="stable")
    larger = np.empty_like(weight)
    larger[order] = np.cumsum(weight[order]) - weight[order]
    to_cut = np.minimum(to_cut, np.abs(larger - top_p))
  min_p = float(sampling.min_p[0])
  if min_p > 0:
    to_cut = np.minimum(to_cut, np.abs(scores - scores.max() - np.log(min_p)))
  flips = np.where(keep, behind, np.maximum(behind, to_cut))
  flips[winner] = to_cut[winner]
  return float(np.min(flips))


def is_near_tie(
  model: assemble.LanguageModel,
  prompt: _request.Prompt,
  one: Sequence[int],
  other: Sequence[int],
  settings: _settings.Settings,
) -> bool:
  """Whether two different emitted texts part at a near tie.

  Args:
    model: that emitted both.
    prompt: their prompt.
    one: ids of the one.
    other: ids of the other.
    settings: the same for both.
  """
  same = 0
  while same < min(len(one), len(other)) and one[same] == other[same]:
    same += 1
  [request] = _request.make_requests(model, prompt, settings)
  length = request.prompt_length
  context = [*request.prompt[:length].tolist(), *one[:same]]
  sampling = jax.tree.map(lambda x: jnp.asarray(x)[None], request.sampling)
  logits = _adjust(
    jnp.asarray(_logits.next_logits(model, context))[None],
    sampling,
    sampling_lib.History(
      jnp.asarray([context], jnp.int32),
      jnp.asarray([length], jnp.int32),
      jnp.asarray([len(context)], jnp.int32),
    ),
    jnp.asarray(request.stop_ids)[None],
  )
  return margin(np.asarray(logits)[0], sampling, len(context)) < NEAR_TIE
