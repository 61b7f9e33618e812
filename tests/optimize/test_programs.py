"""Counts of compiled programs, and what fusing does to them."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from ldjax import models, optimize, testing


class _Compiled:
  """A program of known text and figures."""

  def __init__(self, text, temporary, aliased):
    self._text = text
    self._figures = (temporary, aliased)

  def as_text(self):
    return self._text

  def memory_analysis(self):
    temporary, aliased = self._figures

    class Figures:
      temp_size_in_bytes = temporary
      alias_size_in_bytes = aliased

    return Figures


_TEXT = """HloModule jit_f, is_scheduled=true

%region (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  ROOT %inner = f32[8]{0} negate(%a)
}

ENTRY %main (p: f32[2,8]) -> f32[2,8] {
  %p = f32[2,8]{1,0} parameter(0)
  %one = f32[] constant(1)
  %flag = pred[3]{0} fusion(%p), kind=kLoop, calls=%region
  %small = bf16[2,8]{1,0:T(8,128)(2,1)} fusion(%p), kind=kLoop, calls=%region
  %loop = (s32[], f32[4,2]{1,0}) while(%t), condition=%c, body=%b
  %part = f32[4,2]{1,0} get-tuple-element(%loop), index=1
  ROOT %dot.1 = f32[2,8]{1,0} dot(%small, %part), lhs_contracting_dims={1}
}
"""


def test_figures_of_a_text():
  counts = optimize.count_program(_Compiled(_TEXT, 60, 64))
  # pred[3]; bf16[2,8]; s32[] with f32[4,2]; f32[2,8].
  assert counts == (4, 3 + 32 + (4 + 32) + 64, 60, 64)
  assert counts.reused == pytest.approx(1 - 60 / 135)
  assert optimize.ProgramCounts(0, 0, 0, 0).reused == 0


@pytest.mark.slow
def test_fusing_takes_kernels_from_a_block():
  tiny = testing.tiny_model()
  config = dataclasses.replace(tiny.config, num_layers=3)
  params = models.abstract_params(config)

  def kernels(parts):
    fused = dataclasses.replace(config, fused=parts)
    return optimize.block_kernels(fused, models.abstract_params(fused))

  plain = optimize.block_kernels(config, params)
  # Three products become one, and two become one.
  assert kernels(("qkv", "gate_up")) <= plain - 3
  with pytest.raises(ValueError, match="has 2 layers"):
    optimize.block_kernels(tiny.config, tiny.params)


def test_donation_and_reuse_are_seen():
  def f(x):
    y = x
    for _ in range(4):
      y = jnp.cos(y @ y)
    return y

  shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
  kept = optimize.count_program(jax.jit(f).lower(shape).compile())
  given = optimize.count_program(
    jax.jit(f, donate_argnums=0).lower(shape).compile()
  )
  assert kept.aliased_bytes == 0
  assert given.aliased_bytes == 64 * 64 * 4
  assert 0 < kept.reused < 1
