"""What a compiled TPU program moves to and from memory, read off its text.

`Compiled.cost_analysis` counts what lies in fast memory like the rest, and a
matrix that an asynchronous copy fetched a second time where it is used. Here an
operand or result counts where its layout says that it lies in the device's
memory (no `S(1)`); a gather counts the rows that it fetches, an update in place
the rows that it writes. A loop's body counts once. Of a conditional's branches
the costliest counts among those without an array of all logits.
"""

import math
import re
from typing import NamedTuple

_SIZES = {"bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "pred": 1}
_SIZES |= {"s8": 1, "u8": 1, "s16": 2, "u16": 2, "f8e4m3fn": 1}
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")
_NAME = re.compile(r"%[\w.\-]+")
_FREE = {"parameter", "tuple", "get-tuple-element", "bitcast", "constant"}
_FREE |= {"iota", "after-all", "partition-id", "opt-barrier"}


class _Operation(NamedTuple):
  name: str
  result: str
  """Its shapes, as text."""
  kind: str
  operands: tuple[str, ...]
  operands_text: str
  """Of a parameter, its number."""
  rest: str
  """Attributes, as text."""


class _Leaf(NamedTuple):
  bytes: int
  fast: bool
  """Whether it lies in fast memory."""


def _leaves(shapes: str) -> list[_Leaf]:
  found = []
  for kind, dims, layout in _ARRAY.findall(shapes):
    if kind in _SIZES:
      size = math.prod(int(n) for n in dims.split(",") if n)
      found.append(_Leaf(size * _SIZES[kind], "S(1)" in layout))
  return found


def _slow(shapes: str) -> int:
  return sum(leaf.bytes for leaf in _leaves(shapes) if not leaf.fast)


def _all(shapes: str) -> int:
  return sum(leaf.bytes for leaf in _leaves(shapes))


def _closing(text: str) -> int:
  """Where the bracket closes that `text` begins with."""
  depth = 0
  for i, c in enumerate(text):
    depth += (c == "(") - (c == ")")
    if not depth:
      return i
  raise ValueError(f"no closing bracket in {text[:80]!r}")


def _operation(name: str, text: str) -> _Operation:
  end = _closing(text) + 1 if text.startswith("(") else text.index(" ")
  result, text = text[:end], text[end:].lstrip()
  kind, begin = text.split("(", 1)[0], text.index("(")
  text = text[begin:]
  end = _closing(text)
  operands = tuple(_NAME.findall(text[:end]))
  return _Operation(name, result, kind, operands, text[1:end], text[end:])


def computations(text: str) -> tuple[dict[str, list[_Operation]], str]:
  """A program's computations by name, and which one is the first."""
  found: dict[str, list[_Operation]] = {}
  here: list[_Operation] = []
  entry = ""
  for line in text.split("\n"):
    if head := re.match(r"(ENTRY )?(%[\w.\-]+) \(.*\{$", line):
      here = found[head[2]] = []
      entry = head[2] if head[1] else entry
    elif body := re.match(r"\s+(?:ROOT )?(%[\w.\-]+) = (.*)$", line):
      here.append(_operation(body[1], body[2]))
  return found, entry


_MOST_ROWS = 32
_LOOK_UPS = ("gather", "dynamic-slice")
_UPDATES = ("scatter", "dynamic-update-slice")


class Traffic:
  """A program, and what of it moves.

  Args:
    text: of `Compiled.as_text`.
    vocab: V; an array [..., V] of float32 for more rows than the batch may
      have, 32, is one of all logits.
  """

  def __init__(self, text: str, vocab: int):
    self.found, self.entry = computations(text)
    self.vocab = vocab

  def _holds(self, shapes: str) -> bool:
    return any(
      math.prod(map(int, rows.strip(",").split(","))) > _MOST_ROWS
      for rows in re.findall(rf"f32\[((?:\d+,)+){self.vocab}\]", shapes)
    )

  def _inner(self, operation: _Operation, key: str) -> list[str]:
    """Computations that an attribute names."""
    listed = re.search(rf"\b{key}=(\{{[^}}]*\}}|%[\w.\-]+)", operation.rest)
    return _NAME.findall(listed[1]) if listed else []

  def _branches(self, operation: _Operation) -> list[str]:
    return self._inner(operation, "branch_computations") or [
      *self._inner(operation, "true_computation"),
      *self._inner(operation, "false_computation"),
    ]

  def may_hold_logits(self, name: str | None = None) -> bool:
    """Whether an array of all logits is in a computation, or in one below."""
    return any(
      self._holds(each.result)
      or any(
        self.may_hold_logits(inner)
        for key in ("body", "calls", "to_apply")
        for inner in self._inner(each, key)
      )
      or any(map(self.may_hold_logits, self._branches(each)))
      for each in self.found[name or self.entry]
    )

  def must_hold_logits(self, name: str | None = None) -> bool:
    """The same, whichever branches of conditionals are taken."""
    return any(
      self._holds(each.result)
      or any(
        self.must_hold_logits(inner)
        for key in ("body", "calls", "to_apply")
        for inner in self._inner(each, key)
      )
      or (
        each.kind == "conditional"
        and all(map(self.must_hold_logits, self._branches(each)))
      )
      for each in self.found[name or self.entry]
    )

  def moved(self, name: str | None = None) -> int:
    """Bytes from and to memory, of a computation and those below."""
    here = self.found[name or self.entry]
    shapes = {each.name: each.result for each in here}
    return sum(self._moved_by(each, shapes) for each in here)

  def _moved_by(self, operation: _Operation, shapes: dict[str, str]) -> int:
    kind = operation.kind
    if kind == "conditional":
      branches = self._branches(operation)
      lean = [x for x in branches if not self.may_hold_logits(x)]
      return max(map(self.moved, lean or branches))
    if kind in ("while", "call"):
      key = "body" if kind == "while" else "to_apply"
      return sum(map(self.moved, self._inner(operation, key)))
    if kind in _FREE or kind.endswith("-done"):
      return 0
    if "ConcatBitcast" in operation.rest:
      return 0
    if kind in ("copy-start", "slice-start"):
      one, other = _leaves(operation.result)[:2]
      size = min(one.bytes, other.bytes)
      return size * ((not one.fast) + (not other.fast))
    if kind == "fusion":
      return self._fusion(operation, shapes)
    read = sum(_slow(shapes[x]) for x in set(operation.operands))
    return read + _slow(operation.result)

  def _fusion(self, operation: _Operation, shapes: dict[str, str]) -> int:
    (name,) = self._inner(operation, "calls")
    inside = self.found[name]
    results = {each.name: each.result for each in inside}
    total, in_place = 0, False
    for each in inside:
      if each.kind != "parameter":
        continue
      number = int(each.operands_text)
      shape = shapes[operation.operands[number]]
      if not _slow(shape):
        continue
      uses = [x for x in inside if each.name in x.operands]
      kinds = {x.kind if x.operands[0] == each.name else "" for x in uses}
      if uses and kinds <= set(_LOOK_UPS):
        total += sum(_all(x.result) for x in uses)
      elif uses and kinds <= set(_UPDATES):
        in_place = True
        for x in uses:
          place = 2 if x.kind == "scatter" else 1
          total += 2 * _all(results[x.operands[place]])
      else:
        total += _slow(shape)
    return total if in_place else total + _slow(operation.result)
