"""A kernel asked for by name: on its own platform, and nowhere in its place."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.extend import core
from jax.interpreters import mlir

from ldjax.pallas_kernels import _limits

_refuse = core.Primitive("refuse")
_refuse.multiple_results = True


@_refuse.def_abstract_eval
def _(*, limits: _limits.Limits, shapes: tuple[Any, ...]) -> tuple[Any, ...]:
  del limits
  return shapes


@_refuse.def_impl
def _(**params: Any) -> Any:
  # Op by op nothing else would lower it.
  return jax.jit(lambda: _refuse.bind(**params))()


def _lower(ctx: Any, *, limits: _limits.Limits, shapes: Any) -> Any:
  del shapes
  platforms = ", ".join(ctx.module_context.platforms)
  raise ValueError(
    f"implementation {limits.implementation!r} of {limits.kernel} is for"
    f" {limits.devices}, but this is compiled for {platforms}. Leave"
    " implementation out, or give 'xla'"
  )


mlir.register_lowering(_refuse, _lower)


def only_there(
  limits: _limits.Limits, kernel: Callable[..., Any]
) -> Callable[..., Any]:
  """The kernel where it is compiled for its platform, else a ValueError.

  What a program is compiled for is known only then: a TPU's may be compiled on
  a CPU.
  """

  def refuse(*arrays):
    shapes, tree = jax.tree.flatten(jax.eval_shape(kernel, *arrays))
    avals = tuple(jax.core.ShapedArray(x.shape, x.dtype) for x in shapes)
    return jax.tree.unflatten(tree, _refuse.bind(limits=limits, shapes=avals))

  def run(*arrays):
    return lax.platform_dependent(
      *arrays, default=refuse, **{limits.platform: kernel}
    )

  return run
