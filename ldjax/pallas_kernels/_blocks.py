"""How much a grid step of a kernel works on: told, measured or guessed."""

import dataclasses
import functools
import json
import pathlib
import warnings
from collections.abc import Mapping
from typing import Any

import jax

from ldjax import _cache_folder

# Bytes of pages that a step brings in: twice this is in fast memory at a time.
_STEP_BYTES = 1 << 20
_STEP_POSITIONS = 512
_STEP_PAGES = 16
_STEP_LOGITS = 1 << 17


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixBlocks:
  """Sizes of a step of `prefix_attention`, which change its speed alone.

  Example:
    >>> PrefixBlocks(step_pages=4).head_block(12)
    6
  """

  step_pages: int
  """Pages at most."""
  query_rows: int = 256
  """Rows of queries at most: nodes times the heads that share a key."""
  kv_heads: int = 8
  """Key/value heads at most."""

  def __post_init__(self) -> None:
    _check_positive(self)

  def head_block(self, kv_heads: int) -> int:
    """The largest divisor of `kv_heads` that is at most `self.kv_heads`."""
    return max(n for n in range(1, self.kv_heads + 1) if kv_heads % n == 0)

  def query_tile(self, rows: int, multiple: int) -> int:
    """Rows a tile: equal tiles, as few as allowed, of a multiple of rows."""
    return _equal_tile(rows, self.query_rows, multiple)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreBlocks:
  """Sizes of a step of `score`, which change its speed alone."""

  vocab_tile: int
  """Rows of the output matrix."""
  hidden_rows: int = 256
  """Hidden rows at most."""

  def __post_init__(self) -> None:
    _check_positive(self)

  def row_tile(self, rows: int, multiple: int) -> int:
    """Rows a tile: equal tiles, as few as allowed, of a multiple of rows."""
    return _equal_tile(rows, self.hidden_rows, multiple)


