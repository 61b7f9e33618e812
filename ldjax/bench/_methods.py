"""The methods of decoding that can be compared, by name."""

import os
import pathlib
from collections.abc import Callable, Sequence
from typing import TypeAlias

from ldjax import (
  _drafts,
  _generate,
  _generation,
  _load,
  _request,
  _settings,
  assemble,
  contrib,
)
from ldjax.bench import _transformers

BASELINE = "autoregressive"
"""The method that all others are compared with: plain decoding."""

Method: TypeAlias = assemble.LanguageModel | _transformers.TransformersModel
"""What can be compared: a model with its draft, or another program."""

_Make: TypeAlias = Callable[
  [assemble.LanguageModel, str, str, assemble.Progress | None], Method
]


def _medusa_heads(model: assemble.LanguageModel, folder: str) -> str:
  return folder or str(_drafts.medusa_heads_of(model.name))


def _plain(model, folder, path, progress):
  del folder, path, progress
  return assemble.with_draft(model, "none")


def _ngram(model, folder, path, progress):
  del folder, path, progress
  return assemble.with_draft(model, "ngram")


def _ldjax(model, folder, path, progress):
  del path, progress
  if not folder:
    return model
  heads = "" if folder == "medusa" else folder
  return assemble.with_draft(model, _medusa_heads(model, heads))


def _planned(model, file, path, progress):
  if not file:
    raise ValueError("method plan needs a file: plan:plan.json")
  # Its weights have other forms; they are read again.
  return _load.load(path or model.name, plan=file, progress=progress)


def _medusa2(model, folder, path, progress):
  del path, progress
  return contrib.as_medusa2(model, _medusa_heads(model, folder))


def _medusa2_tuned(model, folder, path, progress):
  del path
  heads = _medusa_heads(model, folder)
  return contrib.as_tuned_medusa2(model, heads, progress=progress)


def _transformers_plain(model, folder, path, progress):
  del progress
  return _transformers.load(model, folder or path)


def _transformers_lookup(model, folder, path, progress):
  del progress
  return _transformers.load(model, folder or path, lookup=True)


# By name, what makes it; those that take `NAME:ARGUMENT` say what that is.
_METHODS: dict[str, tuple[_Make, str]] = {
  BASELINE: (_plain, ""),
  "ngram": (_ngram, ""),
  "ldjax": (_ldjax, "medusa or FOLDER"),
  "plan": (_planned, "FILE"),
  "medusa2": (_medusa2, "FOLDER"),
  "medusa2-tuned": (_medusa2_tuned, "FOLDER"),
  "transformers": (_transformers_plain, "FOLDER"),
  "transformers-lookup": (_transformers_lookup, "FOLDER"),
}


def make_methods(
  model: assemble.LanguageModel,
  names: Sequence[str],
  *,
  path: str | os.PathLike[str] = "",
  progress: assemble.Progress | None = None,
) -> dict[str, Method]:
  """Puts a decoder for each method around one set of weights.

  Args:
    model: as `generate` would use it; that is the method `ldjax`.
    names: of methods, or folders with draft heads (called by the folder's
      name):

      - `autoregressive`, `ngram`, `ldjax`;
      - `medusa2` (see `contrib.as_medusa2`) with the heads that come with ldjax
        for the model, or `medusa2:FOLDER` with others;
      - `medusa2-tuned`, or `medusa2-tuned:FOLDER`: the same with the tree that
        is fastest here (see `contrib.as_tuned_medusa2`);
      - `ldjax:medusa`: ldjax with the heads of `medusa2`, or `ldjax:FOLDER`
        with those of a folder;
      - `plan:FILE`: the model as `ldjax optimize` planned it;
      - `transformers` and `transformers-lookup`, or with `:FOLDER`: Hugging
        Face transformers, plain and with its prompt lookup, on the weights of a
        Hugging Face folder; for these alone the weights are read again.
    path: where the model came from, for `transformers` and plans.
    progress: called with a line of text before each compilation.

  Raises:
    ImportError: for `transformers` where that or torch is not installed.
    ValueError: for an unknown name, with the known ones, or one given twice.
  """
  methods: dict[str, Method] = {}
  for name in names:
    kind, _, argument = name.partition(":")
    make, takes = _METHODS.get(kind, (None, ""))
    if make is not None and (takes or not argument):
      # The heads may be others, the method is the same one.
      label = name if kind == "ldjax" else kind
      method = make(model, argument, os.fspath(path), progress)
    elif pathlib.Path(name).is_dir():
      label = pathlib.Path(name).name
      method = assemble.with_draft(model, name)
    else:
      known = ", ".join(
        f"{each}[:{says}]" if says else each
        for each, (_, says) in _METHODS.items()
      )
      raise ValueError(
        f"no method is called {name!r}; there are {known}, or the folder of a"
        " draft"
      )
    if label in methods:
      raise ValueError(f"method {label} is there twice")
    methods[label] = method
  return methods


def generate(
  method: Method,
  prompts: Sequence[_request.Prompt],
  settings: _settings.Settings,
  batch_size: int,
) -> list[_generation.Generation]:
  """Decodes prompts together with any method.

  Args:
    method: from `make_methods`.
    prompts: texts or token ids.
    settings: for all of them.
    batch_size: B.
  """
  if isinstance(method, _transformers.TransformersModel):
    return method.generate(prompts, settings)
  return _generate.generate(
    method, list(prompts), settings, batch_size=batch_size
  )
