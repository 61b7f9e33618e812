"""What a config.json of each family says, and what it leaves unsaid."""

import json
import math
import pathlib
import re

import jax
import pytest

from ldjax import checkpoints, models

_DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
_SIZES = {
  "vocab_size": 31,
  "hidden_size": 64,
  "intermediate_size": 40,
  "num_hidden_layers": 6,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
}
_CLASSES = {
  "llama": "LlamaForCausalLM",
  "mistral": "MistralForCausalLM",
  "qwen2": "Qwen2ForCausalLM",
  "qwen3": "Qwen3ForCausalLM",
  "smollm3": "SmolLM3ForCausalLM",
}
_FULL, _SLIDES = "full_attention", "sliding_attention"


@pytest.fixture
def parse(tmp_path):
  """parse(model_type, **changes), where "absent" takes a key away."""

  def parse(kind, **changes):
    raw = {"model_type": kind, **_SIZES, **changes}
    raw = {key: value for key, value in raw.items() if value != "absent"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return checkpoints.read_config(tmp_path)

  return parse


# Of every published configuration what could go wrong about it.
_PUBLISHED = {
  "Llama-3.2-1B-Instruct": {"head_dim": 64, "tie_word_embeddings": True},
  "Mistral-7B-Instruct-v0.3": {"rope_theta": 1e6, "windows": ()},
  "Qwen2.5-7B-Instruct": {
    "num_heads": 28,
    "num_kv_heads": 4,
    "head_dim": 128,
    "qkv_bias": True,
    "o_bias": False,
    "windows": (),  # use_sliding_window is false
    "tie_word_embeddings": False,
  },
  "Qwen3-32B": {"head_dim": 128, "hidden_size": 5120, "qk_norm": True},
  "TinyLlama-1.1B-Chat-v1.0_resaved_4.56": {"num_kv_heads": 4},
  "codellama_7b": {"rope_theta": 1e6, "vocab_size": 32016},
  # One layer and nothing in the file to tell it from a target; its weights do.
  "eagle_llama2_7b": {"num_layers": 1},
  "eagle_vicuna_7b": {"num_layers": 1, "num_kv_heads": 32},
  "gemma2_2b": {
    "num_parameters": 2_614_341_888,
    "norm_offset": 1.0,
    "embed_scale": 48.0,
    "activation": "gelu_tanh",
    "output_norms": True,
    "attn_soft_cap": 50.0,
    "final_soft_cap": 30.0,
    "query_scale": None,  # 256 is the head's size
    "windows": (4096, None) * 13,
    "tie_word_embeddings": True,  # which the file does not say
  },
  "gemma3_1b_it": {
    "num_parameters": 999_885_952,
    "norm_offset": 1.0,
    "embed_scale": 1152**0.5,
    "qk_norm": True,
    "output_norms": True,
    "attn_soft_cap": None,
    "final_soft_cap": None,
    "windows": ((512,) * 5 + (None,)) * 4 + (512, 512),
    "rope_theta": 1e6,
    "rope_local_theta": 1e4,
    "rope_scaling": None,
    "tie_word_embeddings": True,
  },
  "gpt2_3_added_tokens": {
    "num_parameters": 124_439_808 + 3 * 768,
    "vocab_size": 50260,
    "intermediate_size": 3072,
    "max_position_embeddings": 1024,
    "learned_positions": True,
    "norm": "layer",
    "mlp_gate": False,
    "activation": "gelu_tanh",
    "qkv_bias": True,
    "o_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": True,
  },
  "llama2_7b": {"rope_theta": 10000.0, "max_position_embeddings": 2048},
  "llama3_1_8b": {"num_kv_heads": 8},
  "mistral_7b_v03": {"num_kv_heads": 8, "windows": (), "qkv_bias": False},
  # Read as a model of its first context, with the short factors.
  "phi-3_5": {
    "num_parameters": 3_821_079_552,
    "max_position_embeddings": 4096,
    "windows": (),  # longer than any text
    "tie_word_embeddings": False,
  },
  "phi-4": {
    "num_parameters": 14_659_507_200,
    "num_heads": 40,
    "num_kv_heads": 10,
    "rope_theta": 250000.0,
    "rope_scaling": None,
    "max_position_embeddings": 16384,
    "windows": (),
    "qkv_bias": False,
  },
  "qwen2_0_5b": {
    "head_dim": 64,
    "qkv_bias": True,
    "o_bias": False,
    "windows": (),
    "tie_word_embeddings": True,
  },
  "qwen3_0.6b": {
    "head_dim": 128,  # not 1024 / 16
    "qk_norm": True,
    "qkv_bias": False,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
  },
  "smollm2_135m": {"nope_layers": (), "rope_theta": 1e5},
  "vicuna-7b-delta-v0": {"num_kv_heads": 32, "rms_norm_eps": 1e-6},
}
_REFUSED = {
  "Mixtral-8x7B-v0.1": "model_type is 'mixtral'",
  "eagle3_llama3_8b": "architectures is .'LlamaForCausalLMEagle3'.",
  "eagle3_qwen3_8b": "architectures is .'LlamaForCausalLMEagle3'.",
  "medusa-vicuna-7b-v1.3": "model_type is missing",
}


def _configs(shared_data):
  files = (shared_data / "configs").glob("*/config.json")
  return sorted(file.parent for file in files)


@pytest.mark.slow
def test_the_table_of_the_guide(shared_data):
  """Every configuration is in it, with what is said of it here."""
  rows = {}
  for line in (_DOCS / "guides" / "checkpoints.md").read_text().splitlines():
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    if line.startswith("|") and len(cells) == 4:
      rows[cells[0]] = cells[1:]
  folders = _configs(shared_data)
  assert {folder.name for folder in folders} <= set(rows)
  for folder in folders:
    family, counted, published = rows[folder.name]
    _, refused, reason = published.partition("refused: ")
    if refused:
      with pytest.raises(ValueError, match=re.escape(reason)):
        checkpoints.inspect(folder)
      assert folder.name in _REFUSED
      continue
    found = checkpoints.inspect(folder)
    assert family == f"`{found.family}`"
    assert counted == f"{found.parameters:,}"
    sizes = [int(x.replace(",", "")) for x in re.findall(r"[\d,]+", published)]
    if len(sizes) == 3:  # a number, and rows of a width
      sizes = [sizes[0] + sizes[1] * sizes[2]]
    assert sizes in ([], [found.parameters]), folder.name


def test_every_published_config_is_read_or_refused(shared_data):
  folders = _configs(shared_data)
  assert folders
  for folder in folders:
    if folder.name in _REFUSED:
      with pytest.raises(ValueError, match=_REFUSED[folder.name]):
        checkpoints.read_config(folder)
      continue
    config = checkpoints.read_config(folder)
    said = dict(_PUBLISHED[folder.name])
    count = said.pop("num_parameters", None)
    if count is not None:
      leaves = jax.tree.leaves(models.abstract_params(config))
      assert sum(leaf.size for leaf in leaves) == count, folder.name
    for field, value in said.items():
      assert getattr(config, field) == value, (folder.name, field)


@pytest.mark.parametrize("kind", _CLASSES)
def test_what_distinguishes_a_family(parse, kind):
  config = parse(kind, architectures=[_CLASSES[kind]])
  assert config.qkv_bias == (kind == "qwen2")
  assert not config.o_bias
  assert not config.mlp_bias
  assert config.qk_norm == (kind == "qwen3")
  assert config.head_dim == (128 if kind == "qwen3" else 16)
  assert config.nope_layers == ((3,) if kind == "smollm3" else ())
  assert config.tie_word_embeddings == (kind == "smollm3")
  assert config.rope_theta == (2e6 if kind == "smollm3" else 1e4)
  longest = {"llama": 2048, "mistral": 131072}.get(kind, 32768)
  assert config.max_position_embeddings == longest
  # A Mistral that says nothing has Mistral 7B's window.
  assert config.windows == ((4096,) * 6 if kind == "mistral" else ())


@pytest.mark.parametrize("kind", _CLASSES)
def test_biases_that_a_file_can_ask_for(parse, kind):
  config = parse(kind, attention_bias=True, mlp_bias=True)
  assert config.qkv_bias == (kind != "mistral")
  assert config.o_bias == (kind in ("llama", "qwen3", "smollm3"))
  assert config.mlp_bias == (kind in ("llama", "smollm3"))


@pytest.mark.parametrize("kind", _CLASSES)
def test_old_configs_without_key_heads(parse, kind):
  # Vicuna, Llama 1: as many as there are query heads.
  assert parse(kind, num_key_value_heads=None).num_kv_heads == 4
  assert parse("llama", num_key_value_heads="absent").num_kv_heads == 4


@pytest.mark.parametrize("kind", _CLASSES)
@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
def test_both_names_of_the_dtype(parse, kind, key):
  # The tensors say what they are; the name in the file is not needed.
  assert parse(kind, **{key: "bfloat16"}) == parse(kind)


@pytest.mark.parametrize("kind", _CLASSES)
def test_rope_of_transformers_4_and_5(parse, kind):
  old = parse(kind, rope_theta=5e5, rope_scaling=None)
  new = parse(kind, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
  assert old == new
  assert old.rope_theta == 5e5
  for settings in (
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5}},
  ):
    with pytest.raises(ValueError, match="rope_type 'yarn' is not supported"):
      parse(kind, **settings)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_windows_of_the_upper_layers(parse, kind):
  # transformers#38002: the window was applied though it was switched off.
  for off in (False, None, "absent"):
    config = parse(
      kind, use_sliding_window=off, sliding_window=4, max_window_layers=2
    )
    assert config.windows == ()
  on = {"use_sliding_window": True, "sliding_window": 4}
  config = parse(kind, **on, max_window_layers=2)
  assert config.windows == (None, None, 4, 4, 4, 4)
  assert parse(kind, **on, max_window_layers=0).windows == (4,) * 6
  assert parse(kind, **on, max_window_layers=6).windows == ()
  assert parse(kind, **on).windows == ()  # from layer 28 on
  assert (
    parse(
      kind, use_sliding_window=True, sliding_window=None, max_window_layers=0
    ).windows
    == ()
  )
  kinds = [_SLIDES, _FULL, _FULL, _SLIDES, _FULL, _FULL]
  config = parse(kind, **on, max_window_layers=2, layer_types=kinds)
  assert config.windows == (4, None, None, 4, None, None)


