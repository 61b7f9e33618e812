"""What each backend of the kernels takes, as data, and why it refuses."""

import dataclasses

import jax

# Where the numbers come from: docs/guides/kernels.md.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """What one backend of one kernel takes."""

  kernel: str
  """The function's name."""
  implementation: str
  """What to pass as `implementation`."""
  platform: str
  """What it is compiled for, as `jax.jit(...).lower` names it."""
  devices: str
  """The devices it is for, in words."""
  dtypes: tuple[str, ...]
  """Of the queries or hidden rows."""
  page_dtypes: tuple[str, ...] = ()
  """Of the pages, () where there are none."""
  same_dtype: bool = False
  """Whether pages must have the dtype of the queries."""
  head_dims: tuple[int, ...] | None = None
  """None for any."""
  page_sizes: tuple[int, ...] | None = None
  """None for any from `least_page_size` on."""
  least_page_size: int = 1
  """Z at least."""
  most_page_numbers: int | None = None
  """Z times H at most; None for any."""
  chosen_fused_multiple: int = 1
  """2H must be a multiple for it to be chosen unasked: another is compiled, but
  brings a copy of the whole pool with each call."""
  chosen_page_multiple: int = 1
  """The same for Z."""
  since: str = "0.10"
  """The least jax that compiles it."""
  interpreter_since: str = "0.10"
  """The least jax that interprets it on a CPU."""


_FLOATS = ("float32", "bfloat16")
_ALL = ("float32", "bfloat16", "float16")

LIMITS: tuple[Limits, ...] = (
  Limits(
    kernel="prefix_attention",
    implementation="xla",
    platform="any",
    devices="any",
    dtypes=_ALL,
    page_dtypes=(*_ALL, "int8", "float8_e4m3fn"),
  ),
  Limits(
    kernel="prefix_attention",
    implementation="mosaic_tpu",
    platform="tpu",
    devices="TPU v4 and later",
    dtypes=_FLOATS,
    page_dtypes=(*_FLOATS, "int8"),
    least_page_size=2,
    chosen_fused_multiple=128,
    chosen_page_multiple=8,
  ),
  Limits(
    kernel="prefix_attention",
    implementation="mosaic_gpu",
    platform="cuda",
    devices="NVIDIA Hopper (sm_90a)",
    dtypes=("bfloat16", "float16"),
    page_dtypes=("bfloat16", "float16"),
    same_dtype=True,
    head_dims=(64, 128, 256),
    page_sizes=(8, 16, 32, 64, 128),
    most_page_numbers=128 * 128,
    since="0.11.2",
    interpreter_since="0.11.2",
  ),
  Limits(
    kernel="score",
    implementation="xla",
    platform="any",
    devices="any",
    dtypes=_ALL,
  ),
  Limits(
    kernel="score",
    implementation="mosaic_tpu",
    platform="tpu",
    devices="TPU v4 and later",
    dtypes=_FLOATS,
  ),
)
"""Every backend of every kernel."""


def limits(kernel: str, implementation: str) -> Limits:
  """The entry of one backend.

  Args:
    kernel: the function's name.
    implementation: the backend's.

  Raises:
    ValueError: if there is none.

  Example:
    >>> limits("prefix_attention", "mosaic_gpu").head_dims
    (64, 128, 256)
  """
  names = []
  for each in LIMITS:
    if each.kernel == kernel:
      if each.implementation == implementation:
        return each
      names.append(each.implementation)
  raise ValueError(
    f"implementation is {implementation!r}; {kernel} has"
    f" {', '.join(map(repr, names))}, or None for the best that fits"
  )


def version(text: str) -> tuple[int, ...]:
  """The numbers of a version, to compare.

  Example:
    >>> version("0.12.0.1") > version("0.11.2")
    True
  """
  numbers = []
  for part in text.split("."):
    if not part.isdigit():
      break
    numbers.append(int(part))
  return tuple(numbers)


def refusals(
  entry: Limits,
  *,
  dtype: str,
  page_dtype: str | None = None,
  head_dim: int | None = None,
  page_size: int | None = None,
  jax_version: str | None = None,
) -> list[str]:
  """Why a backend can't do something, [] if it can.

  Args:
    entry: the backend.
    dtype: of the queries or hidden rows.
    page_dtype: of the pages.
    head_dim: H.
    page_size: Z.
    jax_version: None for the one that runs.

  Returns:
    Sentences' ends, each with the value and the limit.
  """
  found = []
  jax_version = jax.__version__ if jax_version is None else jax_version
  if version(jax_version) < version(entry.since):
    found.append(f"jax is {jax_version}; it needs {entry.since} or later")
  if dtype not in entry.dtypes:
    found.append(f"the dtype is {dtype}; it takes {_either(entry.dtypes)}")
  if page_dtype is not None:
    if page_dtype not in entry.page_dtypes:
      found.append(
        f"the pages' dtype is {page_dtype}; it takes"
        f" {_either(entry.page_dtypes)}"
      )
    elif entry.same_dtype and page_dtype != dtype:
      found.append(
        f"the pages' dtype is {page_dtype}; it must be that of the queries,"
        f" {dtype}"
      )
  if (
    head_dim is not None
    and entry.head_dims is not None
    and head_dim not in entry.head_dims
  ):
    found.append(f"head_dim is {head_dim}; it takes {_either(entry.head_dims)}")
  if page_size is not None:
    if entry.page_sizes is not None and page_size not in entry.page_sizes:
      found.append(
        f"page_size is {page_size}; it takes {_either(entry.page_sizes)}"
      )
    elif page_size < entry.least_page_size:
      found.append(
        f"page_size is {page_size}; it takes {entry.least_page_size} or more"
      )
    most = entry.most_page_numbers
    if (
      most is not None and head_dim is not None and page_size * head_dim > most
    ):
      found.append(
        f"page_size {page_size} times head_dim {head_dim} is"
        f" {page_size * head_dim}; shared memory takes {most}"
      )
  return found


def check(entry: Limits, **problem: object) -> None:
  """Raises ValueError for what a named backend can't do, saying why."""
  found = refusals(entry, **problem)  # type: ignore[arg-type]
  if found:
    raise ValueError(
      f"implementation {entry.implementation!r} of {entry.kernel} can't do"
      f" this: {'; '.join(found)}. Leave implementation out, or give 'xla'"
    )


def chosen(entry: Limits, *, head_dim: int, page_size: int) -> bool:
  """Whether a backend is chosen unasked for pages of these sizes."""
  return (
    2 * head_dim % entry.chosen_fused_multiple == 0
    and page_size % entry.chosen_page_multiple == 0
  )


def _either(values: tuple[object, ...]) -> str:
  *most, last = map(str, values)
  return f"{', '.join(most)} or {last}" if most else last
