"""From a target to a trained draft in a folder: text, training, report."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ldjax import _base, assemble, checkpoints, models
from ldjax.training import (
  _corpus,
  _loss,
  _report,
  _self_distill,
  _trainer,
  _vocabulary,
  _windows,
)

KINDS = ("medusa", "hydra", "recurrent", "eagle")
"""Families that can be trained."""


class TrainedDraft(NamedTuple):
  """What training gave."""

  folder: pathlib.Path
  """Holds the draft, for `load(draft=)`."""
  config: models.DraftConfig
  """Its shape."""
  calibration: _report.Calibration
  """Measured on held-out text."""


def draft_config(
  kind: str,
  target: models.TransformerConfig,
  *,
  vocab_size: int,
  depth: int = 4,
  **sizes: Any,
) -> models.DraftConfig:
  """The default shape of a draft for a target.

  All read the target's embeddings, and score with its output rows, except the
  recurrent draft: its output matrix has a third of the target's width as rank,
  for on a CPU scoring is most of what a step of it costs.

  Args:
    kind: "medusa", "hydra", "recurrent" or "eagle".
    target: the target's shape.
    vocab_size: W; the target's V, or less.
    depth: D, tokens ahead.
    **sizes: fields of the family's configuration that are to be others.

  Raises:
    ValueError: for an unknown kind or sizes that cannot be.
  """
  width = target.hidden_size
  fields: dict[str, Any]
  common: dict[str, Any] = {
    "vocab_size": vocab_size,
    "target_vocab_size": None
    if vocab_size == target.vocab_size
    else target.vocab_size,
    "shared_output": True,
  }
  match kind:
    case "medusa":
      fields = {"num_heads": depth, "num_layers": 1, "hidden_size": width}
      return models.MedusaConfig(**{**common, **fields, **sizes})
    case "hydra":
      fields = {
        "num_heads": depth,
        "num_layers": 1,
        "target_size": width,
        "hidden_size": width,
      }
      return models.HydraConfig(**{**common, **fields, **sizes})
    case "recurrent":
      fields = {
        "depth": depth,
        "num_layers": 1,
        "target_size": width,
        "hidden_size": width,
        "intermediate_size": width,
        "shared_output": False,
        "output_rank": min(max(width // 3, 1), vocab_size),
        "rms_norm_eps": target.rms_norm_eps,
      }
      return models.RecurrentConfig(**{**common, **fields, **sizes})
    case "eagle":
      fields = {
        "depth": depth,
        "hidden_size": width,
        "intermediate_size": target.intermediate_size,
        "num_heads": target.num_heads,
        "num_kv_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "rope_theta": target.rope_theta,
        "rms_norm_eps": target.rms_norm_eps,
      }
      return models.EagleConfig(**{**common, **fields, **sizes})
  raise ValueError(f"no draft is called {kind!r}; there are {', '.join(KINDS)}")


def _begins_alike(
  config: models.DraftConfig, target: models.TransformerConfig
) -> bool:
  """Whether what a draft takes over of a target means the same in both.

  An EAGLE draft's layer is a Llama's: the weights of a Gemma's last layer or a
  GPT-2's would mean something else there.
  """
  if not isinstance(config, models.EagleConfig):
    return True
  kind = (target.norm, target.norm_offset, target.activation)
  return kind == ("rms", None, "silu")


def chat_frame(model: assemble.LanguageModel) -> _self_distill.ChatFrame:
  """What the model's chat template puts around a user's question.

  Raises:
    ValueError: for a model without a chat template.
  """
  if not model.tokenizer.has_chat_template:
    raise ValueError(
      f"{model.name} has no chat template to ask itself questions with; give"
      " prompts"
    )
  mark = "QUESTION"
  text = model.tokenizer.chat([{"role": "user", "content": mark}])
  head, _, tail = text.partition(mark)
  encode = model.tokenizer.encode
  bos = encode("")  # what the tokenizer puts before any text
  return _self_distill.ChatFrame(encode(head), encode(tail)[len(bos) :])


def write_texts(
  model: assemble.LanguageModel,
  folder: str | os.PathLike[str],
  *,
  tokens: int,
  prompts: Sequence[Sequence[int]] | None = None,
  on_tokens: Callable[[int], None] | None = None,
  **settings: Any,
) -> _corpus.Corpus:
  """Lets the model write answers, with its features, into a folder.

  Args:
    model: the target.
    folder: of the corpus; texts that are there already stay.
    tokens: of answers that there are to be.
    prompts: token ids of each; None to let the model ask itself.
    on_tokens: called with the tokens so far.
    **settings: of `self_distill`: max_new_tokens, temperature, seed, batch.

  Returns:
    The corpus.

  Raises:
    ValueError: for a prompt that does not fit, or no prompts and no chat
      template.
  """
  frame = chat_frame(model) if prompts is None else None
  # Texts hold the final state, whatever the model's draft wants to see.
  model = assemble.with_draft(model, "none")
  corpus = _corpus.Corpus(folder)
  _self_distill.self_distill(
    model.target,
    model.params.target,
    model.init_cache,
    corpus,
    prompts=prompts,
    frame=frame,
    tokens=tokens,
    max_len=model.max_len,
    feature_size=model.config.hidden_size,
    stop_ids=model.eos_token_ids,
    on_tokens=on_tokens,
    **settings,
  )
  return corpus


def _begin_low_rank(params: Any, output: Any, rank: int) -> Any:
  """The draft's output begins as the target's, as near as the rank allows."""
  left, values, right = jnp.linalg.svd(output, full_matrices=False)
  root = jnp.sqrt(values[:rank])
  own = {
    "up": {"weight": left[:, :rank] * root[None]},
    "down": {"weight": root[:, None] * right[:rank]},
  }
  return {**params, "output": own}


def _heads(config: models.DraftConfig, window: int) -> _base.HeadsFn:
  return models.functionalize_draft(config, jnp.float32, max_len=window)[0]


def train_draft(
  model: assemble.LanguageModel,
  corpus: _corpus.Corpus,
  config: models.DraftConfig,
  folder: str | os.PathLike[str],
  training: _trainer.TrainConfig,
  on_step: Callable[[_trainer.StepReport], None] | None = None,
) -> TrainedDraft:
  """Trains a draft on a corpus and writes it, with what it is worth.

  Args:
    model: the target.
    corpus: that it wrote.
    config: shape of the draft, for example from `draft_config`.
    folder: gets the draft, `report.json`, and a checkpoint to go on from.
    training: how to train.
    on_step: called after each update.

  Returns:
    `TrainedDraft`.

  Raises:
    FloatingPointError: if the loss stops being finite.
    ValueError: for a corpus of another model or with too little text, a folder
      with a checkpoint of other heads, or a draft of kind "eagle3", whose
      features are not in a corpus.
  """
  folder = pathlib.Path(folder)
  if isinstance(config, models.Eagle3Config):
    raise ValueError(
      f"a draft of kind {config.kind!r} reads states of several target layers,"
      " and a corpus holds the final one; train another kind:"
      f" {', '.join(KINDS)}"
    )
  windows = _windows.Windows(corpus, training.window)
  held_out = _windows.Windows(corpus, training.window, held_out=True)
  vocab = model.config.vocab_size
  if windows.feature_size != config.feature_size:
    raise ValueError(
      f"{corpus.folder} holds features of {windows.feature_size} numbers, the"
      f" draft reads {config.feature_size}; another model wrote it"
    )
  checkpoint = folder / "checkpoint"
  token_ids = _vocabulary.kept_tokens(
    folder / "vocabulary.npy",
    lambda: _vocabulary.choose_tokens(
      windows.count_answers(vocab), config.vocab_size
    ),
    go_on=checkpoint.exists(),
  )
  lookup = _vocabulary.inverse(token_ids, vocab)
  target = model.params.target
  params = models.init_draft(
    config,
    jax.random.key(training.seed),
    jnp.float32,
    token_ids=None if config.target_vocab_size is None else token_ids,
    target_params=target if _begins_alike(config, model.config) else None,
  )
  output = models.output_rows(config, target, token_ids).astype(jnp.float32)
  cap = model.config.final_soft_cap
  rank = getattr(config, "output_rank", None)
  if rank is not None and config.hidden_size == output.shape[1]:
    params = _begin_low_rank(params, output, rank)
  trained, frozen = models.partition_draft(
    config, models.borrow(config, params, target)
  )
  heads = _heads(config, training.window)
  average = _trainer.train(
    heads,
    trained,
    frozen,
    models.combine_draft,
    _loss.Teacher(
      output,
      jnp.asarray(lookup),
      None if cap is None else jnp.asarray(cap, jnp.float32),
    ),
    windows,
    training,
    checkpoint,
    on_step,
  )
  params = models.combine_draft(average, frozen)
  calibration = _report.calibrate(
    heads, params, lookup, held_out, batch=training.batch
  )
  checkpoints.write_draft(
    folder,
    config,
    params,
    target=checkpoints.DraftTarget(
      model.name,
      model.config.hidden_size,
      vocab,
      model.config.num_layers,
    ),
    calibration=calibration.as_json(),
    dtype=jnp.float16,
  )
  report = {
    "draft": {"kind": config.kind, **dataclasses.asdict(config)},
    "training": dataclasses.asdict(training),
    "tokens": windows.num_tokens,
    **calibration.as_json(),
    "expected_tokens": {
      str(size): calibration.expected_tokens(size) for size in (2, 4, 8, 16, 32)
    },
  }
  (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")
  return TrainedDraft(folder, config, calibration)
