"""Texts that cannot be seen, or that act, are made harmless."""

import unicodedata

import hypothesis
import hypothesis.strategies as st
import pytest

from ldjax._render import _labels

_SILENT = {"Cc", "Cf", "Cs", "Zl", "Zp", "Zs"}
_JOINERS = {"\u200c", "\u200d"}


@pytest.mark.parametrize(
  ("text", "shown"),
  [
    (" Paris", "␣Paris"),
    ("\n", "↵"),
    ("\t\n", "⇥↵"),
    ("", "∅"),
    ("\x1b[31m", "⟨U+001B⟩[31m"),
    ("\r", "⟨U+000D⟩"),
    ("\u202eevil", "⟨U+202E⟩evil"),
    ("\u200b", "⟨U+200B⟩"),
    ("\xa0", "⟨U+00A0⟩"),
    ("\ud800", "⟨U+D800⟩"),
    ("\ufffe", "⟨U+FFFE⟩"),
    ("\ufffd", "\ufffd"),
    ("مرحبا", "مرحبا"),
    ("👩\u200d👧", "👩\u200d👧"),
    ("\u0301", "◌\u0301"),
    ("\u200d", "◌\u200d"),
  ],
)
def test_label(text, shown):
  assert _labels.label(text, 20) == shown


@pytest.mark.parametrize(
  ("text", "columns", "shown"),
  [
    ("abcd", 4, "abcd"),
    ("abcde", 4, "abc…"),
    ("数独数独", 8, "数独数独"),
    ("数独数独", 7, "数独数…"),
    ("数独数独", 6, "数独…"),
    ("e\u0301" * 4, 4, "e\u0301" * 4),
    ("👩\u200d👧👧", 4, "👩…"),
  ],
)
def test_cut(text, columns, shown):
  assert _labels.cut(text, columns) == shown


@hypothesis.given(st.text(st.characters()), st.integers(1, 20))
def test_label_is_visible_and_fits(text, columns):
  shown = _labels.label(text, columns)
  assert 0 < _labels.width(shown) <= columns or shown == "∅"
  assert {unicodedata.category(char) for char in shown} & _SILENT <= {"Cf"}
  assert {c for c in shown if unicodedata.category(c) == "Cf"} <= _JOINERS
