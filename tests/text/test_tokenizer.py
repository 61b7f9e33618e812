"""One BOS, chat templates in their sandbox, and the files of a folder."""

import datetime
import json

import pytest
import tokenizers
from tokenizers import processors

from ldjax import text

_TEMPLATE = (
  "{{ bos_token }}{% for message in messages %}\n"
  "  {% if message.role == 'system' and not loop.first %}\n"
  "    {{ raise_exception('system comes first') }}\n"
  "  {% endif %}\n"
  "[{{ message['role'] }}] {{ message['content'] | trim }}{{ eos_token }}\n"
  "{% endfor %}\n"
  "{% if add_generation_prompt %}[assistant]{% endif %}"
)
_MESSAGES = [{"role": "user", "content": " the cat "}]


def _folder(path, backend, config=None, mapped=None, template=None, bos=False):
  backend = tokenizers.Tokenizer.from_str(backend.to_str())
  if bos:
    backend.post_processor = processors.TemplateProcessing(
      single="<s> $A", special_tokens=[("<s>", 0)]
    )
  path.mkdir(exist_ok=True)
  backend.save(str(path / "tokenizer.json"))
  if config is not None:
    (path / "tokenizer_config.json").write_text(json.dumps(config))
  if mapped is not None:
    (path / "special_tokens_map.json").write_text(json.dumps(mapped))
  if template is not None:
    (path / "chat_template.jinja").write_text(template)
  return text.load_tokenizer(path)


_TOKENS = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}


@pytest.mark.parametrize(
  ("said", "processor", "adds"),
  [
    (None, False, False),
    (None, True, True),
    (True, False, True),
    (True, True, True),
    (False, True, False),
    (False, False, False),
  ],
)
def test_exactly_one_bos(tmp_path, byte_level, said, processor, adds):
  config = dict(_TOKENS)
  if said is not None:
    config["add_bos_token"] = said
  ours = _folder(
    tmp_path, byte_level, config, template=_TEMPLATE, bos=processor
  )
  assert (ours.bos_token_id, ours.eos_token_ids) == (0, (1,))
  raw = ours.encode("the cat")
  assert raw.count(0) == (1 if adds else 0)
  assert ours.encode("the cat", add_bos=False).count(0) == 0
  templated = ours.encode(ours.chat(_MESSAGES))
  assert templated[0] == 0 and templated.count(0) == 1
  assert templated.count(1) == 1
  assert ours.encode("").count(0) == (1 if adds else 0)


def test_bos_without_one(tmp_path, byte_level):
  with pytest.raises(ValueError, match="add a BOS token and has none"):
    _folder(tmp_path, byte_level, {"add_bos_token": True})
  config = {"eos_token": "</s>", "bos_token": None}
  assert _folder(tmp_path, byte_level, config).bos_token_id is None


def test_special_tokens_map(tmp_path, byte_level):
  ours = _folder(tmp_path, byte_level, {}, mapped=_TOKENS)
  assert (ours.bos_token_id, ours.eos_token_ids) == (0, (1,))
  with pytest.raises(ValueError, match="eos_token is '<end>'"):
    _folder(tmp_path, byte_level, {"eos_token": "<end>"})


def test_template_is_rendered(tmp_path, byte_level):
  ours = _folder(tmp_path, byte_level, {**_TOKENS, "chat_template": _TEMPLATE})
  assert ours.has_chat_template
  assert ours.chat(_MESSAGES) == "<s>[user] the cat</s>\n[assistant]"
  assert ours.chat(_MESSAGES, False) == "<s>[user] the cat</s>\n"


@pytest.mark.parametrize(
  ("value", "wanted"),
  [
    ([{"name": "default", "template": "one"}], "one"),
    (
      [
        {"name": "tools", "template": "two"},
        {"name": "default", "template": "one"},
      ],
      "one",
    ),
    ("ignored when a file is there", "file"),
  ],
)
def test_where_templates_stand(tmp_path, byte_level, value, wanted):
  template = "file" if wanted == "file" else None
  config = {"chat_template": value}
  ours = _folder(tmp_path, byte_level, config, template=template)
  assert ours.chat([]) == wanted


