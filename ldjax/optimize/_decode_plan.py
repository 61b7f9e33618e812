"""A decode plan: what was chosen for one model on one machine, as a file."""

import dataclasses
import hashlib
import json
import math
import os
import pathlib
import platform
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ldjax import assemble, models
from ldjax.optimize import _costs_file, _matrices

VERSION = 1
"""Of the file's format."""


def machine() -> dict[str, Any]:
  """What a plan's measurements depend on of the machine at hand."""
  device = jax.devices()[0]
  return {
    "platform": device.platform,
    "device": device.device_kind,
    "devices": len(jax.devices()),
    "processor": platform.machine(),
    "cores": os.cpu_count(),
    "jax": jax.__version__,
  }


def make_mesh(shape: Mapping[str, int]) -> jax.sharding.Mesh:
  """A mesh of this machine's first devices.

  Args:
    shape: sizes of the axes by name.
  """
  kinds = (jax.sharding.AxisType.Auto,) * len(shape)
  devices = jax.devices()[: math.prod(shape.values())]
  return jax.make_mesh(
    tuple(shape.values()), tuple(shape), axis_types=kinds, devices=devices
  )


def model_key(config: models.TransformerConfig, params: Any) -> str:
  """Names a model by its shape and a sample of its weights.

  Args:
    config: of the target, as its files have it.
    params: of it.

  Returns:
    16 hexadecimal digits.
  """
  digest = hashlib.sha256()
  shape = dataclasses.asdict(dataclasses.replace(config, fused=()))
  digest.update(json.dumps(shape, sort_keys=True).encode())
  norm = params["norm"]["weight"]
  digest.update(np.asarray(norm.astype("float32")).tobytes())
  digest.update(str(params["embed_tokens"]["weight"].dtype).encode())
  return digest.hexdigest()[:16]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodePlan:
  """How to decode with one model on one machine, and why.

  `ldjax.plan` makes it, `ldjax.load(..., plan=...)` follows it.

  Args:
    machine: what it was measured on, see `platform`, `device`, `cores`.
    model: key of the model, of its shape and a sample of its weights.
    name: where the model came from, for messages.
    batch_size: B, rows to decode together.
    max_len: the most tokens of a sequence.
    draft: as for `load`, what it was measured with.
    fused: parts of the model in fewer matrices, see `models.fuse`.
    precision: fewer bits by full name of a matrix, see `models.narrow`.
    tree: as for `load`.
    cache_dtype: of keys and values, as for `load`; None for the weights'.
    page_size: positions a page.
    initial_pages: of the pool.
    num_pages: pages that the pool may grow to.
    mesh: sizes of the axes "data" and "tensor", or None for one device.
    curves: cost curves that were measured, one a batch.
    evidence: for each pass what was measured and why it chose as it did.
    tokens_per_second: `default`, `plan` and `projected`, and as `ratio` the
      2.5, 50 and 97.5 percentiles of the paired ratio.

  Raises:
    ValueError: for parts that no plan can have.
  """

  machine: Mapping[str, Any]
  model: str
  name: str
  batch_size: int
  max_len: int
  draft: str = "auto"
  fused: tuple[str, ...] = ()
  precision: Mapping[str, str] = dataclasses.field(default_factory=dict)
  tree: str = "auto"
  cache_dtype: str | None = None
  page_size: int = 16
  initial_pages: int | None = None
  num_pages: int | None = None
  mesh: Mapping[str, int] | None = None
  curves: tuple[Mapping[str, Any], ...] = ()
  evidence: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  tokens_per_second: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    for name in ("batch_size", "max_len", "page_size"):
      value = getattr(self, name)
      if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(
          f"{name} of the plan is {value!r}; it must be at least 1"
        )
    for part in self.fused:
      if part not in models.FUSIONS:
        raise ValueError(
          f"fused of the plan holds {part!r}, not of {models.FUSIONS}"
        )
    for where, bits in self.precision.items():
      if bits not in models.PRECISIONS:
        raise ValueError(
          f"precision of {where} in the plan is {bits!r}; known are"
          f" {', '.join(models.PRECISIONS)}"
        )

  def save(self, path: str | os.PathLike[str]) -> None:
    """Writes it as JSON; the file takes its place whole.

    Args:
      path: the file.

    Raises:
      OSError: if it can't be written.
    """
    says = {"version": VERSION, **dataclasses.asdict(self)}
    _costs_file.write_whole(pathlib.Path(path), says)

  @classmethod
  def read(cls, path: str | os.PathLike[str]) -> "DecodePlan":
    """Reads what `save` wrote.

    Args:
      path: the file.

    Raises:
      FileNotFoundError: where there is none.
      ValueError: for a damaged file or one of another version.
    """
    again = "make it anew with ldjax optimize"
    try:
      says = json.loads(pathlib.Path(path).read_text("utf-8"))
    except UnicodeDecodeError as error:
      raise ValueError(f"{path} is no plan: {error}; {again}") from error
    except json.JSONDecodeError as error:
      raise ValueError(f"{path} is no plan: {error}; {again}") from error
    version = says.pop("version", None) if isinstance(says, dict) else None
    if version != VERSION:
      raise ValueError(
        f"{path} is a plan of version {version}; this ldjax reads {VERSION};"
        f" {again}"
      )
    known = {field.name for field in dataclasses.fields(cls)}
    if unknown := sorted(set(says) - known):
      raise ValueError(f"{path}: no plan has {', '.join(unknown)}; {again}")
    says["fused"] = tuple(says.get("fused", ()))
    says["curves"] = tuple(says.get("curves", ()))
    try:
      return cls(**says)
    except (TypeError, ValueError, AttributeError) as error:
      raise ValueError(f"{path}: {error}; {again}") from error

  def check_machine(self) -> None:
    """Refuses a plan that was measured on another machine.

    Raises:
      ValueError: naming what differs.
    """
    here = machine()
    for part, value in here.items():
      if self.machine.get(part) != value:
        raise ValueError(
          f"the plan for {self.name} was made where {part} was"
          f" {self.machine.get(part)!r}; here it is {value!r}, so its choices"
          " may be wrong: make it anew with ldjax optimize"
        )

  def make_mesh(self) -> jax.sharding.Mesh | None:
    """The mesh it was made for, of this machine's devices."""
    return None if self.mesh is None else make_mesh(self.mesh)


