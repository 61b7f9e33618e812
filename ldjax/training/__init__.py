"""Training of drafts: a target's own texts, losses, and the trainer."""

from ldjax.training._corpus import Corpus, Shard
from ldjax.training._loss import Batch, Teacher
from ldjax.training._pipeline import (
  KINDS,
  TrainedDraft,
  chat_frame,
  draft_config,
  train_draft,
  write_texts,
)
from ldjax.training._report import Calibration, calibrate
from ldjax.training._rollout import Sequence, recorder
from ldjax.training._self_distill import ChatFrame, self_distill
from ldjax.training._trainer import StepReport, TrainConfig, train
from ldjax.training._vocabulary import choose_tokens
from ldjax.training._windows import Windows

__all__ = [
  "KINDS",
  "Batch",
  "Calibration",
  "ChatFrame",
  "Corpus",
  "Sequence",
  "Shard",
  "StepReport",
  "Teacher",
  "TrainConfig",
  "TrainedDraft",
  "Windows",
  "calibrate",
  "chat_frame",
  "choose_tokens",
  "draft_config",
  "recorder",
  "self_distill",
  "train",
  "train_draft",
  "write_texts",
]
