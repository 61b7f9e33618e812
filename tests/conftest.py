"""Strict mode, and the fixtures that several folders of tests use."""

import contextlib
import dataclasses
import fcntl
import functools
import gc
import os
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import hypothesis
import jax
import numpy as np
import pytest

# Each xdist worker has a thread pool of its own, sized when the backend starts.
# Never under two threads: a host callback that waits for a computation needs a
# second one.
_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if _workers > 1:
  _cpus = os.cpu_count() or 1
  os.environ.setdefault("PJRT_NPROC", str(max(2, _cpus // _workers)))

# Most of the time here is XLA compiling small programs that run once. What the
# environment says counts more; `test_compiler_defaults.py` runs some tests as
# users compile.
os.environ["XLA_FLAGS"] = (
  "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
  f" {os.environ.get('XLA_FLAGS', '')}"
).strip()

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# No deadline: the first example of a property compiles.
hypothesis.settings.register_profile(
  "default",
  deadline=None,
  max_examples=50,
  suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
  "ci", hypothesis.settings.get_profile("default"), derandomize=True
)
hypothesis.settings.load_profile(
  "ci" if os.environ.get("CI") == "true" else "default"
)

_REPOSITORY = pathlib.Path(__file__).resolve().parent.parent


# A process may have 65,530 memory mappings on Linux. Every compiled program has
# several, and where no more is to be had XLA's compiler crashes.
_MANY_MAPPINGS = 30_000


@pytest.fixture(autouse=True)
def few_compiled_programs() -> Iterator[None]:
  """After a test, lets go of what was compiled so far if it is a lot."""
  yield
  mappings = pathlib.Path("/proc/self/maps")
  if mappings.exists():
    with mappings.open("rb") as file:
      count = sum(1 for _ in file)
    if count > _MANY_MAPPINGS:
      jax.clear_caches()
      gc.collect()


@pytest.fixture(scope="session")
def as_users() -> dict[str, bool]:
  """Options with which a compiled program's text is that of users."""
  return {"xla_cpu_use_fusion_emitters": True}


@contextlib.contextmanager
def _one_process_at_a_time(name: str) -> Iterator[None]:
  """Holds a lock file of this user while the block runs."""
  path = pathlib.Path(tempfile.gettempdir()) / f"{name}-{os.getuid()}.lock"
  with path.open("w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    yield


@pytest.fixture(scope="session")
def demo_model() -> pathlib.Path:
  """The demo model's GGUF file, fetched once by whichever worker is first."""
  checkpoints = pytest.importorskip("ldjax.checkpoints")
  try:
    with _one_process_at_a_time("ldjax-demo"):
      return pathlib.Path(checkpoints.fetch_demo())
  except OSError as error:  # no network; anything else is a fault of ours
    if os.environ.get("LDJAX_REQUIRE_DEMO"):
      raise
    pytest.skip(f"the demo model cannot be fetched: {error}")


@pytest.fixture(scope="session")
def shared_data() -> pathlib.Path:
  """The folder of larger data files, which the repository does not hold."""
  default = _REPOSITORY.parent / "shared" / "data"
  folder = pathlib.Path(os.environ.get("LDJAX_SHARED_DATA", default))
  if not folder.is_dir():
    pytest.skip(f"no folder {folder}: set LDJAX_SHARED_DATA")
  return folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """See `ldjax.testing.write_tiny_model`."""
  testing = pytest.importorskip("ldjax.testing")
  return testing.write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_heads(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """Two Medusa heads for `tiny_folder` that share its output matrix.

  Their blocks are almost the identity: they guess that the token to come is
  there twice more, which a random model's greedy text often bears out.
  """
  checkpoints = pytest.importorskip("ldjax.checkpoints")
  models = pytest.importorskip("ldjax.models")
  folder = tmp_path_factory.mktemp("heads") / "tiny-heads"
  config = models.MedusaConfig(
    num_heads=2,
    num_layers=1,
    hidden_size=24,
    vocab_size=262,
    shared_output=True,
  )
  rng = np.random.default_rng(1)

  def head() -> dict[str, dict[int, dict[str, np.ndarray]]]:
    weight = 0.01 * rng.standard_normal((24, 24), np.float32)
    return {"blocks": {0: {"weight": weight, "bias": np.zeros(24, "f4")}}}

  checkpoints.write_medusa(folder, config, {"heads": {0: head(), 1: head()}})
  return folder


@pytest.fixture(scope="session")
def tiny(tiny_folder: pathlib.Path):
  """`tiny_folder` loaded with every default, so with the n-gram draft."""
  return pytest.importorskip("ldjax").load(tiny_folder)


@pytest.fixture(scope="session")
def tiny_plain(tiny):
  """The same model without a draft."""
  return pytest.importorskip("ldjax").with_draft(tiny, "none")


@pytest.fixture(scope="session")
def tiny_medusa(tiny, tiny_heads: pathlib.Path):
  """The same model with `tiny_heads` and a tree of seven nodes."""
  ldjax = pytest.importorskip("ldjax")
  return ldjax.with_draft(tiny, tiny_heads, "1,2,2")


def _scripted_forward(params, tokens, positions, parents, view):
  del parents, view
  jnp = jax.numpy
  from ldjax import decoding

  batch, width = tokens.shape
  token = (tokens + params["shift"] * positions) % 262
  hidden = token.astype(jnp.float32)[..., None]
  if 1 < width < 16:  # a tree, not a chunk of a prompt
    broken = jnp.arange(width) >= params["broken_from"]
    hidden = jnp.where(broken[None, :, None], jnp.nan, hidden)
  block = jnp.zeros((batch, width, 1, 4), jnp.float32)
  return decoding.TargetOutput(hidden, hidden, (block,))


def _scripted_score(params, hidden):
  jnp = jax.numpy
  from ldjax import decoding

  token = hidden[..., 0]
  rows = params["logits"][jnp.nan_to_num(token).astype(jnp.int32)]
  return decoding.Scores(jnp.where(jnp.isnan(token)[..., None], jnp.nan, rows))


def _scripted(
  base: Any,
  logits: np.ndarray,
  *,
  shift: int = 0,
  broken_from: int = 99,
  draft: str = "ngram",
  max_len: int = 64,
  page_size: int = 4,
  num_pages: int | None = None,
) -> Any:
  jnp = jax.numpy
  from ldjax import assemble, decoding

  config = dataclasses.replace(
    base.config, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=2
  )
  target = decoding.TargetFn(_scripted_forward, _scripted_score)
  init_cache = assemble.cache_factory(
    config, max_len=max_len, page_size=page_size, num_pages=num_pages
  )
  fn = decoding.ngram(3) if draft == "ngram" else decoding.root_only()
  build = functools.partial(
    decoding.speculative, target, init_cache=init_cache, max_len=max_len
  )
  params = {
    "logits": jnp.asarray(logits, jnp.float32),
    "shift": jnp.int32(shift),
    "broken_from": jnp.int32(broken_from),
  }
  return dataclasses.replace(
    base,
    config=config,
    target=target,
    draft_name=draft,
    params=decoding.DecoderParams(params),
    ladder=(assemble.Rung(fn, build(fn), None),),
    start=0,
    fallback=build(decoding.root_only(fn)),
    init_cache=init_cache,
    max_len=max_len,
    page_size=page_size,
    num_pages=num_pages,
    prefill_chunks=(64,),
  )


@pytest.fixture(scope="session")
def scripted(tiny):
  """Makes models whose logits after token t are row t of a matrix [V, V].

  With `shift` the row is that of (t + shift * position) mod V; a forward over a
  tree has NaN in the nodes from `broken_from` on. All of this is data: models
  of equal draft and cache sizes share what was compiled.
  """
  return functools.partial(_scripted, tiny)


@pytest.fixture(scope="session")
def bigram():
  """Makes logits [262, 262] with a clear winner after each token.

  `bigram({a: b})` says b after a; after any other token t comes 7 t + 3.
  """

  def make(after: dict[int, int] | None = None) -> np.ndarray:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((262, 262), np.float32)
    token = np.arange(262)
    following = (7 * token + 3) % 256
    for one, other in (after or {}).items():
      following[one] = other
    logits[token, following] = 9
    return logits

  return make
