"""The training loop: optax updates, orbax checkpoints, exact resume."""

import dataclasses
import os
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ldjax import _base, checkpoints, typing
from ldjax.training import _loss, _windows

Array = typing.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
  """How heads are trained.

  Args:
    steps: updates.
    batch: B, windows an update.
    window: S, tokens a window.
    learning_rate: at its highest, reached after `warmup` of the steps, from
      where it falls to a twentieth along a cosine.
    warmup: share of the steps, from 0 to 1.
    weight_decay: of AdamW, on matrices.
    clip: the gradient's norm at most.
    ema: decay of the average of weights that is kept as the result.
    hardness: 0 trains on the target's probabilities, 1 on its tokens.
    depth_decay: weight of each depth against the one before.
    seed: of the order of windows.
    save_every: steps between checkpoints.

  Raises:
    ValueError: for a value out of its range.
  """

  steps: int = 2000
  batch: int = 16
  window: int = 128
  learning_rate: float = 1e-3
  warmup: float = 0.05
  weight_decay: float = 0.01
  clip: float = 1.0
  ema: float = 0.998
  hardness: float = 0.3
  depth_decay: float = 0.85
  seed: int = 0
  save_every: int = 200

  def __post_init__(self):
    for field in ("steps", "batch", "window", "save_every"):
      if getattr(self, field) < 1:
        raise ValueError(
          f"{field} is {getattr(self, field)}; it must be at least 1"
        )
    for field in ("warmup", "ema", "hardness"):
      if not 0 <= getattr(self, field) <= 1:
        raise ValueError(
          f"{field} is {getattr(self, field)}; it must lie between 0 and 1"
        )
    for field in ("learning_rate", "clip", "depth_decay"):
      if not 0 < getattr(self, field) < float("inf"):
        raise ValueError(
          f"{field} is {getattr(self, field)}; it must be above 0 and finite"
        )


class TrainState(NamedTuple):
  """What a checkpoint holds."""

  step: Array
  """[] int32, updates made."""
  params: Any
  """What is trained."""
  average: Any
  """Its running average."""
  optimizer: Any
  """State of the optax transformation."""


class StepReport(NamedTuple):
  """What is told after an update."""

  step: int
  """Updates made so far, from 1."""
  losses: _loss.Losses
  """Of its batch, NumPy."""


def optimizer(config: TrainConfig) -> optax.GradientTransformation:
  """AdamW behind a clip, along warm-up and cosine."""
  warmup = max(round(config.warmup * config.steps), 1)
  schedule = optax.warmup_cosine_decay_schedule(
    0.0,
    config.learning_rate,
    warmup,
    max(config.steps, warmup + 1),
    config.learning_rate / 20,
  )
  return optax.chain(
    optax.clip_by_global_norm(config.clip),
    optax.adamw(
      schedule,
      b2=0.98,
      weight_decay=config.weight_decay,
      mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
    ),
  )


def make_update(
  heads: _base.HeadsFn,
  config: TrainConfig,
  merge: Callable[[Any, Any], Any],
) -> Callable[..., tuple[TrainState, _loss.Losses]]:
  """Returns (state, frozen, teacher, batch) -> (state, losses), pure.

  Args:
    heads: as pure functions.
    config: how to train.
    merge: (trained, frozen) -> parameters of the heads.
  """
  transform = optimizer(config)

  def update(state, frozen, teacher, batch):
    def total(params):
      losses = _loss.loss(
        heads,
        merge(params, frozen),
        teacher,
        batch,
        hardness=config.hardness,
        depth_decay=config.depth_decay,
      )
      return losses.total, losses

    grads, losses = jax.grad(total, has_aux=True)(state.params)
    # optax multiplies floats by int32 counts, which strict mode refuses.
    with jax.numpy_dtype_promotion("standard"):
      updates, moments = transform.update(grads, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    # Early on the average would mostly be the random start.
    step = state.step.astype(jnp.float32)
    keep = jnp.minimum(config.ema, (step + 1) / (step + 10))
    average = optax.incremental_update(params, state.average, 1 - keep)
    return TrainState(state.step + 1, params, average, moments), losses

  return update


def train(
  heads: _base.HeadsFn,
  params: Any,
  frozen: Any,
  merge: Callable[[Any, Any], Any],
  teacher: _loss.Teacher,
  windows: _windows.Windows,
  config: TrainConfig,
  folder: str | os.PathLike[str],
  on_step: Callable[[StepReport], None] | None = None,
) -> Any:
  """Trains heads; goes on from the checkpoint if there is one.

  Ctrl-C leaves a checkpoint of the last whole update. The batches follow from
  the step, so that training that was interrupted gives what it would have
  given.

  Args:
    heads: as pure functions.
    params: what is trained, as it begins.
    frozen: what is not: borrowed parts and the map of ids.
    merge: (trained, frozen) -> parameters of the heads.
    teacher: the target over the draft's vocabulary.
    windows: to train on.
    config: how.
    folder: of the checkpoint, replaced as training goes on.
    on_step: called after each update.

  Returns:
    The averaged parameters.

  Raises:
    FloatingPointError: if the loss is not finite, naming the step.
    ValueError: for a checkpoint of other heads.
  """
  update = jax.jit(make_update(heads, config, merge), donate_argnums=0)
  # Fresh arrays, so that the caller keeps what is donated here.
  params = jax.tree.map(jnp.array, params)
  state = TrainState(
    jnp.zeros((), jnp.int32),
    params,
    jax.tree.map(jnp.array, params),
    optimizer(config).init(params),
  )
  path = pathlib.Path(folder)
  if path.exists():
    state = _restore(path, state)

  def save(state):
    checkpoints.save_state(path, state._asdict(), force=True)

  step = saved = int(state.step)
  try:
    while step < config.steps:
      batch = windows.at(step, config.batch, config.seed)
      state, losses = update(state, frozen, teacher, batch)
      losses = jax.device_get(losses)
      step += 1
      if not np.isfinite(losses.total):
        raise FloatingPointError(
          f"the loss is {losses.total} at step {step}; lower the learning rate"
          f" ({config.learning_rate})"
        )
      if step % config.save_every == 0 or step == config.steps:
        save(state)
        saved = step
      if on_step is not None:
        on_step(StepReport(step, losses))
  except KeyboardInterrupt:
    # Deleted if an update that was to take its place was interrupted.
    if not state.step.is_deleted() and int(state.step) > saved:
      save(state)
    raise
  return state.average


def _restore(path: pathlib.Path, state: TrainState) -> TrainState:
  try:
    return TrainState(**checkpoints.restore_state(path, state._asdict()))
  except (FileNotFoundError, ValueError) as error:
    raise ValueError(
      f"{path} is no checkpoint of these heads ({error}); train them in another"
      " folder, or delete it"
    ) from error