def _equal_tile(rows: int, most: int, multiple: int) -> int:
  tiles = -(-rows // most)
  return -(-rows // (tiles * multiple)) * multiple


def _check_positive(blocks: Any) -> None:
  for name, value in dataclasses.asdict(blocks).items():
    if not (isinstance(value, int) and value >= 1):
      raise ValueError(f"{name} is {value!r}; it must be an int of at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixProblem:
  """What the best sizes for `prefix_attention` depend on."""

  head_dim: int
  """H."""
  kv_heads: int
  """K."""
  page_size: int
  """Z."""
  rows: int
  """T times the heads of a group."""
  query_dtype: str
  """Its name."""
  page_dtype: str
  """Its name."""

  @property
  def key(self) -> str:
    """Its name in a file; numbers of rows count by powers of two."""
    rows = 1 << (self.rows - 1).bit_length()
    return (
      f"H{self.head_dim} K{self.kv_heads} Z{self.page_size} rows{rows}"
      f" {self.query_dtype} {self.page_dtype}"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreProblem:
  """What the best sizes for `score` depend on."""

  width: int
  """E."""
  rows: int
  """R."""
  dtype: str
  """Of the hidden rows and the matrix."""

  @property
  def key(self) -> str:
    """Its name in a file; numbers of rows count by powers of two."""
    rows = 1 << (self.rows - 1).bit_length()
    return f"E{self.width} rows{rows} {self.dtype}"


def _bytes(dtype: str) -> int:
  return jax.numpy.dtype(dtype).itemsize


def guess_prefix(problem: PrefixProblem) -> PrefixBlocks:
  """Sizes by rule, for a device where nothing was measured.

  Example:
    >>> guess_prefix(PrefixProblem(
    ...   head_dim=128, kv_heads=8, page_size=16, rows=128,
    ...   query_dtype="bfloat16", page_dtype="bfloat16")).step_pages
    16
  """
  blocks = PrefixBlocks(step_pages=1)
  page = problem.page_size * 2 * problem.head_dim * _bytes(problem.page_dtype)
  page *= blocks.head_block(problem.kv_heads)
  return PrefixBlocks(
    step_pages=max(
      1,
      min(
        _STEP_PAGES,
        _STEP_POSITIONS // problem.page_size,
        _STEP_BYTES // page,
      ),
    )
  )


def guess_score(problem: ScoreProblem) -> ScoreBlocks:
  """Sizes by rule: as many rows of the matrix as two megabytes hold.

  The logits of a step, of which there are several copies, get half a megabyte.
  """
  rows = (2 << 20) // (problem.width * _bytes(problem.dtype))
  blocks = ScoreBlocks(vocab_tile=128)
  logits = _STEP_LOGITS // min(problem.rows, blocks.hidden_rows)
  tile = blocks.vocab_tile
  while tile * 2 <= min(rows, logits, 2048):
    tile *= 2
  return ScoreBlocks(vocab_tile=tile)


_KINDS: Mapping[str, Any] = {
  "prefix_attention": PrefixBlocks,
  "score": ScoreBlocks,
}


def device_kind(platform: str) -> str | None:
  """The kind of the default device, None if it is of another platform."""
  device = jax.devices()[0]
  return device.device_kind if device.platform == platform else None


def tuned_path(device: str) -> pathlib.Path:
  """The file with the sizes measured on a kind of device."""
  name = "".join(c if c.isalnum() else "-" for c in device)
  return _cache_folder.cache_folder() / "kernels" / f"{name}.json"


@functools.lru_cache(maxsize=16)
def _read(path: pathlib.Path) -> Mapping[str, Mapping[str, Any]]:
  try:
    text = path.read_text("utf-8")
  except OSError:
    return {}
  try:
    says = json.loads(text)
    return {
      kernel: {key: make(**sizes) for key, sizes in says[kernel].items()}
      for kernel, make in _KINDS.items()
      if kernel in says
    }
  except (ValueError, TypeError, AttributeError) as error:
    warnings.warn(
      f"{path} is no file of block sizes ({error}); sizes are guessed. Measure"
      " anew with `ldjax tune-kernels`",
      stacklevel=2,
    )
    return {}


def write_tuned(
  device: str, sizes: Mapping[str, Mapping[str, Any]]
) -> pathlib.Path:
  """Adds measured sizes to the file of a kind of device.

  Args:
    device: its kind, as JAX names it.
    sizes: {kernel: {problem's key: blocks}}.

  Returns:
    The file.
  """
  path = tuned_path(device)
  found = _read(path)
  sizes = {
    kernel: {**found.get(kernel, {}), **sizes.get(kernel, {})}
    for kernel in _KINDS
  }
  path.parent.mkdir(parents=True, exist_ok=True)
  plain = {
    kernel: {key: dataclasses.asdict(blocks) for key, blocks in each.items()}
    for kernel, each in sizes.items()
  }
  says = {"device": device, "jax": jax.__version__, **plain}
  path.write_text(json.dumps(says, indent=2) + "\n", "utf-8")
  _read.cache_clear()
  return path


def choose_prefix(
  problem: PrefixProblem, platform: str, told: PrefixBlocks | None
) -> PrefixBlocks:
  """What was told, else measured on this kind of device, else guessed."""
  if told is not None:
    return told
  found = _measured("prefix_attention", problem.key, platform)
  return guess_prefix(problem) if found is None else found


def choose_score(
  problem: ScoreProblem, platform: str, told: ScoreBlocks | None
) -> ScoreBlocks:
  """What was told, else measured on this kind of device, else guessed."""
  if told is not None:
    return told
  found = _measured("score", problem.key, platform)
  return guess_score(problem) if found is None else found


def _measured(kernel: str, key: str, platform: str) -> Any:
  device = device_kind(platform)
  if device is None:
    return None
  return _read(tuned_path(device)).get(kernel, {}).get(key)