def test_windows_of_mistral(parse):
  assert parse("mistral", sliding_window=4).windows == (4,) * 6
  assert parse("mistral", sliding_window=None).windows == ()
  # As long as the longest text: it hides nothing.
  for size in (32, 33):
    config = parse("mistral", sliding_window=size, max_position_embeddings=32)
    assert config.windows == ()
  config = parse("mistral", sliding_window=31, max_position_embeddings=32)
  assert config.windows == (31,) * 6
  same = parse("mistral", sliding_window=4, layer_types=[_SLIDES] * 6)
  assert same.windows == (4,) * 6
  with pytest.raises(ValueError, match="layer_types differ"):
    parse("mistral", sliding_window=4, layer_types=[_SLIDES, _FULL] * 3)


def test_a_llama_has_no_window(parse):
  # Its class ignores the key, so files may carry anything there.
  assert parse("llama", sliding_window=4).windows == ()
  assert parse("llama", sliding_window="?", use_sliding_window=True) == parse(
    "llama"
  )


def test_layers_without_positions(parse):
  assert parse("smollm3").nope_layers == (3,)
  assert parse("smollm3", no_rope_layer_interval=2).nope_layers == (1, 3, 5)
  flags = [1, 1, 0, 1, 1, 0]
  config = parse("smollm3", no_rope_layers=flags, no_rope_layer_interval=1)
  assert config.nope_layers == (2, 5)
  assert parse("smollm3", no_rope_layers=[1] * 9).nope_layers == ()
  on = {"use_sliding_window": True, "sliding_window": 4}
  config = parse("smollm3", no_rope_layers=flags, **on)
  assert config.windows == (None, None, 4, None, None, 4)
  # Other families do not know the key.
  assert parse("llama", no_rope_layers=flags).nope_layers == ()


