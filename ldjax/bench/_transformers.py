"""Hugging Face transformers as a method of decoding, to be compared with."""

import dataclasses
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from ldjax import _generation, _request, _settings, assemble

_LOOKUP = 10
"""Tokens that transformers' documentation has prompt lookup propose."""


class _Clock:
  """Notes when tokens come, and how many together; a `streamer`."""

  def __init__(self):
    self.times: list[float] = []
    self.counts: list[int] = []
    self._saw_prompt = False

  def put(self, value: Any) -> None:
    if self._saw_prompt:
      self.times.append(time.perf_counter())
      self.counts.append(int(value.numel()))
    self._saw_prompt = True

  def end(self) -> None:
    """Nothing is buffered."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TransformersModel:
  """A causal language model of transformers, in float32 on the CPU."""

  model: assemble.LanguageModel
  """The same model in ldjax: its tokenizer, limits and stop ids are used."""
  network: Any
  """Of `transformers.AutoModelForCausalLM`."""
  lookup: bool
  """Whether it drafts by prompt lookup."""

  @property
  def name(self) -> str:
    """The model's."""
    return self.model.name

  @property
  def draft_name(self) -> str:
    """What it drafts with."""
    return f"prompt lookup of {_LOOKUP} tokens" if self.lookup else "none"

  def generate(
    self,
    prompts: Sequence[_request.Prompt],
    settings: _settings.Settings,
  ) -> list[_generation.Generation]:
    """Decodes greedily, one prompt after another.

    Args:
      prompts: texts or token ids.
      settings: of which `max_new_tokens`, `chat` and `stop_ids` may be set.

    Returns:
      As `ldjax.generate` does.

    Raises:
      ValueError: for other settings, under which the texts would differ.
    """
    greedy = _settings.Settings(
      max_new_tokens=settings.max_new_tokens,
      chat=settings.chat,
      stop_ids=settings.stop_ids,
    )
    if dataclasses.replace(settings, temperature=None, seed=0) != greedy or (
      settings.temperature
    ):
      raise ValueError(
        "transformers is compared in greedy decoding alone; leave out"
        " temperature, cuts and penalties, or the method"
      )
    return [self._one(prompt, settings) for prompt in prompts]

  def _one(
    self, prompt: _request.Prompt, settings: _settings.Settings
  ) -> _generation.Generation:
    import torch

    [request] = _request.make_requests(self.model, prompt, settings)
    stops = [*self.model.eos_token_ids, *settings.stop_ids]
    options = {"prompt_lookup_num_tokens": _LOOKUP} if self.lookup else {}
    clock = _Clock()
    ids = torch.tensor([request.tokens])
    began = time.perf_counter()
    with torch.inference_mode():
      made = self.network.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=request.max_new_tokens,
        do_sample=False,
        eos_token_id=stops or None,
        pad_token_id=stops[0] if stops else 0,
        streamer=clock,
        return_dict_in_generate=True,
        **options,
      )
    tokens = made.sequences[0, request.prompt_length :].tolist()
    cache = made.get("cache") or made.get("past_key_values")
    held = sum(
      part.nbytes
      for layer in cache.layers
      for part in (layer.keys, layer.values)
    )
    after = clock.times[-1] - clock.times[0]
    text = self.model.tokenizer.decode(tokens)
    return _generation.Generation(
      text=text,
      tokens=tuple(tokens),
      pieces=(text, *[""] * (len(tokens) - 1)),
      round_tokens=tuple(clock.counts),
      logprobs=None,
      prompt_tokens=request.prompt_length,
      finish_reason="stop" if tokens[-1] in stops else "length",
      tokens_per_second=(len(tokens) - 1) / after if after else 0.0,
      time_to_first_token_s=clock.times[0] - began,
      waited_s=0.0,
      peak_cache_bytes=held,
    )


def load(
  model: assemble.LanguageModel, folder: str, *, lookup: bool = False
) -> TransformersModel:
  """Reads a Hugging Face folder with transformers.

  Args:
    model: the same one in ldjax.
    folder: with config.json and safetensors.
    lookup: whether it is to draft by prompt lookup.

  Raises:
    ImportError: where transformers or torch is not installed.
    ValueError: for what is no Hugging Face folder.
  """
  if not (pathlib.Path(folder) / "config.json").is_file():
    raise ValueError(
      f"{folder or model.name!r} is no Hugging Face folder, which transformers"
      " needs; name one as transformers:FOLDER (ldjax convert --to hf writes"
      " them)"
    )
  try:
    import torch
    import transformers
  except ImportError as error:
    raise ImportError(
      f"the method transformers needs {error.name}, which is not installed:"
      " pip install 'ldjax[torch]'"
    ) from error
  network = transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32
  )
  return TransformersModel(model=model, network=network.eval(), lookup=lookup)
