"""Tokenizers out of GGUF files, against independent splits and merges."""

import itertools
import json

import hypothesis
import pytest
import tokenizers
from hypothesis import strategies
from tokenizers import pre_tokenizers

from ldjax import text

_NORMAL, _UNKNOWN, _CONTROL, _USER, _BYTE = 1, 2, 3, 4, 6


def _byte_level(write_gguf, backend, pre, **fields):
  state = json.loads(backend.to_str())
  vocabulary = sorted(state["model"]["vocab"].items(), key=lambda item: item[1])
  tokens = [token for token, _ in vocabulary]
  kinds = [
    _CONTROL if token in ("<s>", "</s>") else _NORMAL for token in tokens
  ]
  if pre is not None:
    fields["tokenizer_pre"] = pre
  return write_gguf(
    "gpt2",
    tokens,
    token_types=kinds,
    token_merges=[" ".join(pair) for pair in state["model"]["merges"]],
    bos_token_id=0,
    eos_token_id=1,
    **fields,
  )


_TEXTS = [
  "",
  " ",
  "the cat's 12345 mats, isn't it?  \n\n x\t y",
  "größer 数独 🙂👩‍👩‍👧 \r\n end ",
  "a<s>b</s>",
]


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(strategies.text(max_size=40))
def _same_ids(ours, theirs, sample):
  assert ours.encode(sample) == theirs.encode(sample).ids


def test_gpt2_equals_the_original(write_gguf, byte_level):
  path = _byte_level(write_gguf, byte_level, "gpt-2")
  ours = text.load_tokenizer(path)
  for sample in _TEXTS:
    ids = ours.encode(sample)
    assert ids == byte_level.encode(sample).ids
    assert ours.decode(ids) == sample.replace("<s>", "").replace("</s>", "")
  _same_ids(ours, byte_level)
  assert ours.vocab_size == byte_level.get_vocab_size()
  assert (ours.bos_token_id, ours.eos_token_ids) == (0, (1,))
  assert not ours.has_chat_template


def test_smollm_equals_the_original(write_gguf, byte_level):
  # The published tokenizer.json: digits one by one, then GPT-2's split.
  original = tokenizers.Tokenizer.from_str(byte_level.to_str())
  original.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Digits(individual_digits=True),
      pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
  )
  path = _byte_level(write_gguf, byte_level, "smollm")
  ours = text.load_tokenizer(path)
  for sample in [*_TEXTS, "½ ² ١٢ 12"]:
    assert ours.encode(sample) == original.encode(sample).ids
  _same_ids(ours, original)


@pytest.mark.parametrize(
  ("pre", "sample", "pieces"),
  [
    ("gpt-2", "It's 12345 a  b", ["It", "'s", " 12345", " a", " ", " b"]),
    ("smollm", "x 123", ["x", " ", "1", "2", "3"]),
    ("llama-bpe", "x 12345'LL", ["x", " ", "123", "45", "'LL"]),
    ("llama-bpe", "a!!\n\n  b", ["a", "!!\n\n", " ", " b"]),
    ("llama-bpe", "(word \n z", ["(word", " \n", " z"]),
    ("qwen2", "x 123'LL", ["x", " ", "1", "2", "3", "'LL"]),
    ("default", "Hi, 12345$x", ["Hi", ",", " ", "123", "45", "$", "x"]),
    (None, "Hi, 12345$x", ["Hi", ",", " ", "123", "45", "$", "x"]),
  ],
)
def test_splits_by_hand(write_gguf, byte_level, pre, sample, pieces):
  path = _byte_level(write_gguf, byte_level, pre)
  splitter = text.load_tokenizer(path).backend.pre_tokenizer
  spans = [span for _, span in splitter.pre_tokenize_str(sample)]
  assert [sample[start:end] for start, end in spans] == pieces


def test_qwen2_composes(write_gguf, byte_level):
  ours = text.load_tokenizer(_byte_level(write_gguf, byte_level, "qwen2"))
  assert ours.encode("gro\u0308ßer") == ours.encode("größer")


def test_llama3_takes_whole_words_first(write_gguf):
  tokens = ["a", "b", "c", "ab", "abc"]
  fields = {"token_types": [_NORMAL] * 5, "token_merges": ["a b"]}
  whole = write_gguf("gpt2", tokens, tokenizer_pre="llama-bpe", **fields)
  assert text.load_tokenizer(whole).encode("abc") == [4]
  merged = write_gguf("gpt2", tokens, tokenizer_pre="gpt-2", **fields)
  assert text.load_tokenizer(merged).encode("abc") == [3, 2]


@pytest.mark.parametrize(
  ("pre", "said", "adds"),
  [
    ("gpt-2", None, False),
    ("llama-bpe", None, True),
    ("llama-bpe", False, False),
    ("smollm", True, True),
  ],
)
def test_bos(write_gguf, byte_level, pre, said, adds):
  fields = {} if said is None else {"add_bos_token": said}
  ours = text.load_tokenizer(_byte_level(write_gguf, byte_level, pre, **fields))
  plain = ours.encode("the", add_bos=False)
  assert plain[0] != 0
  assert ours.encode("the") == ([0, *plain] if adds else plain)
  assert ours.encode("<s>the") == [0, *plain]


