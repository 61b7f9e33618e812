"""An EAGLE draft: one decoder layer over the target's features and tokens."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from ldjax import typing
from ldjax.models import _eagle_base, _heads, _layers, _linear

Array = typing.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleConfig(_eagle_base.LayerConfig):
  """The shape of an EAGLE draft.

  Args:
    depth: D, tokens ahead that it guesses.
    hidden_size: E, that of the target.
    intermediate_size: F, the feed-forward width.
    num_heads: N, query heads.
    num_kv_heads: K, key/value heads; divides N.
    head_dim: H.
    vocab_size: W, tokens that it can guess.
    target_vocab_size: V, where it guesses only a part of the target's
      vocabulary; None where W is all of it.
    output_rank: r, to score by a product of [W, r] and [r, E]; None for one
      matrix.
    shared_output: whether it scores by the target's output matrix instead of
      one of its own.
    normed: whether both halves of an entry, the layer's input and its output
      are normed, and the first token of a text has an entry; False for the
      published EAGLE-1 and -2.
    fc_bias: whether the projection of an entry carries a bias.
    qkv_bias: whether q, k and v projections carry a bias.
    rope_theta: base of the rotary frequencies.
    rope_scaling: the `llama3` stretch of them, or None.
    rms_norm_eps: added to the mean square in every norm.

  Raises:
    ValueError: for sizes that no draft can have.
  """

  output_rank: int | None = None
  shared_output: bool = False
  normed: bool = True
  fc_bias: bool = False

  kind: ClassVar[str] = "eagle"
  """Name of the family."""

  @property
  def skipped(self) -> int:
    """Positions at the beginning of a text that have no entry, 0 or 1."""
    return 0 if self.normed else 1

  @property
  def feature_size(self) -> int:
    """X, the width of the target's features."""
    return self.hidden_size


class EagleDraft(_eagle_base.EagleHeads):
  """One decoder layer that goes on from the target's last hidden state.

  An entry is a token with the feature of the position before it, both halves
  normed; the first entry of a text has a feature of zeros. Its own cache holds
  the entries of committed positions, whose features are the target's; a
  drafted token is entered with the layer's normed output at its parent in
  place of a feature.

  With `normed=False` it is the published EAGLE-1 and -2: the halves come as
  they are, only the feed-forward part has a norm, and the entries begin with
  the second token of a text.

  Args:
    config: its shape.
    dtype: of the parameters, of the computation and of the cache.
    rngs: for random parameters.

  Example:
    >>> from flax import nnx
    >>> import ldjax
    >>> config = ldjax.models.EagleConfig(
    ...   depth=3, hidden_size=24, intermediate_size=40, num_heads=3,
    ...   num_kv_heads=1, head_dim=8, vocab_size=31, shared_output=True)
    >>> draft = EagleDraft(config, rngs=nnx.Rngs(0))
    >>> fn, params = ldjax.models.functionalize_draft(draft, max_len=64)
    >>> fn.init(params, 2).cache.length.tolist()
    [0, 0]

  Source: Li et al. 2024, "EAGLE: speculative sampling requires rethinking
  feature uncertainty" (norms of the inputs as in EAGLE-3, Li et al. 2025).
  """

  def __init__(
    self,
    config: EagleConfig,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    rngs: nnx.Rngs,
  ):
    super().__init__(config, dtype=dtype)
    width = config.hidden_size

    def norm():
      if not config.normed:
        return None
      return _layers.RMSNorm(width, eps=config.rms_norm_eps, dtype=dtype)

    self.embed = _heads.TargetEmbedding(
      _heads.embed_rows(config), width, dtype=dtype, rngs=rngs
    )
    self.embed_norm, self.feature_norm = norm(), norm()
    self.fc = _linear.Linear(
      2 * width, width, use_bias=config.fc_bias, dtype=dtype, rngs=rngs
    )
    self.layer = _eagle_base.Layer(
      config.layer, normed=config.normed, dtype=dtype, rngs=rngs
    )
    self.norm = norm()
    self.output = _heads.Output(config, dtype=dtype, rngs=rngs)

  def _enter(
    self, tokens: Array, features: Array, numbers: Array
  ) -> tuple[Array, Array, Array]:
    def normed(norm, x):
      return x if norm is None else norm(x)

    embedded = normed(self.embed_norm, self.embed(tokens, self.dtype))
    pair = [embedded, normed(self.feature_norm, features)]
    x = self.fc(jnp.concatenate(pair, axis=-1))
    return x, *self._project(normed(self.layer.input_layernorm, x), numbers)

  def _leave(self, x: Array, attended: Array) -> Array:
    x = super()._leave(x, attended)
    return x if self.norm is None else self.norm(x)

  def score(self, states: Array) -> Array:
    """See `HeadsFn.score`."""
    return self.output(states)
