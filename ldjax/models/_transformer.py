"""The decoder-only transformer of many families, as configuration."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from ldjax import _base, pallas_kernels, typing
from ldjax import sampling as sampling_lib
from ldjax.models import _attention, _config, _layers, _linear

Array = typing.Array

# A draw that needs a longer list of the largest logits is made from all.
_MOST_LISTED = 128


class Block(nnx.Module):
  """Attention and feed-forward, each behind a norm and a residual.

  Where the outputs of the two are normed too, as in Gemma 2, there are four
  norms; `post_attention_layernorm` is the one before the feed-forward in every
  family.
  """

  def __init__(
    self,
    config: _config.TransformerConfig,
    *,
    dtype: jax.typing.DTypeLike,
    rngs: nnx.Rngs,
  ):
    def norm(before_product=False):
      return _layers.make_norm(
        config, config.hidden_size, dtype, before_product=before_product
      )

    self.input_layernorm = norm(before_product=True)
    self.self_attn = _attention.Attention(config, dtype=dtype, rngs=rngs)
    self.attention_output_norm = norm() if config.output_norms else None
    self.post_attention_layernorm = norm(before_product=True)
    self.mlp = _layers.MLP(config, dtype=dtype, rngs=rngs)
    self.mlp_output_norm = norm() if config.output_norms else None

  def __call__(
    self,
    x: Array,
    angles: tuple[Array, Array] | None,
    mask: Array,
    start: Array | None,
    pages: _base.KV,
    block_table: Array,
    length: Array,
  ) -> tuple[Array, _base.KV]:
    """Runs the block; see `Attention.__call__` for shapes."""
    out, block_kv = self.self_attn(
      self.input_layernorm(x), angles, mask, start, pages, block_table, length
    )
    if self.attention_output_norm is not None:
      out = self.attention_output_norm(out)
    x = x + out
    out = self.mlp(self.post_attention_layernorm(x))
    if self.mlp_output_norm is not None:
      out = self.mlp_output_norm(out)
    return x + out, block_kv


class Transformer(nnx.Module):
  """A target model: reads a block of tree nodes over a committed prefix.

  One class for Llama, Mistral, Qwen2, Qwen3, SmolLM3, Gemma 1 to 3, Phi-3 and
  GPT-2: what distinguishes them is in the configuration. Where it has learned
  positions, no position may be `max_position_embeddings` or more.

  Args:
    config: its shape.
    dtype: of the parameters and of the computation.
    feature_layers: which layers' inputs a draft wants to see (0 is the
      embedding); empty for the final normed state.
    rngs: for random parameters.

  Raises:
    ValueError: for a feature layer that does not exist.

  Example:
    >>> from flax import nnx
    >>> import ldjax
    >>> config = ldjax.models.TransformerConfig(
    ...   vocab_size=31, hidden_size=24, intermediate_size=40, num_layers=2,
    ...   num_heads=3, num_kv_heads=1, head_dim=8, max_position_embeddings=64)
    >>> model = Transformer(config, rngs=nnx.Rngs(0))
    >>> target, params = ldjax.models.functionalize(model)
    >>> params["layers"][1]["self_attn"]["k_proj"]["weight"].shape
    (8, 24)

  Source: Touvron et al. 2023 (Llama); Jiang et al. 2023 (Mistral 7B); Yang et
  al. 2024 (Qwen2) and 2025 (Qwen3); the Gemma team 2024 (Gemma, Gemma 2) and
  2025 (Gemma 3); Abdin et al. 2024 (Phi-3); Radford et al. 2019 (GPT-2).
  """

  def __init__(
    self,
    config: _config.TransformerConfig,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    feature_layers: tuple[int, ...] = (),
    rngs: nnx.Rngs,
  ):
    for layer in feature_layers:
      if not 0 <= layer < config.num_layers:
        raise ValueError(
          f"feature layer {layer} does not exist; the model has layers 0 to"
          f" {config.num_layers - 1}"
        )
    self.config = config
    self.feature_layers = tuple(feature_layers)
    self.embed_tokens = _layers.Embedding(
      config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs
    )
    self.embed_positions = (
      _layers.Embedding(
        config.max_position_embeddings,
        config.hidden_size,
        dtype=dtype,
        rngs=rngs,
      )
      if config.learned_positions
      else None
    )
    self.layers = nnx.List(
      Block(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)
    )
    self.norm = _layers.make_norm(config, config.hidden_size, dtype)
    self.lm_head = (
      None
      if config.tie_word_embeddings
      else _linear.Linear(
        config.hidden_size,
        config.vocab_size,
        use_bias=False,
        dtype=dtype,
        rngs=rngs,
      )
    )

  @property
  def output_matrix(self) -> _linear.Weight:
    """[V, E], what turns hidden states into logits."""
    layer = self.embed_tokens if self.lm_head is None else self.lm_head
    return layer.weight.get_value()

  def _embed(self, tokens: Array, positions: Array) -> Array:
    """What enters the first layer, [R, T, E]."""
    x = self.embed_tokens(tokens)
    if self.config.embed_scale != 1.0:
      x = x * jnp.asarray(self.config.embed_scale, x.dtype)
    if self.embed_positions is not None:
      x = x + self.embed_positions(positions)
    return x

  def __call__(
    self,
    tokens: Array,
    positions: Array,
    parents: Array,
    view: _base.CacheView,
  ) -> _base.TargetOutput:
    """Runs a block of nodes.

    Args:
      tokens: [R, T] int32.
      positions: [R, T] int32, absolute.
      parents: [R, T] int32, see `Candidates`.
      view: the committed prefix.

    Returns:
      `TargetOutput`; its hidden states are normed.
    """
    config = self.config
    x = self._embed(tokens, positions)
    windows = tuple(map(config.window, range(config.num_layers)))
    sizes = tuple(dict.fromkeys(windows))
    rotations = tuple(map(config.rotation, range(config.num_layers)))
    bases = () if config.learned_positions else tuple(dict.fromkeys(rotations))
    angles = tuple(
      _layers.rotary_angles(config, positions, rotations.index(base))
      for base in bases
    )
    mask = pallas_kernels.ancestor_mask(parents)
    sights = tuple(
      (mask, None)
      if size is None
      else pallas_kernels.window_mask(mask, positions, size)
      for size in sizes
    )
    # Computed once: left to itself XLA fuses the sines into every layer.
    angles, sights = lax.optimization_barrier((angles, sights))
    entering = []
    block_kv = []
    for index, layer in enumerate(self.layers):
      if index in self.feature_layers:
        entering.append((index, x))
      mask, start = sights[sizes.index(windows[index])]
      turns = None
      if bases and index not in config.nope_layers:
        turns = angles[bases.index(rotations[index])]
      x, kv = layer(
        x,
        turns,
        mask,
        start,
        view.pages[index],
        view.table(index),
        view.length,
      )
      block_kv.append(kv)
    hidden = self.norm(x)
    by_layer = dict(entering)
    features = (
      jnp.concatenate([by_layer[i] for i in self.feature_layers], axis=-1)
      if self.feature_layers
      else hidden
    )
    return _base.TargetOutput(hidden, features, tuple(block_kv))

  def score(self, hidden: Array) -> _base.Scores:
    """Logits [R, T, V] in float32 of hidden states [R, T, E]."""
    logits = _linear.linear(hidden, self.output_matrix, out_dtype=jnp.float32)
    cap = self.config.final_soft_cap
    return _base.Scores(logits if cap is None else cap * jnp.tanh(logits / cap))

  def draw(
    self,
    hidden: Array,
    sampling: sampling_lib.Sampling,
    position: Array,
    wanted: Array,
  ) -> _base.Draws | None:
    """What `TargetFn.draw` gives, by `pallas_kernels.score`.

    Nothing is computed, and nothing exact, where a row that is `wanted` needs
    more than a short list of its largest logits.
    """
    matrix = self.output_matrix
    if not (pallas_kernels.kernels_wanted() and isinstance(matrix, jax.Array)):
      return None
    shape, vocab = position.shape, self.config.vocab_size
    k = min(_MOST_LISTED, vocab)
    needed = sampling_lib.deciding(sampling, vocab)
    listed = jnp.max(jnp.where(wanted, needed, 1))

    def drawn():
      scored = pallas_kernels.score(
        hidden.reshape(-1, hidden.shape[-1]),
        matrix,
        k=k,
        listed=listed,
        soft_cap=self.config.final_soft_cap,
        sampling=jax.tree.map(
          lambda x: jnp.repeat(x, shape[1], axis=0), sampling
        ),
        position=position.reshape(-1),
      )
      finite = jnp.isfinite(scored.lse)
      found = (scored.token, scored.logprob, finite, scored.exact)
      return _base.Draws(*jax.tree.map(lambda x: x.reshape(shape), found))

    def nothing():
      return _base.Draws(
        jnp.zeros(shape, jnp.int32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros(shape, bool),
        jnp.zeros(shape, bool),
      )

    return lax.cond(listed <= k, drawn, nothing)