@pytest.mark.parametrize(
  ("kind", "changes", "message"),
  [
    ("mistral", {"sliding_window": 0}, "sliding_window is 0"),
    ("mistral", {"sliding_window": True}, "sliding_window is True"),
    ("mistral", {"sliding_window": 4.5}, "sliding_window is 4.5"),
    (
      "qwen2",
      {"use_sliding_window": "yes", "sliding_window": 4},
      "use_sliding_window is 'yes'",
    ),
    (
      "qwen2",
      {"use_sliding_window": True, "max_window_layers": 2.5},
      "max_window_layers is 2.5",
    ),
    (
      "qwen3",
      {"layer_types": [_SLIDES] * 6, "sliding_window": 4},
      "there is no window: use_sliding_window is None",
    ),
    ("qwen3", {"layer_types": [_FULL] * 5}, "each of the 6 layers"),
    ("qwen3", {"layer_types": "full"}, "each of the 6 layers"),
    (
      "qwen3",
      {"layer_types": ["linear_attention"] * 6},
      "'linear_attention', which is not supported",
    ),
    ("llama", {"layer_types": [_SLIDES] * 6}, "there is no window"),
    ("smollm3", {"no_rope_layers": [1, 0]}, "each of the 6 layers"),
    ("smollm3", {"no_rope_layers": [2] * 6}, "only 0 and 1 are known"),
    ("smollm3", {"no_rope_layer_interval": 0}, "it must be at least 1"),
    ("qwen2", {"architectures": ["Qwen2ForReward"]}, "only Qwen2ForCausalLM"),
    ("qwen3", {"quantization_config": {"quant_method": "fp8"}}, "fp8"),
  ],
)
def test_what_is_not_supported_is_refused(parse, kind, changes, message):
  with pytest.raises(ValueError, match=message) as error:
    parse(kind, **changes)
  assert "config.json" in str(error.value)


