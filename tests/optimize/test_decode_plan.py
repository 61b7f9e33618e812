"""Plans as files: whole, of this machine and this model, or refused."""

import dataclasses
import json

import pytest

import ldjax
from ldjax import checkpoints, optimize

DecodePlan = optimize.DecodePlan


@pytest.fixture(scope="module")
def model(tiny_folder):
  return ldjax.load(tiny_folder, draft="ngram", max_len=64)


@pytest.fixture
def plan(model):
  return DecodePlan(
    machine=optimize.machine(),
    model=optimize.model_key(model.config, model.params.target),
    name="tiny",
    batch_size=2,
    max_len=64,
    draft="ngram",
    fused=("qkv", "norms"),
    precision={"layers.0.mlp.up_proj": "bfloat16", "lm_head": "w8a8"},
    tree="chain:3",
    page_size=8,
    initial_pages=9,
    num_pages=20,
    curves=(
      {
        "sizes": [1, 4],
        "seconds": [1.0, 1.5],
        "draft_seconds": [0.0, 0.1],
        "batch": 2,
        "device": "cpu",
        "model": "elsewhere",
      },
    ),
    evidence={"fusion": {"change": "qkv+norms"}},
    tokens_per_second={"ratio": [1.0, 1.1, 1.2]},
  )


def test_load_follows_it(plan, model, tiny_folder, tmp_path, cache_home):
  plan.save(tmp_path / "plan.json")
  assert json.loads((tmp_path / "plan.json").read_text())["version"] == 1
  read = DecodePlan.read(tmp_path / "plan.json")
  assert dataclasses.asdict(read) == {
    **dataclasses.asdict(plan),
    "curves": tuple(map(dict, plan.curves)),
  }
  planned = ldjax.load(tiny_folder, plan=tmp_path / "plan.json")
  assert planned.config.fused == ("qkv", "norms")
  layer = planned.params.target["layers"][0]
  assert "qkv_proj" in layer["self_attn"] and "q_proj" not in layer["self_attn"]
  assert layer["mlp"]["up_proj"]["weight"].dtype == "bfloat16"
  assert planned.params.target["lm_head"]["weight"].rows
  assert (planned.max_len, planned.page_size) == (64, 8)
  assert (planned.initial_pages, planned.num_pages) == (9, 20)
  assert (planned.draft_name, planned.draft.size) == ("ngram", 4)
  # Where adaptive decoding looks for it.
  assert optimize.load_costs(planned, batch=2).seconds == (1.0, 1.5)
  # What is said to `load` counts more.
  other = ldjax.load(tiny_folder, plan=plan, page_size=4, tree="root")
  assert (other.page_size, other.draft.size) == (4, 1)


@pytest.mark.slow
def test_one_text_with_any_tree(plan, tiny_folder):
  planned = ldjax.load(tiny_folder, plan=plan)
  texts = [
    ldjax.generate(each, [1, 2, 3, 1, 2, 3], max_new_tokens=12).tokens
    for each in (planned, ldjax.with_draft(planned, "none"))
  ]
  assert texts[0] == texts[1]


def test_another_machine_or_model_is_refused(plan, tiny_folder, monkeypatch):
  def read(*_, **__):
    raise AssertionError("the weights are read before the error is found")

  elsewhere = {**plan.machine, "cores": 10**6}
  with monkeypatch.context() as patched:
    patched.setattr(checkpoints, "read", read)
    with pytest.raises(ValueError, match="cores was 1000000; here it is"):
      ldjax.load(tiny_folder, plan=dataclasses.replace(plan, machine=elsewhere))
    with pytest.raises(ValueError, match="leave out compat"):
      ldjax.load(tiny_folder, plan=plan, compat="medusa2")
  other = dataclasses.replace(plan, model="0" * 16)
  with pytest.raises(ValueError, match=r"is another model .* ldjax optimize"):
    ldjax.load(tiny_folder, plan=other)


@pytest.mark.parametrize(
  ("text", "match"),
  [
    ("", "is no plan"),
    ("[1]", "version None"),
    ('{"version": 7}', "version 7; this ldjax reads 1"),
    ('{"version": 1, "speed": 3}', "no plan has speed"),
    ('{"version": 1}', "missing"),
  ],
)
def test_damaged_files(tmp_path, text, match):
  path = tmp_path / "plan.json"
  path.write_text(text)
  with pytest.raises(ValueError, match=match) as caught:
    DecodePlan.read(path)
  assert "ldjax optimize" in str(caught.value)


def test_cut_and_changed_files(plan, tmp_path):
  path = tmp_path / "plan.json"
  plan.save(path)
  whole = path.read_text()
  for cut in range(0, len(whole) - 2, 97):
    path.write_text(whole[:cut])
    with pytest.raises(ValueError, match="is no plan"):
      DecodePlan.read(path)
  for field, value, match in (
    ("batch_size", 0, "batch_size of the plan is 0"),
    ("page_size", "16", "page_size of the plan is '16'"),
    ("fused", ["heads"], "fused of the plan holds 'heads'"),
    ("precision", {"lm_head": "int3"}, "is 'int3'"),
    ("precision", [1], "no attribute"),
  ):
    path.write_text(json.dumps({**json.loads(whole), field: value}))
    with pytest.raises(ValueError, match=match):
      DecodePlan.read(path)
  with pytest.raises(FileNotFoundError):
    DecodePlan.read(tmp_path / "none.json")
  with pytest.raises(OSError):
    plan.save(tmp_path / "none" / "plan.json")
