"""A tokenizer that was written is the one that was read."""

import pytest
import tokenizers
from tokenizers import models

from ldjax import text

_TEXTS = ["the cat </s> sat", "", "<s>für 数独 🙂\n\n x", "<s><s>a"]


def _check(one, two):
  for sample in _TEXTS:
    ids = one.encode(sample)
    assert two.encode(sample) == ids
    assert two.decode(ids) == one.decode(ids)
  assert two.bos_token_id == one.bos_token_id
  assert two.eos_token_ids == one.eos_token_ids[:1]
  assert two.has_chat_template == one.has_chat_template
  if one.has_chat_template:
    messages = [{"role": "user", "content": "the cat"}]
    assert two.chat(messages) == one.chat(messages)


_TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("template", [None, _TEMPLATE])
def test_save_then_load(tmp_path, byte_level, add_bos, template):
  one = text.Tokenizer(
    byte_level,
    add_bos=add_bos,
    bos_token_id=0,
    eos_token_ids=(1,),
    chat_template=template,
    special={"bos_token": "<s>", "eos_token": "</s>"},
  )
  text.save_tokenizer(one, tmp_path)
  _check(one, text.load_tokenizer(tmp_path))


@pytest.mark.slow
def test_the_demo_models(tmp_path, demo_model):
  one = text.load_tokenizer(demo_model)
  text.save_tokenizer(one, tmp_path)
  _check(one, text.load_tokenizer(tmp_path))


def test_no_folder(tmp_path):
  one = text.Tokenizer(tokenizers.Tokenizer(models.WordLevel({"a": 0}, "a")))
  with pytest.raises(FileNotFoundError, match="no such folder"):
    text.save_tokenizer(one, tmp_path / "absent")
  text.save_tokenizer(one, tmp_path)
  two = text.load_tokenizer(tmp_path)
  assert (two.bos_token_id, two.eos_token_ids) == (None, ())
