"""Text of tokens made fit to be seen: nothing invisible, nothing that acts."""

import unicodedata

# Joiners shape the letters and emoji around them, and belong to the text.
_JOINERS = ("\u200c", "\u200d")
_MARKS = {" ": "␣", "\n": "↵", "\t": "⇥"}


def _acts(char: str) -> bool:
  """Whether a character is invisible, steers the reader, or breaks XML."""
  if char in _JOINERS:
    return False
  # Controls, formats (bidi overrides among them), surrogates, noncharacters,
  # line and paragraph separators, and spaces that look like the usual one.
  kind = unicodedata.category(char)
  nameless = kind == "Cn" and (ord(char) & 0xFFFE == 0xFFFE)
  return kind in ("Cc", "Cf", "Cs", "Zl", "Zp", "Zs") or nameless


def harmless(text: str, keep: str = " \n\t") -> str:
  """Writes characters that act or cannot be seen as ⟨U+001B⟩.

  Args:
    text: any str, lone surrogates included.
    keep: characters to leave as they are.
  """
  return "".join(
    f"⟨U+{ord(char):04X}⟩" if char not in keep and _acts(char) else char
    for char in text
  )


def label(text: str, columns: int) -> str:
  """Makes one line of a token's text, spaces and line ends marked.

  Args:
    text: of a token.
    columns: the most that the result is wide; more is cut.

  Returns:
    At least one visible character.
  """
  if text[:1] in _JOINERS or unicodedata.category(text[:1] or " ")[0] == "M":
    text = "◌" + text  # what a combining mark stands on when it is alone
  text = harmless("".join(_MARKS.get(char, char) for char in text), keep="")
  return cut(text or "∅", columns)


def width(text: str) -> int:
  """Columns that a text takes in a fixed-width font."""
  return sum(
    0
    if unicodedata.category(char) in ("Mn", "Me", "Cf")
    else 2
    if unicodedata.east_asian_width(char) in "WF"
    else 1
    for char in text
  )


def cut(text: str, columns: int) -> str:
  """Shortens a text to a width, with an ellipsis where something is gone."""
  if width(text) <= columns:
    return text
  end = 0
  while width(text[: end + 1]) < columns:
    end += 1
  return text[:end].rstrip("".join(_JOINERS)) + "…"