def test_unknown_kinds_are_refused_by_name(write_gguf, byte_level):
  path = _byte_level(write_gguf, byte_level, "tekken-9")
  with pytest.raises(ValueError, match=r"pre is 'tekken-9'.*smollm"):
    text.load_tokenizer(path)
  with pytest.raises(ValueError, match="model is 'bert'"):
    text.load_tokenizer(write_gguf("bert", ["a"]))


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({}, "ggml.merges is missing"),
    ({"token_merges": ["a z"]}, "'a z', whose parts"),
    ({"token_merges": ["a b"], "token_types": [1]}, "token_type has 1 entries"),
    (
      {"token_merges": ["a b"], "eos_token_id": 9},
      "eos_token_id is 9, outside",
    ),
    ({"token_merges": ["a b"], "add_bos_token": True}, "has none"),
  ],
)
def test_damaged_metadata(write_gguf, fields, message):
  path = write_gguf("gpt2", ["a", "b", "ab"], tokenizer_pre="gpt-2", **fields)
  with pytest.raises(ValueError, match=message):
    text.load_tokenizer(path)


def test_repeated_token(write_gguf):
  path = write_gguf("gpt2", ["a", "b", "a"], token_merges=["a b"])
  with pytest.raises(ValueError, match="'a' is in the vocabulary twice"):
    text.load_tokenizer(path)


def test_several_ends(write_gguf, byte_level):
  path = _byte_level(write_gguf, byte_level, "gpt-2", eot_token_id=5)
  assert text.load_tokenizer(path).eos_token_ids == (1, 5)


# SentencePiece


def _sentence_piece(write_gguf, prefix=True):
  words = [
    "the",
    "cat",
    "he",
    "at",
    "th",
    "▁the",
    "▁cat",
    "▁t",
    "ca",
    "▁▁",
    "é",
  ]
  singles = sorted({c for w in words for c in w if len(c.encode()) < 4})
  tokens = ["<unk>", "<s>", "</s>"]
  kinds = [_UNKNOWN, _CONTROL, _CONTROL]
  scores = [0.0, 0.0, 0.0]
  for byte in range(256):
    tokens.append(f"<0x{byte:02X}>")
    kinds.append(_BYTE)
    scores.append(0.0)
  for rank, word in enumerate(dict.fromkeys([*words, *singles])):
    tokens.append(word)
    kinds.append(_NORMAL)
    scores.append(-float((rank * 7) % 31) - 1.0)
  tokens.append("<tool>")
  kinds.append(_USER)
  scores.append(0.0)
  path = write_gguf(
    "llama",
    tokens,
    token_types=kinds,
    token_scores=scores,
    bos_token_id=1,
    eos_token_id=2,
    unk_token_id=0,
    add_space_prefix=prefix,
  )
  return text.load_tokenizer(path), tokens, scores


def _greedy(sample, tokens, scores, prefix):
  """SentencePiece's rule as a loop: join the best-scoring neighbours."""
  if not sample:
    return []
  ids = {t: i for i, t in enumerate(tokens[:-1]) if i >= 3 + 256}
  parts = list(("▁" if prefix else "") + sample.replace(" ", "▁"))
  while True:
    joins = [
      (-scores[ids[a + b]], at)
      for at, (a, b) in enumerate(itertools.pairwise(parts))
      if a + b in ids
    ]
    if not joins:
      break
    at = min(joins)[1]
    parts[at : at + 2] = [parts[at] + parts[at + 1]]
  result = []
  for part in parts:
    if part in ids:
      result.append(ids[part])
    else:
      result.extend(3 + byte for byte in part.encode())
  return result


@pytest.mark.parametrize("prefix", [True, False])
def test_sentence_piece_equals_the_greedy_loop(write_gguf, prefix):
  ours, tokens, scores = _sentence_piece(write_gguf, prefix)
  assert ours.encode("the cat")[0] == 1

  @hypothesis.settings(max_examples=100, deadline=None)
  @hypothesis.given(strategies.text("theca é🙂ß", max_size=16))
  def check(sample):
    ids = ours.encode(sample, add_bos=False)
    assert ids == _greedy(sample, tokens, scores, prefix)
    assert ours.decode(ids) == sample

  check()


def test_sentence_piece_special_tokens(write_gguf):
  ours, tokens, _ = _sentence_piece(write_gguf)
  tool = tokens.index("<tool>")
  ids = ours.encode("the<tool>cat</s>")
  the, cat = tokens.index("▁the"), tokens.index("▁cat")
  assert ids == [1, the, tool, cat, 2]
  assert ours.decode(ids) == "the<tool> cat"  # user-defined tokens are text
  assert ours.special_ids == {0, 1, 2}


@pytest.mark.slow
def test_demo_tokenizer(demo_model):
  ours = text.load_tokenizer(demo_model)
  assert ours.vocab_size == 49152
  assert (ours.bos_token_id, ours.eos_token_ids) == (1, (2,))
  prompt = ours.chat([{"role": "user", "content": "What is 1+12?"}])
  assert prompt == (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained"
    " by Hugging Face<|im_end|>\n<|im_start|>user\nWhat is 1+12?<|im_end|>\n"
    "<|im_start|>assistant\n"
  )
  ids = ours.encode(prompt)
  assert ids.count(1) == 3 and ids.count(2) == 2  # no BOS is added
  for sample in _TEXTS[:4]:
    assert ours.encode(sample, add_bos=True) == ours.encode(
      sample, add_bos=False
    )
    assert ours.decode(ours.encode(sample)) == sample