@pytest.mark.parametrize(
  "kind",
  [
    "gemma3n",
    "gemma3n_text",
    "qwen3_moe",
    "phi",
    "phi3_v",
    "ministral",
    "gptj",
  ],
)
def test_other_families_are_refused_by_name(parse, kind):
  with pytest.raises(ValueError, match=f"model_type is '{kind}'; supported: "):
    parse(kind)


_GPT2 = {
  "vocab_size": 31,
  "n_embd": 64,
  "n_layer": 6,
  "n_head": 4,
}


def test_gpt2_names_its_sizes_otherwise(parse):
  away = dict.fromkeys(set(_SIZES) - {"vocab_size"}, "absent")
  config = parse("gpt2", **away, **_GPT2)
  assert (config.hidden_size, config.num_layers) == (64, 6)
  assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 4, 16)
  assert config.intermediate_size == 256  # four times E
  assert config.max_position_embeddings == 1024
  assert config.rms_norm_eps == 1e-5
  assert config.tie_word_embeddings
  assert parse("gpt2", **away, **_GPT2, n_inner=40).intermediate_size == 40
  # Its class does not know the names of others.
  assert parse("gpt2", **_GPT2) == config
  with pytest.raises(ValueError, match="n_embd is missing"):
    parse("gpt2")
  with pytest.raises(ValueError, match=r"n_embd 64 .* n_head 5"):
    parse("gpt2", **{**_GPT2, "n_head": 5})


