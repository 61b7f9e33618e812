"""The README's picture is what the code draws."""

import importlib.util
import pathlib

import pytest

import ldjax

_REPOSITORY = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def draw_round():
  spec = importlib.util.spec_from_file_location(
    "draw_round", _REPOSITORY / "docs" / "draw_round.py"
  )
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def test_the_readme_shows_it(draw_round):
  name = draw_round.PICTURE.relative_to(_REPOSITORY).as_posix()
  assert f"![one round]({name})" in (_REPOSITORY / "README.md").read_text()
  assert draw_round.PICTURE.is_file()


@pytest.mark.slow
def test_the_picture_is_up_to_date(draw_round, demo_model):
  model = ldjax.load(demo_model, draft="none", max_len=64)
  drawn = draw_round.draw(model)._repr_svg_() + "\n"
  committed = draw_round.PICTURE.read_text("utf-8")
  assert drawn == committed, "run python docs/draw_round.py"
