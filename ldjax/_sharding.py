"""Where weights, cache and rows live on a mesh of devices.

Only layouts: the program is the one of a single device, and JAX's automatic
partitioning derives the communication from where its inputs lie.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import (
  AxisType,
  Mesh,
  NamedSharding,
  PartitionSpec,
  SingleDeviceSharding,
)

from ldjax import decoding, models, pallas_kernels

_AXES = ("data", "tensor")
_BY_OUTPUT = ("gate_proj", "up_proj", "embed_tokens", "lm_head")


def check_mesh(mesh: Mesh) -> Mesh:
  """Returns the mesh with automatic axes, which is what `load` works with.

  `jax.make_mesh` makes explicit axes, under which every operation would have
  to say its layout; the devices and their order stay.

  Args:
    mesh: axes called "data" and "tensor", or one of them.

  Raises:
    TypeError: for anything but a `jax.sharding.Mesh`.
    ValueError: for an axis of another name, no axis, or devices of several
      processes.

  Example:
    >>> import jax
    >>> check_mesh(jax.make_mesh((1, 1), ("data", "tensor"))).axis_names
    ('data', 'tensor')
  """
  if not isinstance(mesh, Mesh):
    raise TypeError(
      f"mesh is a {type(mesh).__name__}; give a jax.sharding.Mesh, for example"
      ' jax.make_mesh((1, 2), ("data", "tensor"))'
    )
  if mesh.empty or not mesh.axis_names:
    raise ValueError(
      "mesh has no devices or no axes; name an axis 'data' or 'tensor'"
    )
  for name in mesh.axis_names:
    if name not in _AXES:
      raise ValueError(
        f"mesh has an axis {name!r}; rows are split over 'data' and weights"
        " over 'tensor', so name its axes by these"
      )
  if mesh.is_multi_process:
    raise ValueError(
      "mesh has devices of several processes; one process is supported, use"
      " jax.local_devices()"
    )
  types = (AxisType.Auto,) * len(mesh.axis_names)
  return Mesh(mesh.devices, mesh.axis_names, axis_types=types)


def _axis(mesh: Mesh, name: str, parts: int) -> str | None:
  """The axis that splits `parts` equal parts, None where it does not."""
  size = mesh.shape.get(name, 1)
  return name if size > 1 and parts % size == 0 else None


def param_spec(
  path: Sequence[Any],
  shape: Sequence[int],
  config: models.TransformerConfig,
  mesh: Mesh,
) -> PartitionSpec:
  """How one parameter is split over the axis "tensor".

  Projections into heads or into the feed-forward width by their output rows,
  those out of it by their input columns, so that a block communicates once
  behind its attention and once behind its MLP; embedding and output matrices
  by the vocabulary; a bias with its outputs. Heads stay whole. Everything
  else, and what the axis does not divide, is on every device: norms, learned
  positions, and the blocks of Medusa heads, small beside their output
  matrices, each of which reads all of the one before.

  Args:
    path: keys from the root of the parameters to the leaf.
    shape: of the parameter; weights are [out, in].
    config: of the target.
    mesh: from `check_mesh`.

  Returns:
    One entry an axis of the parameter, or none at all.

  Example:
    >>> import jax, ldjax
    >>> config = ldjax.testing.tiny_model().config
    >>> mesh = check_mesh(jax.make_mesh((1, 1), ("data", "tensor")))
    >>> param_spec(("lm_head", "weight"), (31, 24), config, mesh) == (
    ...   jax.sharding.PartitionSpec())
    True

  Source: Shoeybi et al. 2019 (Megatron-LM).
  """
  layer = path[-2] if len(path) > 1 else None
  parts, by_output = 1, True
  if layer in _BY_OUTPUT:
    parts = shape[0]
  elif layer == "q_proj":
    # A draft's layer may have other heads than the target.
    parts = math.gcd(config.num_heads, shape[0])
  elif layer in ("k_proj", "v_proj"):
    parts = math.gcd(config.num_kv_heads, shape[0])
  elif len(shape) == 2 and layer in ("o_proj", "down_proj"):
    heads = math.gcd(config.num_heads, shape[1])
    parts = heads if layer == "o_proj" else shape[1]
    by_output = False
  axis = _axis(mesh, "tensor", parts)
  if axis is None:
    return PartitionSpec()
  return PartitionSpec(axis) if by_output else PartitionSpec(None, axis)


def place_on(
  mesh: Mesh, config: models.TransformerConfig
) -> Callable[[Sequence[Any], np.ndarray], jax.Array]:
  """Returns (path, host array) -> the parameter on its devices.

  Each device is sent its own part, so that no device ever holds a whole model.

  Args:
    mesh: from `check_mesh`.
    config: of the target.
  """

  def place(path: Sequence[Any], array: np.ndarray) -> jax.Array:
    spec = param_spec(path, array.shape, config, mesh)
    return jax.device_put(array, NamedSharding(mesh, spec))

  return place


def by_rows(path: Sequence[Any], shape: Sequence[int]) -> bool:
  """Whether a parameter must be laid out on TPU row after row.

  Left to itself a TPU lays out [V, E] column after column where E is no
  multiple of its 128 lanes, and each round would then copy the matrix for the
  look-up of its rows, and for `pallas_kernels.score`.

  Args:
    path: keys from the root of the target's parameters to the leaf.
    shape: of the parameter.

  Example:
    >>> by_rows(("embed_tokens", "weight"), (49152, 576))
    True
  """
  tables = (("embed_tokens", "weight"), ("lm_head", "weight"))
  return tuple(path) in tables and shape[-1] % 128 != 0


def place_on_tpu(path: Sequence[Any], array: np.ndarray) -> jax.Array:
  """The parameter on the default device, laid out as `by_rows` says.

  Args:
    path: keys from the root of the parameters to the leaf.
    array: the parameter on the host.

  Example:
    >>> import numpy as np
    >>> place_on_tpu(("lm_head", "weight"), np.zeros((5, 3))).shape
    (5, 3)
  """
  placed = jax.numpy.asarray(array)
  if not by_rows(path, array.shape):
    return placed
  (device,) = placed.devices()
  # Compiled functions take an array as it lies, once it is bound to a device.
  return jax.device_put(
    placed, Format(Layout((0, 1)), SingleDeviceSharding(device))
  )


def state_shardings(state: Any, mesh: Mesh) -> Any:
  """How the state of B rows lies on a mesh.

  Whatever has a leading axis of B is split by rows over "data", if that
  divides B. The pool is one pool for all rows: its pages [P, K, Z, 2H], and
  those of windows, are split over "tensor" by K, if that divides K, and are the
  same on every device along "data".

  Args:
    state: a `DecodeState`, of arrays or shapes.
    mesh: from `check_mesh`.

  Returns:
    The same structure of `NamedSharding`.
  """
  batch = state.length.shape[0]

  def sharding(path: Any, leaf: Any) -> NamedSharding:
    names = [getattr(key, "name", None) for key in path]
    spec = PartitionSpec()
    if names[0] == "cache" and "pages" in names:
      if axis := _axis(mesh, "tensor", leaf.shape[1]):
        spec = PartitionSpec(None, axis)
    elif (
      not (names[0] == "cache" and "pool" in names)
      and leaf.shape[:1] == (batch,)
      and (axis := _axis(mesh, "data", batch))
    ):
      spec = PartitionSpec(axis)
    return NamedSharding(mesh, spec)

  return jax.tree_util.tree_map_with_path(sharding, state)


@functools.lru_cache(maxsize=64)
def constrain(decoder: decoding.Decoder, mesh: Mesh) -> decoding.Decoder:
  """The same decoder, whose states keep their layout on a mesh.

  Under any `jit` a state comes out as it went in, so that it can be donated
  and nothing compiles again; what a round emitted is on every device. Same
  arguments give the same functions.

  Args:
    decoder: what to run.
    mesh: from `check_mesh`.

  Example:
    >>> import jax, ldjax
    >>> from ldjax import decoding
    >>> tiny = ldjax.testing.tiny_model()
    >>> plain = decoding.autoregressive(
    ...   tiny.target, tiny.init_cache, max_len=tiny.max_len)
    >>> mesh = check_mesh(jax.make_mesh((1, 1), ("data", "tensor")))
    >>> decoder = constrain(plain, mesh)
    >>> state = jax.jit(decoder.empty, static_argnums=1)(
    ...   decoding.DecoderParams(tiny.params), 2)
    >>> state.tokens.sharding.mesh.axis_names
    ('data', 'tensor')
  """
  everywhere = NamedSharding(mesh, PartitionSpec())

  def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # Automatic partitioning can't split a kernel.
    split = mesh.size > 1
    alone = pallas_kernels.without_kernels if split else contextlib.nullcontext
    with alone():
      return function(*args, **kwargs)

  def on_mesh(state: Any) -> Any:
    return jax.lax.with_sharding_constraint(state, state_shardings(state, mesh))

  def keep(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function, updated=())
    def kept(*args: Any, **kwargs: Any) -> Any:
      return on_mesh(run(function, *args, **kwargs))

    return kept

  def keep_both(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function, updated=())
    def kept(*args: Any, **kwargs: Any) -> Any:
      state, emitted = run(function, *args, **kwargs)
      emitted = jax.lax.with_sharding_constraint(emitted, everywhere)
      return on_mesh(state), emitted

    return kept

  return decoding.Decoder(
    init=keep(decoder.init),
    step=keep_both(decoder.step),
    empty=keep(decoder.empty),
    admit=keep(decoder.admit),
    prefill=keep_both(decoder.prefill),
    preempt=keep(decoder.preempt),
    release=keep(decoder.release),
  )


def bytes_a_device(params: Any) -> int:
  """Bytes of the parameters on one of the devices that they are spread over."""
  return sum(
    x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(params)
  )


def parts_of_a_page(mesh: Mesh | None, config: models.TransformerConfig) -> int:
  """Into how many parts a page is split over the devices of a mesh."""
  tensor = 1 if mesh is None else mesh.shape.get("tensor", 1)
  return tensor if config.num_kv_heads % tensor == 0 else 1
