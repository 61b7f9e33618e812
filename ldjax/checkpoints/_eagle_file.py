"""EAGLE drafts as published: -1, -2 and -3, and those of `speculators`."""

import pathlib
import re
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from ldjax import models
from ldjax.checkpoints import (
  _config_keys,
  _draft_checks,
  _eagle_config,
  _read,
  _rules,
  _weights,
)

_MAPS = ("d2t", "t2d", "model.d2t", "model.t2d")
_IDS = "token_ids"

# `speculators` calls `fc` and `layers.0` of EAGLE-1 `fusion_fc` and
# `transformer`, and `midlayer` of EAGLE-3 `layers.0`.
_TOP = r"(?:model\.)?"
_FC = _TOP + r"(?:fc|fusion_fc)\."
_LAYER = _TOP + r"(?:layers\.0|midlayer|transformer)\."

_RULES = (
  _rules.Rule(_FC + r"weight", "fc/weight"),
  _rules.Rule(
    _LAYER + r"self_attn\.([qkv]_proj)\.(weight|bias)",
    "layer/self_attn/{0}/{1}",
  ),
  _rules.Rule(
    _LAYER + r"self_attn\.o_proj\.weight", "layer/self_attn/o_proj/weight"
  ),
  _rules.Rule(
    _LAYER + r"mlp\.(gate_proj|up_proj|down_proj)\.weight",
    "layer/mlp/{0}/weight",
  ),
  _rules.Rule(
    _LAYER + r"post_attention_layernorm\.weight",
    "layer/post_attention_layernorm/weight",
  ),
  _rules.Rule(_TOP + r"lm_head\.weight", "output/weight"),
  # The target's is used.
  _rules.Rule(_TOP + r"embed_tokens\.weight", None),
  _rules.Rule(r"(?:.*\.)?rotary_emb\.inv_freq", None),
)
EAGLE = (*_RULES, _rules.Rule(_FC + r"bias", "fc/bias"))
EAGLE3 = (
  *_RULES,
  _rules.Rule(
    _LAYER + r"input_layernorm\.weight", "layer/input_layernorm/weight"
  ),
  _rules.Rule(_LAYER + r"hidden_norm\.weight", "hidden_norm/weight"),
  _rules.Rule(_TOP + r"norm\.weight", "norm/weight"),
)

_EXTRA_NORMS = re.compile(
  r"(?:.*\.)?(?:embedding_layernorm|pre_lm_head_layernorm|embed_layernorm"
  r"|hidden_layernorm|lm_head_layernorm|input_norm|fc_norm)\.weight"
)
_LATER_LAYER = re.compile(_TOP + r"layers\.([1-9]\d*)\..*")


def holds_eagle(folder: pathlib.Path) -> bool:
  """Whether a folder's weights are a draft for `read_eagle`, by their names.

  Raises:
    ValueError: for a damaged file or index.
  """
  names = _weights.names(folder)
  return any(re.fullmatch(_FC + "weight", name) for name in names)


def _kind(
  tensors: Iterable[_rules.Tensor], says: _eagle_config.Says
) -> tuple[bool, int]:
  """Whether the tensors are of EAGLE-3, and E."""
  fc = None
  for tensor in tensors:
    if _EXTRA_NORMS.fullmatch(tensor.name):
      raise ValueError(
        f"{tensor.file}: tensor {tensor.name!r} is a norm that neither EAGLE-1,"
        " -2 nor -3 has; drafts with extra norms are not supported"
      )
    if _LATER_LAYER.fullmatch(tensor.name):
      raise ValueError(
        f"{tensor.file}: tensor {tensor.name!r} is of a second layer or one"
        " after it; drafts of one layer are supported"
      )
    if re.fullmatch(_FC + "weight", tensor.name):
      fc = tensor
  if fc is None:
    raise ValueError(
      f"{says.file.parent}: no tensor named 'fc.weight' or 'fusion_fc.weight';"
      " this is not an EAGLE draft"
    )
  shape = fc.shape
  if len(shape) != 2 or shape[1] not in (2 * shape[0], 3 * shape[0]):
    raise ValueError(
      f"{fc.file}: tensor {fc.name!r} has shape {shape}; EAGLE-1 and -2 have"
      " [E, 2E] there, EAGLE-3 [E, 3E]"
    )
  third = shape[1] == 3 * shape[0]
  if says.kind not in (None, "eagle3" if third else "eagle"):
    raise ValueError(
      f"{says.file}: speculators_model_type is {says.kind!r}, but {fc.name!r}"
      f" of {fc.file} has the shape {shape} of EAGLE-{'3' if third else '1'}"
    )
  return third, shape[0]


