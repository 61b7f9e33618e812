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


def test_the_picture_is_up_to_date(draw_round):
  committed = draw_round.PICTURE.read_text("utf-8")
  assert draw_round.redraw() == committed, "run python docs/draw_round.py"


@pytest.mark.slow
def test_the_program_draws_a_round(
  draw_round, tiny_plain, monkeypatch, tmp_path
):
  """On a small model; that of the picture takes a minute to compile."""
  monkeypatch.setattr(draw_round, "PICTURE", tmp_path / "images" / "round.svg")
  monkeypatch.setattr(draw_round, "KEPT", tmp_path / "images" / "round.json")
  monkeypatch.setattr(ldjax, "load", lambda *args, **options: tiny_plain)
  draw_round.main()
  tree = draw_round.decoding.TokenTree.from_paths(draw_round.PATHS)
  view = draw_round.draw(tiny_plain)
  assert view.parents == tree.parents
  assert view.path[0] == 0 and view.bonus is not None
  drawn = draw_round.PICTURE.read_text("utf-8")
  assert drawn == draw_round.redraw() == view._repr_svg_() + "\n"