def test_no_template_says_so(tmp_path, byte_level):
  ours = _folder(tmp_path, byte_level, _TOKENS)
  assert not ours.has_chat_template
  with pytest.raises(ValueError, match=r"has no chat template.*base model"):
    ours.chat(_MESSAGES)
  config = {"chat_template": [{"name": "rag", "template": "x"}]}
  with pytest.raises(ValueError, match=r"\(rag\) and none is named 'default'"):
    _folder(tmp_path, byte_level, config)


@pytest.mark.parametrize(
  ("template", "wanted"),
  [
    ("{{ strftime_now('%Y') }}", str(datetime.date.today().year)),
    ("{{ {'b': '<ü>', 'a': 1} | tojson }}", '{"b": "<ü>", "a": 1}'),
    ("{% for i in [1, 2] %}{{ i }}{% break %}{% endfor %}", "1"),
    ("a{% generation %}b{% endgeneration %}c", "abc"),
    ("{% if tools is not none %}x{% endif %}y", "y"),
    ("  {% set x = 1 %}\n  z", "  z"),  # trim_blocks and lstrip_blocks
  ],
)
def test_what_templates_expect(byte_level, template, wanted):
  assert text.Tokenizer(byte_level, chat_template=template).chat([]) == wanted


@pytest.mark.parametrize(
  "template",
  [
    "{{ messages.append(1) }}",
    "{{ ().__class__.__bases__[0].__subclasses__() }}",
    "{{ strftime_now.__globals__['datetime'] }}",
    "{% include '/etc/passwd' %}",
    "{{ raise_exception('no') }}",
    "{{ messages[3].role }}",
  ],
)
def test_sandbox_and_refusals(byte_level, template):
  ours = text.Tokenizer(byte_level, chat_template=template)
  with pytest.raises(ValueError, match="template refuses"):
    ours.chat([])


def test_faulty_templates_and_messages(byte_level):
  ours = text.Tokenizer(byte_level, chat_template="{% if %}")
  with pytest.raises(ValueError, match="not valid: line 1"):
    ours.chat(_MESSAGES)
  ours = text.Tokenizer(byte_level, chat_template=_TEMPLATE)
  with pytest.raises(ValueError, match="system comes first"):
    ours.chat([*_MESSAGES, {"role": "system", "content": "late"}])
  with pytest.raises(ValueError, match="message 0 is 'hello'"):
    ours.chat(["hello"])


def test_training_settings_do_not_reach_prompts(tmp_path, byte_level):
  backend = tokenizers.Tokenizer.from_str(byte_level.to_str())
  backend.enable_truncation(3)
  backend.enable_padding(length=50)
  ours = _folder(tmp_path, backend)
  sample = "the cat sat on the mat"
  assert ours.decode(ours.encode(sample)) == sample
  assert len(ours.encode("the")) < 5


def test_decode_edges(byte_level):
  ours = text.Tokenizer(byte_level)
  assert ours.decode([]) == ""
  assert ours.decode([0, *ours.encode("the"), 1]) == "the"
  assert ours.decode([10**6]) == ""  # a padded vocabulary
  with pytest.raises(ValueError, match="-1 is negative"):
    ours.decode([5, -1])


def test_missing_and_damaged_files(tmp_path):
  with pytest.raises(FileNotFoundError, match="no such file or folder"):
    text.load_tokenizer(tmp_path / "absent")
  with pytest.raises(FileNotFoundError, match=r"tokenizer\.json: missing"):
    text.load_tokenizer(tmp_path)
  (tmp_path / "tokenizer.model").touch()
  with pytest.raises(FileNotFoundError, match=r"tokenizer\.model: convert"):
    text.load_tokenizer(tmp_path)
  (tmp_path / "tokenizer.json").write_text("{}")
  with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer"):
    text.load_tokenizer(tmp_path)


def test_damaged_settings(tmp_path, byte_level):
  byte_level.save(str(tmp_path / "tokenizer.json"))
  (tmp_path / "tokenizer_config.json").write_text("{")
  with pytest.raises(ValueError, match=r"tokenizer_config\.json: not readable"):
    text.load_tokenizer(tmp_path)
