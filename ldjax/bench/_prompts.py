"""Prompts from a file of JSON lines."""

import json
import os
import pathlib


def read_prompts(
  path: str | os.PathLike[str], limit: int | None = None
) -> list[str]:
  """Reads prompts, one JSON object a line.

  Args:
    path: each line has `prompt`, or `turns` (the first one is taken), or
      `text`.
    limit: how many to read at most.

  Raises:
    ValueError: naming the line that is not understood, or an empty file.

  Example:
    >>> import pathlib, tempfile
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "prompts.jsonl"
    >>> _ = file.write_text('{"prompt": "Hello"}\\n{"turns": ["Hi", "So?"]}\\n')
    >>> read_prompts(file)
    ['Hello', 'Hi']
  """
  prompts: list[str] = []
  # Not splitlines(): JSON lets U+2028 and its like stand in a string.
  lines = pathlib.Path(path).read_text("utf-8").split("\n")
  for number, line in enumerate(lines, start=1):
    if limit is not None and len(prompts) >= limit:
      break
    if not line.strip():
      continue
    try:
      entry = json.loads(line)
    except json.JSONDecodeError as error:
      raise ValueError(f"{path}:{number}: not JSON: {error}") from None
    found = None
    if isinstance(entry, dict):
      turns = entry.get("turns")
      first = turns[0] if isinstance(turns, list) and turns else None
      found = entry.get("prompt", first if first else entry.get("text"))
    if not isinstance(found, str) or not found:
      raise ValueError(
        f"{path}:{number}: has neither 'prompt' nor 'turns' nor 'text'"
      )
    prompts.append(found)
  if not prompts:
    raise ValueError(f"{path}: holds no prompts")
  return prompts
