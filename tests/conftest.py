"""Strict mode, and the fixtures that several folders of tests use."""

import contextlib
import fcntl
import os
import pathlib
import tempfile
from collections.abc import Iterator

import hypothesis
import jax
import pytest

# Each xdist worker has a thread pool of its own, sized when the backend starts.
# Never under two threads: a host callback that waits for a computation needs a
# second one.
_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if _workers > 1:
  _cpus = os.cpu_count() or 1
  os.environ.setdefault("PJRT_NPROC", str(max(2, _cpus // _workers)))

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