def test_scales_of_gemma(parse):
  config = parse("gemma", architectures=["GemmaForCausalLM"])
  assert (config.embed_scale, config.norm_offset) == (8.0, 1.0)
  assert (config.head_dim, config.query_scale) == (256, None)
  assert config.attn_soft_cap is config.final_soft_cap is None
  assert not config.output_norms
  assert config.tie_word_embeddings
  # Its class knows no caps.
  assert parse("gemma", attn_logit_softcapping=50.0) == config
  second = parse("gemma2", query_pre_attn_scalar=144)
  assert second.query_scale == 1 / 12
  assert (second.attn_soft_cap, second.final_soft_cap) == (50.0, 30.0)
  assert second.windows == (4096, None) * 3
  off = parse("gemma2", attn_logit_softcapping=None)
  assert (off.attn_soft_cap, off.final_soft_cap) == (None, 30.0)
  biased = parse("gemma2", attention_bias=True)
  assert biased.qkv_bias and biased.o_bias and not biased.mlp_bias


@pytest.mark.parametrize("kind", ["gemma", "gemma2", "gemma3_text"])
def test_activations_of_gemma(parse, kind):
  plain = parse(kind)
  assert plain.activation == "gelu_tanh"
  assert parse(kind, hidden_activation=None, hidden_act="gelu") == plain
  assert parse(kind, hidden_activation="gelu_pytorch_tanh") == plain
  with pytest.raises(ValueError, match="hidden_activation 'gelu' is not"):
    parse(kind, hidden_activation="gelu")


def test_rotary_bases_of_gemma3(parse):
  config = parse("gemma3_text")
  assert (config.rope_theta, config.rope_local_theta) == (1e6, 1e4)
  assert config.windows == (4096,) * 5 + (None,)
  linear = {"rope_type": "linear", "factor": 8.0}
  scaled = parse("gemma3_text", rope_scaling=linear, rope_local_base_freq=20)
  assert scaled.rope_scaling == models.LinearRopeScaling(factor=8.0)
  assert scaled.rotation(0) == (20.0, None)
  assert scaled.rotation(5) == (1e6, scaled.rope_scaling)
  assert math.isclose(models.rotary_frequencies(scaled, 5)[0], 1 / 8)
  assert models.rotary_frequencies(scaled)[0] == 1.0
  # A window that hides nothing still says which base a layer has.
  long = parse("gemma3_text", sliding_window=9, max_position_embeddings=8)
  assert long.windows == (9,) * 5 + (None,)
  # Without any window all layers have the one base.
  config = parse("gemma3_text", layer_types=[_FULL] * 6)
  assert (config.windows, config.rope_local_theta) == ((), None)
  config = parse("gemma3_text", sliding_window_pattern=2, sliding_window=3)
  assert config.windows == (3, None) * 3


def test_long_rope_of_phi3(parse):
  longrope = {"type": "longrope", "short_factor": [2.0] * 8, "long_factor": []}
  sizes = {"original_max_position_embeddings": 64}
  config = parse(
    "phi3", **sizes, rope_scaling=longrope, max_position_embeddings=256
  )
  assert config.max_position_embeddings == 64
  assert config.rope_scaling.factors == (2.0,) * 8
  # Four times as long as 64, which is 4 ** 3.
  assert math.isclose(config.rope_scaling.attention_factor, (4 / 3) ** 0.5)
  # Within the first context nothing is stretched but by the short factors.
  for size in (64, 32):
    config = parse(
      "phi3",
      **sizes,
      rope_scaling={**longrope, "type": "su"},
      max_position_embeddings=size,
    )
    assert config.max_position_embeddings == size
    assert config.rope_scaling.attention_factor == 1.0
  # As transformers 5 writes it.
  config = parse(
    "phi3",
    max_position_embeddings=256,
    rope_parameters={
      "rope_type": "longrope",
      "rope_theta": 123.0,
      "short_factor": [2.0] * 8,
      "long_factor": [3.0] * 8,
      "attention_factor": 1.5,
      "original_max_position_embeddings": 64,
      "factor": 4.0,
    },
  )
  assert (config.rope_theta, config.max_position_embeddings) == (123.0, 64)
  assert config.rope_scaling.attention_factor == 1.5
  assert parse("phi3", sliding_window=2047).windows == (2047,) * 6


