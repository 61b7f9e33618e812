"""Counting what is compiled while something runs."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"
_HIT = "/jax/compilation_cache/cache_hits"


@dataclasses.dataclass
class Compilations:
  """What was compiled, or taken from JAX's persistent cache."""

  programs: int = 0
  """Both of them."""
  seconds: float = 0.0
  """Of the compiler; for those of the cache the time of reading them."""
  from_cache: int = 0
  """Programs that the persistent cache had."""


_counting: list[Compilations] = []
_registered = False


def _on_duration(event: str, duration_secs: float, **_: Any) -> None:
  if event == _EVENT:
    for each in _counting:
      each.programs += 1
      each.seconds += duration_secs


def _on_event(event: str, **_: Any) -> None:
  if event == _HIT:
    for each in _counting:
      each.from_cache += 1


@contextlib.contextmanager
def counted_compilations() -> Iterator[Compilations]:
  """Counts the programs that are compiled in the block.

  Example:
    >>> import jax
    >>> with counted_compilations() as counted:
    ...   _ = jax.jit(lambda x: x + 41)(1)
    >>> counted.programs >= 1
    True
  """
  global _registered
  if not _registered:
    # Once for the process: not every version of JAX can take them away again.
    jax.monitoring.register_event_duration_secs_listener(_on_duration)
    jax.monitoring.register_event_listener(_on_event)
    _registered = True
  counted = Compilations()
  _counting.append(counted)
  try:
    yield counted
  finally:
    # By identity: two counters of the same figures are equal.
    _counting[:] = [each for each in _counting if each is not counted]