def _check_target(
  tensors: Iterable[_rules.Tensor],
  says: _eagle_config.Says,
  hidden: int,
  target: models.TransformerConfig,
) -> None:
  """Errors for a draft of another model, before its layer is looked at."""
  widths = [hidden]
  if says.outer.get("target_hidden_size") is not None:
    widths.append(
      _config_keys.Keys(says.outer, {}, says.file).integer("target_hidden_size")
    )
  sizes = [("hidden_size", width, target.hidden_size) for width in widths]
  if says.keys.get("vocab_size") is not None:
    vocab = says.keys.integer("vocab_size")
    sizes.append(("vocab_size", vocab, target.vocab_size))
  for tensor in tensors:
    if re.fullmatch(
      _TOP + r"embed_tokens\.weight|" + _TOP + "t2d", tensor.name
    ):
      rows = tensor.shape[0] if tensor.shape else 0
      sizes.append(("vocab_size", rows, target.vocab_size))
  _draft_checks.check_made_for(says.file.parent, sizes)


def read_eagle(
  folder: pathlib.Path,
  target_config: models.TransformerConfig,
  dtype: Any = None,
  progress: _rules.Progress | None = None,
  place: _rules.Place | None = None,
) -> tuple[models.DraftConfig, dict[Any, Any]]:
  """Reads a published EAGLE draft strictly, for the model it was made for.

  The tensors say whether it is EAGLE-1 (or -2, whose weights are the same) or
  -3, and how large; a published `config.json` is known to be wrong about that.
  Where it disagrees a warning names both numbers; it is believed about the
  number of heads and the rotary embedding, which tensors do not tell. The
  depth is 7, that of EAGLE's own tree.

  Args:
    folder: with config.json, and model.safetensors or pytorch_model.bin, or
      their shards by an index; in the layout of EAGLE or of `speculators`.
    target_config: of the model that is to be drafted for.
    dtype: float type of the parameters; None for the file's own.
    progress: called with a line of text about once a tenth of the tensors.
    place: (path, host array) -> array, what puts each parameter where it
      belongs as soon as it is read; None for the default device.

  Returns:
    An `EagleConfig` or `Eagle3Config`, and the draft's own parameters.

  Raises:
    FileNotFoundError: for a missing folder or file.
    ValueError: for a draft of another model, for what is not supported, and
      for what is damaged, missing, left over or of another shape, naming
      it.

  Source: the reference code (`SafeAILab/EAGLE`, cnets1.py and cnets.py), and
  `vllm-project/speculators`.
  """
  wanted = _read.float_dtype(dtype)
  if not folder.is_dir():
    raise FileNotFoundError(f"{folder}: no such folder")
  says = _eagle_config.parse(folder)
  with _weights.Reader() as reader:
    tensors = _weights.offered(reader, folder, _MAPS)
    third, hidden = _kind(tensors, says)
    _check_target(tensors, says, hidden, target_config)
    maps: dict[str, _rules.Tensor] = {}
    if third:
      found = [x for x in tensors if x.name in _MAPS]
      maps = {x.name.removeprefix("model."): x for x in found}
      if len(maps) < len(found):
        raise ValueError(
          f"{folder}: {', '.join(x.name for x in found)}: a map of tokens is"
          " given twice"
        )
      tensors = [x for x in tensors if x.name not in _MAPS]
    rules = EAGLE3 if third else EAGLE
    shapes = _eagle_config.Shapes(rules, tensors, says)
    try:
      config, ids = _eagle_config.build(third, shapes, maps, target_config)
    except ValueError as error:
      if str(error).startswith(str(folder)):
        raise
      raise ValueError(f"{folder}: {error}") from error
    abstract = dict(models.abstract_draft(config))
    abstract.pop(_IDS, None)
    planned = _rules.plan(rules, tensors, abstract)
    target = wanted or _rules.common_dtype(
      source.tensor for source in planned.values()
    )
    params = _rules.execute(_rules.Plan(planned, {}, target), progress, place)
  if ids is not None:
    ids = models.check_token_ids(config, ids)
    params[_IDS] = jnp.asarray(ids) if place is None else place((_IDS,), ids)
  return config, params
