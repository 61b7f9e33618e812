"""The page: well-formed, whole, and in need of nothing else."""

import html.parser
import re

import pytest

from ldjax import models, profile

_VOID = {"meta", "br", "hr", "img"}


class _Page(html.parser.HTMLParser):
  """Tags must be closed in order; texts and attributes are kept."""

  def __init__(self):
    super().__init__()
    self.open, self.texts, self.attributes, self.tags = [], [], [], []

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    self.attributes += attrs
    if tag not in _VOID:
      self.open.append(tag)

  def handle_startendtag(self, tag, attrs):
    self.tags.append(tag)
    self.attributes += attrs

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    self.texts.append(data)


def parsed(report):
  page = _Page()
  page.feed(profile.to_html(report))
  page.close()
  assert page.open == []
  return page


@pytest.fixture
def whole(report):
  """With advice and a projection."""
  report["advice"] = profile.advise(report)
  config = models.TransformerConfig(
    vocab_size=31,
    hidden_size=24,
    intermediate_size=40,
    num_layers=2,
    num_heads=3,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=64,
  )
  report["projection"] = profile.project(config, {1: 1.0, 4: 1.8, 8: 2.1})
  return report


def _numbers(value):
  if isinstance(value, dict):
    for each in value.values():
      yield from _numbers(each)
  elif isinstance(value, list):
    for each in value:
      yield from _numbers(each)
  elif isinstance(value, int | float) and not isinstance(value, bool):
    yield value


def test_it_is_well_formed_and_fetches_nothing(whole):
  page = parsed(whole)
  assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
  names = {name for name, _ in page.attributes}
  assert not {"src", "href", "srcset", "style", "onload"} & names
  text = profile.to_html(whole)
  assert not re.search(r"https?:|url\(|@import|//[a-z]", text)
  assert page.tags.count("svg") == 6
  # A name with markup in it stays text.
  assert "Profile of <tiny & Co>" in page.texts


def test_all_numbers_are_in_it(whole):
  text = "".join(parsed(whole).texts)
  for number in _numbers(whole):
    assert str(number) in text


def test_figures_stand_in_the_tables(whole):
  shown = {
    cell
    for table in profile.tables(whole)
    for row in table.rows
    for cell in row
  }
  for wanted in (
    *("4.10", "56.70", "1.30", "1.70", "61.30", "83.90", "16.30", "16.00"),
    *("1.80", "30.00", "0.629", "0.475", "500.0", "57.1%", "7.14", "36.6%"),
    *("13", "68.7", "7.4", "9.4%", "5.3%", "1.1%", "2.42", "1.23", "1.60"),
  ):
    assert wanted in shown
  page = "".join(parsed(whole).texts)
  assert all(cell in page for cell in shown)


def test_a_projection_says_so_wherever_it_stands(whole):
  projected = [
    table for table in profile.tables(whole) if table.name == "projection"
  ]
  assert len(projected) == 3
  for table in projected:
    assert "Projection" in table.title
    assert all("projection" in column for column in table.columns[1:])
  del whole["projection"]
  assert "rojection" not in profile.to_html(whole)


def test_without_advice_it_says_so(report):
  report["advice"] = []
  assert "promises 3% or more" in "".join(parsed(report).texts)