@pytest.mark.parametrize(
  ("kind", "changes", "message"),
  [
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx is"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights is False"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True"),
    ("gpt2", {"activation_function": "relu"}, "activation_function 'relu'"),
    ("gemma", {"hidden_act": "silu"}, "hidden_act 'silu' is not supported"),
    ("gemma2", {"sliding_window_pattern": 6}, "sliding_window_pattern is 6"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
    ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_soft_cap is -1.0"),
    ("gemma2", {"rope_scaling": {"rope_type": "linear"}}, "'linear' is not"),
    ("gemma3_text", {"sliding_window_pattern": 0}, "it must be at least 1"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "bidirectional"),
    (
      "gemma3_text",
      {"rope_scaling": {"rope_type": "linear"}},
      "needs a number for 'factor', found None",
    ),
    (
      "gemma3_text",
      {"rope_parameters": {_FULL: {"rope_theta": 1.0}}},
      "an object for each of full_attention and sliding_attention",
    ),
    (
      "gemma3_text",
      {"rope_parameters": {_FULL: {}, _SLIDES: {"rope_type": "linear"}}},
      "'linear' of sliding_attention is not supported",
    ),
    ("gemma3", {}, "text_config is None"),
    (
      "gemma3",
      {"text_config": {"model_type": "gemma2"}},
      "text_config has model_type 'gemma2'; only 'gemma3_text'",
    ),
    (
      "gemma3",
      {"text_config": {"use_bidirectional_attention": True}},
      "bidirectional",
    ),
    ("phi3", {"partial_rotary_factor": 0.75}, "partial_rotary_factor 0.75"),
    (
      "phi3",
      {"rope_scaling": {"type": "longrope", "long_factor": [1.0]}},
      "a list of numbers for 'short_factor', found None",
    ),
    (
      "phi3",
      {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 7}},
      "7 factors; head_dim 16 asks for 8",
    ),
    (
      "phi3",
      {
        "rope_scaling": {
          "type": "longrope",
          "short_factor": [1.0] * 8,
          "short_mscale": 1.2,
        }
      },
      "'longrope' with short_mscale is not supported",
    ),
    (
      "phi3",
      {
        "rope_scaling": {
          "type": "longrope",
          "short_factor": [1.0] * 8,
          "factor": 3.0,
        }
      },
      "has factor 3.0, but max_position_embeddings 4096 is 1 times",
    ),
  ],
)
def test_what_newer_families_do_not_support(parse, kind, changes, message):
  sizes = _GPT2 if kind == "gpt2" else {}
  with pytest.raises(ValueError, match=message) as error:
    parse(kind, **sizes, **changes)
  assert "config.json" in str(error.value)


def test_the_early_spelling_of_llama(parse):
  assert parse("llama", architectures=["LLaMAForCausalLM"]) == parse("llama")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("prefix", ["model.", ""])
@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3", "smollm3"])
def test_weights_of_each_family(tmp_path, make_tiny, kind, prefix, tied):
  tiny = make_tiny(model_type=kind, tie_word_embeddings=tied)
  plain = dict(tiny.weights)
  tiny.weights = {
    name.replace("model.", prefix): value for name, value in plain.items()
  }
  if tied:  # and yet the file has it
    tiny.weights["lm_head.weight"] = plain["model.embed_tokens.weight"]
  folder = tiny.folder(tmp_path)
  tiny.weights = plain
  tiny.check(checkpoints.read(folder).params)


def test_weights_that_belong_to_another_family(tmp_path, make_tiny):
  tiny = make_tiny(model_type="qwen3")
  for kind in ("llama", "mistral", "smollm3"):
    tiny.config["model_type"] = kind
    with pytest.raises(ValueError, match=r"[qk]_norm.*does not have"):
      checkpoints.read(tiny.folder(tmp_path / kind))
  tiny = make_tiny(attention_bias=True)
  tiny.config["model_type"] = "qwen2"
  with pytest.raises(ValueError, match=r"o_proj\.bias.*does not have"):
    checkpoints.read(tiny.folder(tmp_path / "qwen2"))
