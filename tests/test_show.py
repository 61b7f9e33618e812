"""Rounds made readable: hand-made ones, and those of a decoder."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ldjax
from ldjax import decoding, sampling
from ldjax.decoding import Status

_WORDS = {3: " is", 5: " Paris", 6: " a", 7: ",", 8: "\x1b", 9: "<b>"}


def _round(
  tokens,
  path,
  candidates=((-1, 5, 6, 7, -1), (-1, 0, 0, 1, 1)),
  status=Status.RUNNING,
  finite=True,
  needs_pages=False,
  logprobs=None,
):
  """A round of two rows, of which the second is the one that counts."""
  count = len(tokens)

  def two(row, fill=0, width=4):
    row = np.array([*row, *[fill] * (width - len(row))])
    return np.stack([np.full_like(row, fill), row])

  carried, parents = candidates
  return types.SimpleNamespace(
    tokens=two(tokens, -1),
    logprobs=two(logprobs or [], 0.0),
    count=np.array([0, count]),
    path=two(path),
    status=np.array([Status.FREE, status]),
    finite=np.array([True, finite]),
    needs_pages=np.array([False, needs_pages]),
    candidates=decoding.Candidates(
      np.stack([np.full(len(carried), -1), np.array(carried)]),
      np.stack([np.array(parents), np.array(parents)]),
    ),
    rows=np.arange(2),
  )


def _lines(round, row=1, **more):
  return str(ldjax.show_round(round, row, **more)).splitlines()


def test_walk_that_ends_at_a_leaf():
  view = ldjax.show_round(
    _round([5, 7, 9], [0, 1, 3], logprobs=[-0.5, -1.0, -0.25]),
    1,
    tokenizer=_WORDS.__getitem__,
    root=3,
  )
  assert repr(view).splitlines() == [
    "● ␣is",
    "┝━● ␣Paris",
    "│ ┕━● ,",
    "│   └╌◌ <b>",
    "└── ␣a",
    "3 tokens in one pass",
    "1 node without a token not shown",
  ]
  assert view.titles == (
    "the pending token, token 3",
    "node 1, token 5, logprob -0.500",
    "node 2, token 6",
    "node 3, token 7, logprob -1.000",
    "node 4, token -1",
    "token 9, logprob -0.250",
  )
  assert "&lt;b&gt;" in view._repr_svg_()


def test_walk_that_ends_at_the_root():
  assert _lines(_round([9], [0])) == [
    "● ⟨root⟩",
    "├── 5",
    "│ └── 7",
    "├── 6",
    "└╌◌ 9",
    "1 token in one pass",
    "1 node without a token not shown",
  ]


def test_walk_that_a_stop_id_ends():
  # Token 7 is a child of node 1; a stop id is drawn and not stepped to.
  assert _lines(_round([5, 7], [0, 1], status=Status.STOPPED), root=3)[:7] == [
    "● 3",
    "┝━● 5",
    "│ ├── 7",
    "│ └╌◌ 7",
    "└── 6",
    "2 tokens in one pass",
    "ended by a stop id",
  ]


@pytest.mark.parametrize(
  ("more", "note"),
  [
    ({"status": Status.STOPPED}, "nothing emitted: had ended by a stop id"),
    ({"status": Status.LENGTH}, "nothing emitted: had ended by its limit"),
    ({"status": Status.FREE}, "nothing emitted: no sequence in this row"),
    ({"status": Status.PREFILLING}, "nothing emitted: still reading its"),
    ({"needs_pages": True}, "lacks pages: nothing was done"),
    ({"finite": False}, "logits that are not finite"),
  ],
)
def test_row_that_emits_nothing(more, note):
  view = ldjax.show_round(_round([], [], **more), 1)
  assert view.path == () and view.bonus is None
  lines = str(view).splitlines()
  assert lines[:4] == ["⟨root⟩", "├── 5", "│ └── 7", "└── 6"]
  assert lines[4].startswith(note)
  assert note in view._repr_svg_()


def test_walk_that_meets_logits_that_are_not_finite():
  assert _lines(_round([5], [0], finite=False))[-3:] == [
    "1 token in one pass",
    "logits that are not finite",
    "1 node without a token not shown",
  ]


def test_rows_and_stacks_are_told_apart():
  one = _round([9], [0])
  with pytest.raises(ValueError, match="row is 2; this round has 2 rows"):
    ldjax.show_round(one, 2)
  with pytest.raises(ValueError, match="row is -1"):
    ldjax.show_round(one, -1)
  one.count = one.count[None]
  with pytest.raises(ValueError, match=r"jax.tree.map\(lambda x: x\[i\]"):
    ldjax.show_round(one)


@pytest.mark.slow
def test_rounds_of_a_decoder():
  """What is drawn agrees with the text that the rounds made."""
  tiny = ldjax.testing.tiny_model()
  draft = ldjax.testing.random_tree_draft(11, 3, 5)
  decoder = decoding.speculative(
    tiny.target, draft, tiny.init_cache, max_len=tiny.max_len
  )
  params = decoding.DecoderParams(tiny.params)
  state = jax.jit(decoder.init)(
    params,
    jnp.array([[1, 2, 3], [4, 5, 0]]),
    jnp.array([3, 2]),
    sampling=sampling.make_sampling(2),
    max_new_tokens=jnp.array([16, 5]),
  )
  begin = state.length.tolist()
  text = state.tokens.tolist()
  _, first = jax.jit(decoder.step)(params, state)
  state, rounds = jax.jit(
    lambda params, state: decoding.trace(decoder, params, state, 16)
  )(params, state)
  assert str(ldjax.show_round(first, 1)) == str(
    ldjax.show_round(jax.tree.map(lambda x: x[0], rounds), 1)
  )
  whole = state.tokens.tolist()
  for row in range(2):
    text = whole[row][: begin[row]]
    for i in range(16):
      one = jax.tree.map(lambda x, i=i: x[i], rounds)
      view = ldjax.show_round(one, row, root=text[-1])
      view._repr_svg_()
      if not view.path:
        assert "nothing emitted: had ended by its limit" in str(view)
        continue
      walked = [view.labels[node] for node in view.path]
      assert walked[0] == str(text[-1])
      text += [int(label) for label in [*walked[1:], view.bonus]]
    assert text == whole[row][: int(state.length[row])]


def test_it_takes_the_fields_of_a_round():
  fields = {field.name for field in dataclasses.fields(decoding.Round)}
  assert set(vars(_round([9], [0]))) <= fields
