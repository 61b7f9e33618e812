"""The shape of a decoder-only transformer, as data."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
  """The `llama3` stretch of rotary frequencies.

  Args:
    factor: how many times longer the context became.
    low_freq_factor: wavelengths above `original_max_position_embeddings /
      low_freq_factor` tokens are stretched in full.
    high_freq_factor: wavelengths below `original_max_position_embeddings /
      high_freq_factor` tokens stay as they are.
    original_max_position_embeddings: the context before stretching, in tokens.

  Source: Llama 3.1's reference code (`apply_scaling`).
  """

  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
  """What distinguishes one model of the family from another.

  Args:
    vocab_size: V, token ids the model can read and write.
    hidden_size: E, the model width.
    intermediate_size: F, the feed-forward width.
    num_layers: L.
    num_heads: N, query heads.
    num_kv_heads: K, key/value heads; divides N.
    head_dim: H; need not be E / N.
    max_position_embeddings: the longest context the model was made for, in
      tokens.
    rope_theta: base of the rotary frequencies.
    rope_scaling: the `llama3` stretch, or None.
    rms_norm_eps: added to the mean square in every norm.
    tie_word_embeddings: whether the embedding matrix is the output matrix.
    qkv_bias: whether q, k and v projections carry a bias.
    o_bias: whether the o projection carries a bias.
    mlp_bias: whether gate, up and down projections carry a bias.
    qk_norm: whether each head of queries and keys is normed before it is
      rotated.
    windows: for each layer how many positions a query sees, itself included,
      or None for all of them; empty if no layer has a window.
    nope_layers: the layers without rotary embedding, ascending.

  Raises:
    ValueError: for sizes that no model can have, and for windows or layers
      that do not fit the number of layers.

  Example:
    >>> import ldjax
    >>> config = ldjax.models.TransformerConfig(
    ...   vocab_size=31, hidden_size=24, intermediate_size=40, num_layers=2,
    ...   num_heads=3, num_kv_heads=1, head_dim=8, max_position_embeddings=64)
    >>> config.query_groups
    3
  """

  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  max_position_embeddings: int
  rope_theta: float = 10000.0
  rope_scaling: RopeScaling | None = None
  rms_norm_eps: float = 1e-5
  tie_word_embeddings: bool = False
  qkv_bias: bool = False
  o_bias: bool = False
  mlp_bias: bool = False
  qk_norm: bool = False
  windows: tuple[int | None, ...] = ()
  nope_layers: tuple[int, ...] = ()

  def __post_init__(self):
    for field in (
      "vocab_size",
      "hidden_size",
      "intermediate_size",
      "num_layers",
      "num_heads",
      "num_kv_heads",
      "head_dim",
      "max_position_embeddings",
    ):
      if getattr(self, field) < 1:
        raise ValueError(
          f"{field} is {getattr(self, field)}; it must be at least 1"
        )
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads"
        f" ({self.num_kv_heads})"
      )
    if self.head_dim % 2:
      raise ValueError(
        f"head_dim is {self.head_dim}; rotary embedding needs an even one"
      )
    if self.windows and len(self.windows) != self.num_layers:
      raise ValueError(
        f"windows has {len(self.windows)} entries for {self.num_layers} layers;"
        " give one a layer, None for a layer without, or () for none at all"
      )
    for window in self.windows:
      if window is not None and window < 1:
        raise ValueError(
          f"windows holds {window}; a query sees at least itself, so 1"
        )
    for before, layer in zip(
      (-1, *self.nope_layers), self.nope_layers, strict=False
    ):
      if not before < layer < self.num_layers:
        raise ValueError(
          f"nope_layers is {self.nope_layers}; the model has layers 0 to"
          f" {self.num_layers - 1}, each to be named once and in order"
        )
    if not any(self.windows):
      # One spelling for one model: equal shapes share what was compiled.
      object.__setattr__(self, "windows", ())

  @property
  def query_groups(self) -> int:
    """Query heads that share one key/value head, N / K."""
    return self.num_heads // self.num_kv_heads

  def window(self, layer: int) -> int | None:
    """Positions that a query of a layer sees, or None for all of them."""
    return self.windows[layer] if self.windows else None
