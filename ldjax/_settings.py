"""What to generate: settings of one request, checked when they are made."""

import dataclasses
import difflib
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ldjax import decoding, typing
from ldjax import sampling as sampling_lib

_Function = TypeVar("_Function", bound=Callable[..., Any])

# The settings of the draw, by the names under which it takes them; the key is
# made of the seed.
_SAMPLING = tuple(
  "seed" if field.name == "key" else field.name
  for field in dataclasses.fields(sampling_lib.Sampling)
)
_SEVERAL = ("banned_ids", "stop", "stop_ids")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """How one prompt is answered.

  Args:
    max_new_tokens: tokens to emit at most; the end of the cache
      (`model.max_len`) ends a text too.
    min_new_tokens: tokens to emit before a stop id can be drawn or a stop
      string counts.
    temperature: 0 or None is greedy.
    top_k: how many of the most likely tokens may be drawn; 0 or None: all.
    top_p: the share of probability to draw from; 1 or None: all.
    min_p: how likely a token must be, as a share of the likeliest one's
      probability; 0 or None: any.
    repetition_penalty: divides (or, below 0, multiplies) the logits of tokens
      of the prompt or the text so far; 1 or None: none.
    presence_penalty: comes off the logits of tokens emitted so far.
    frequency_penalty: comes off once for each time they were emitted.
    banned_ids: token ids that are never drawn.
    stop: a string or several that end the text and are not part of it.
    stop_ids: token ids that end it, besides the model's own; the one that
      did is the last of `Generation.tokens`.
    logprobs: whether `Generation.logprobs` is wanted: by the target's own
      logits, before penalties, temperature and cuts.
    num_samples: how many texts to draw for the prompt; with more than one, a
      list is what comes back.
    seed: an integer or `jax.random.key`; the same for a prompt in whatever
      batch and row it stands.
    chat: whether to put text into the chat template; None for "if there is
      one".

  Raises:
    ValueError: for a value out of range, naming it and its limits.

  Example:
    >>> creative = Settings(temperature=0.8, top_p=0.95, max_new_tokens=200)
    >>> dataclasses.replace(creative, seed=7).seed
    7
  """

  max_new_tokens: int = 128
  min_new_tokens: int = 0
  temperature: float | None = None
  top_k: int | None = None
  top_p: float | None = None
  min_p: float | None = None
  repetition_penalty: float | None = None
  presence_penalty: float | None = None
  frequency_penalty: float | None = None
  banned_ids: Sequence[int] = ()
  stop: str | Sequence[str] = ()
  stop_ids: Sequence[int] = ()
  logprobs: bool = False
  num_samples: int = 1
  seed: int | typing.Array = 0
  chat: bool | None = None

  def __post_init__(self):
    for name in _SEVERAL:
      value = getattr(self, name)
      value = () if value is None else value
      value = (value,) if isinstance(value, str) else tuple(value)
      object.__setattr__(self, name, value)
    for name, least in (("max_new_tokens", 0), ("num_samples", 1)):
      value = operator.index(getattr(self, name))
      if value < least:
        raise ValueError(f"{name} is {value}; it must be at least {least}")
      object.__setattr__(self, name, value)
    self.sampling()
    if self.min_new_tokens > self.max_new_tokens:
      raise ValueError(
        f"min_new_tokens is {self.min_new_tokens}, more than max_new_tokens,"
        f" {self.max_new_tokens}"
      )
    for each in self.stop:
      if not isinstance(each, str) or not each:
        raise ValueError(
          f"stop holds {each!r}; it must be a string of at least one character,"
          " or several of them"
        )
    decoding.stop_ids_row(self.stop_ids)

  def sampling(self, sample: int = 0) -> sampling_lib.Sampling:
    """The settings of the draw, as arrays of one row on the host.

    Args:
      sample: the index among the prompt's samples.
    """
    return sampling_lib.host_sampling(
      1, sample=sample, **{name: getattr(self, name) for name in _SAMPLING}
    )


_FIELDS = {field.name: field for field in dataclasses.fields(Settings)}


def _checked_names(changes: dict[str, Any]) -> None:
  for name in changes:
    if name not in _FIELDS:
      close = difflib.get_close_matches(name, _FIELDS, 1)
      guess = f"did you mean {close[0]}? There" if close else "there"
      raise TypeError(
        f"no setting is called {name!r}; {guess} are {', '.join(_FIELDS)}"
      )


def _checked_settings(settings: Any) -> Settings:
  if settings is None:
    return Settings()
  if not isinstance(settings, Settings):
    raise TypeError(
      f"settings is {settings!r}; give ldjax.Settings(...), or the settings by"
      " name (temperature=0.8, ...)"
    )
  return settings


def settle(settings: Settings | None, changes: dict[str, Any]) -> Settings:
  """Settings with some of them changed.

  Args:
    settings: where to begin; None for the defaults.
    changes: names and values.

  Raises:
    TypeError: for a name that no setting has.
    ValueError: for a value out of range.
  """
  _checked_names(changes)
  return dataclasses.replace(_checked_settings(settings), **changes)


def settle_each(
  settings: Settings | Sequence[Settings] | None,
  changes: dict[str, Any],
  count: int,
) -> list[Settings]:
  """The settings of each of several prompts.

  Args:
    settings: one for all, or one a prompt.
    changes: names and values; a list (of a setting that is not one itself)
      holds one value a prompt.
    count: how many prompts there are.

  Raises:
    TypeError: for a name that no setting has.
    ValueError: for a list of another length, or a value out of range.
  """
  _checked_names(changes)
  if not isinstance(settings, list | tuple):
    each = [_checked_settings(settings)] * count
  else:
    each = [_checked_settings(one) for one in settings]
    if len(each) != count:
      raise ValueError(
        f"settings has {len(each)} entries for {count} prompts; give one for"
        " all or one for each"
      )
  spread: dict[str, list[Any]] = {}
  for name, value in changes.items():
    # A key of `jax.random.key` has no dimension.
    if name in _SEVERAL or isinstance(value, str) or not _is_list(value):
      spread[name] = [value] * count
      continue
    values = list(value)
    if len(values) != count:
      raise ValueError(
        f"{name} has {len(values)} entries for {count} prompts; give one value"
        " for all or one for each"
      )
    spread[name] = values
  if not changes:
    return each
  return [
    dataclasses.replace(one, **{name: spread[name][row] for name in spread})
    for row, one in enumerate(each)
  ]


def _is_list(value: Any) -> bool:
  if hasattr(value, "ndim"):
    return value.ndim > 0
  return isinstance(value, Sequence)


def takes_settings(function: _Function) -> _Function:
  """Shows the settings in the signature of a function with `**changes`.

  So that `help`, notebooks and editors list them, from their one definition.

  Args:
    function: whose last parameter is `**changes`.
  """
  signature = inspect.signature(function)
  *parameters, last = signature.parameters.values()
  assert last.kind is inspect.Parameter.VAR_KEYWORD
  parameters += [
    inspect.Parameter(
      name,
      inspect.Parameter.KEYWORD_ONLY,
      default=field.default,
      annotation=field.type,
    )
    for name, field in _FIELDS.items()
  ]
  function.__signature__ = signature.replace(  # type: ignore[attr-defined]
    parameters=parameters
  )
  return function