def apply(model: assemble.LanguageModel, plan: DecodePlan) -> Any:
  """A model decoding as a plan says, its parameters in the plan's forms.

  What `load` needs to be told (the cache, the tree, devices) is not changed.

  Args:
    model: from `load`, in the form that its files have.
    plan: made for it.

  Returns:
    `LanguageModel`.

  Raises:
    ValueError: for a plan of another model.
  """
  params = model.params.target
  key = model_key(model.config, params)
  if key != plan.model:
    raise ValueError(
      f"the plan is for {plan.name} ({plan.model}), and {model.name} is another"
      f" model ({key}); make one for it with ldjax optimize"
    )
  config = model.config
  if plan.fused:
    config, params = models.fuse(config, params, plan.fused)
  if plan.precision:
    config, params = _matrices.narrowed(config, params, plan.precision)
  planned = assemble.with_target(model, config, params)
  for curve in plan.curves:
    _keep(planned, curve)
  return planned


def _keep(model: assemble.LanguageModel, measured: Mapping[str, Any]) -> None:
  """Puts a plan's cost curve where adaptive decoding looks for it."""
  batch = int(measured["batch"])
  if _costs_file.load_costs(model, batch=batch) is not None:
    return
  curve = dataclasses.replace(
    _costs_file.curve_of(measured), model=_costs_file.fingerprint(model, batch)
  )
  try:
    _costs_file.save_costs(model, curve)
  except OSError:  # decoding goes on by what is usual
    return
