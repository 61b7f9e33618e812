"""The shape of a decoder-only transformer, as data."""

import dataclasses
import math
from typing import TypeAlias


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
class LinearRopeScaling:
  """Rotary frequencies divided by one number.

  Args:
    factor: how many times longer the context became.

  Source: Chen et al. 2023, "Extending context window of large language models
  via positional interpolation".
  """

  factor: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeFactors:
  """Rotary frequencies divided by a number each.

  Args:
    factors: the divisors of the H/2 frequencies.
    attention_factor: multiplies cosines and sines, so that scores are
      multiplied by its square.

  Source: Ding et al. 2024 (LongRoPE), for texts of one kind: either those
  within the context of the first training or those beyond it.
  """

  factors: tuple[float, ...]
  attention_factor: float = 1.0


Scaling: TypeAlias = RopeScaling | LinearRopeScaling | RopeFactors

NORMS = ("rms", "layer")
FUSIONS = ("qkv", "gate_up", "norms")
"""What `TransformerConfig.fused` may hold."""
ACTIVATIONS = ("silu", "gelu_tanh")


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
    rope_scaling: what is done to the rotary frequencies, or None.
    rope_local_theta: base of the rotary frequencies of layers with a window,
      which are then not scaled; None if all layers share one base.
    learned_positions: whether a row of a matrix [max_position_embeddings, E] is
      added to each embedding, instead of any rotary embedding.
    embed_scale: multiplies the embeddings, once rounded to their dtype.
    norm: "rms", or "layer" for norms with a mean and a bias.
    norm_offset: added to the weight of each RMS norm, the product then being
      taken in float32; None for weights as they are and a product in the
      model's dtype.
    rms_norm_eps: added to the mean square in every norm, or to the variance.
    output_norms: whether the outputs of attention and feed-forward are normed
      before they are added.
    activation: of the feed-forward, "silu" or "gelu_tanh".
    mlp_gate: whether the feed-forward has a gate.
    tie_word_embeddings: whether the embedding matrix is the output matrix.
    qkv_bias: whether q, k and v projections carry a bias.
    o_bias: whether the o projection carries a bias.
    mlp_bias: whether gate, up and down projections carry a bias.
    query_scale: multiplies the scores; None for H ** -0.5.
    attn_soft_cap: scores s become cap * tanh(s / cap); None for no cap.
    final_soft_cap: the same for the logits.
    qk_norm: whether each head of queries and keys is normed before it is
      rotated.
    windows: for each layer how many positions a query sees, itself included,
      or None for all of them; empty if no layer has a window.
    nope_layers: the layers without rotary embedding, ascending.
    fused: how the parameters are held, any of "qkv" (the three projections of
      attention in one matrix), "gate_up" (those of the feed-forward in one) and
      "norms" (the weights of the norms before them within these matrices); see
      `fuse`. Files hold parameters unfused.

  Raises:
    ValueError: for sizes or kinds that no model can have, and for windows,
      layers or factors that do not fit the others.

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
  rope_scaling: Scaling | None = None
  rope_local_theta: float | None = None
  learned_positions: bool = False
  embed_scale: float = 1.0
  norm: str = "rms"
  norm_offset: float | None = None
  rms_norm_eps: float = 1e-5
  output_norms: bool = False
  activation: str = "silu"
  mlp_gate: bool = True
  tie_word_embeddings: bool = False
  qkv_bias: bool = False
  o_bias: bool = False
  mlp_bias: bool = False
  qk_norm: bool = False
  query_scale: float | None = None
  attn_soft_cap: float | None = None
  final_soft_cap: float | None = None
  windows: tuple[int | None, ...] = ()
  nope_layers: tuple[int, ...] = ()
  fused: tuple[str, ...] = ()

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
    if self.head_dim % 2 and not self.learned_positions:
      raise ValueError(
        f"head_dim is {self.head_dim}; rotary embedding needs an even one"
      )
    self._check_kinds()
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
    # One spelling for one model: equal shapes share what was compiled.
    if not any(self.windows):
      object.__setattr__(self, "windows", ())
      object.__setattr__(self, "rope_local_theta", None)
    if self.query_scale == self.head_dim**-0.5:
      object.__setattr__(self, "query_scale", None)

  def _check_kinds(self) -> None:
    for field, kinds in (("norm", NORMS), ("activation", ACTIVATIONS)):
      if getattr(self, field) not in kinds:
        raise ValueError(
          f"{field} is {getattr(self, field)!r}; it must be one of"
          f" {', '.join(map(repr, kinds))}"
        )
    for field in (
      "rope_theta",
      "rope_local_theta",
      "embed_scale",
      "query_scale",
      "attn_soft_cap",
      "final_soft_cap",
    ):
      value = getattr(self, field)
      if value is not None and not 0 < value < math.inf:
        raise ValueError(f"{field} is {value}; it must be above 0 and finite")
    if self.norm == "layer" and (self.norm_offset is not None or self.qk_norm):
      raise ValueError(
        "norm is 'layer', with norm_offset or qk_norm; these belong to 'rms'"
      )
    for part in self.fused:
      if part not in FUSIONS:
        raise ValueError(
          f"fused holds {part!r}; known are {', '.join(map(repr, FUSIONS))}"
        )
    if "norms" in self.fused and self.norm == "layer":
      raise ValueError(
        "fused holds 'norms', but norm is 'layer'; only weights of RMS norms"
        " can be part of the next matrix"
      )
    if "gate_up" in self.fused and not self.mlp_gate:
      raise ValueError(
        "fused holds 'gate_up', but the feed-forward has no gate; leave it out"
      )
    if self.learned_positions and self.nope_layers:
      raise ValueError(
        f"nope_layers is {self.nope_layers} and learned_positions is set; with"
        " learned positions no layer has rotary embedding, so leave it out"
      )
    scaling = self.rope_scaling
    if isinstance(scaling, RopeFactors) and (
      len(scaling.factors) != self.head_dim // 2 or min(scaling.factors) <= 0
    ):
      raise ValueError(
        f"rope_scaling has {len(scaling.factors)} factors; head_dim"
        f" {self.head_dim} asks for {self.head_dim // 2}, all above 0"
      )

  @property
  def query_groups(self) -> int:
    """Query heads that share one key/value head, N / K."""
    return self.num_heads // self.num_kv_heads

  def rotation(self, layer: int) -> tuple[float, Scaling | None]:
    """Base and scaling of the rotary frequencies of a layer."""
    if self.rope_local_theta is not None and self.window(layer) is not None:
      return self.rope_local_theta, None
    return self.rope_theta, self.rope_scaling

  def window(self, layer: int) -> int | None:
    """Positions that a query of a layer sees, or None for all of them."""
    return self.windows[layer] if self.windows else None
