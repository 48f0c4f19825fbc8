"""Sizes of a decoder by its depth, and `runner scale`, which writes them as a spec."""

import json
from pathlib import Path

import pytest

from runner.cli.app import run_command
from runner.errors import InvalidError
from runner.plan.checks import Findings, open_job
from runner.plan.size import derive_sizes
from runner.spec import load_document

# Base spec, depth, width of a layer, and derived values below `config`, at 20 tokens a parameter.
RULES: dict[str, tuple[str, int, int, dict[str, object]]] = {
    "gpt": (
        *("specs/gpt_nano.yaml", 4, 16),
        {"model.layers": 4, "model.width": 64, "model.heads": 4, "train.total_steps": 1077}
        # 4.4 million tokens are 10.8 times those of the base, and 32 x 10.8^0.383 = 80.
        | {"train.global_batch_examples": 64, "eval.batches": 2, "schedule.warmup_steps": 108}
        | {"optimizer.learning_rate": 0.004243, "schedule.final_learning_rate": 0.0004243},
    ),
    "gpt, narrower": ("specs/gpt_nano.yaml", 1, 16, {"model.width": 16, "optimizer.learning_rate": 0.006}),
    "mu-P keeps the rate": (
        *("specs/llama_nano.yaml", 2, 16),
        {"model.base_width": 64, "model.width": 32, "model.mlp_width": 96, "model.key_value_heads": 1}
        | {"optimizer.learning_rate": 0.003, "train.global_batch_examples": 32},
    ),
    "width rounded up to heads": ("specs/gpt_nano.yaml", 3, 9, {"model.width": 32, "model.heads": 2}),
}


@pytest.mark.parametrize("name", RULES)
def test_values_follow_from_the_depth(name: str) -> None:
    spec, depth, width, expected = RULES[name]
    (size,) = derive_sizes(spec, [], [depth], [20], width, None)
    assert {key: size.values[f"config.{key}"] for key in expected} == expected
    assert size.tokens == pytest.approx(20 * size.parameters, rel=0.02)
    assert size.rules.keys() == size.values.keys()


def test_a_published_size_is_its_own_member_of_the_family() -> None:
    (size,) = derive_sizes("specs/gpt2_124m.yaml", [], [12], [2_500_000_000 / 124_475_904], 64, None)
    keys = ("model.width", "model.heads", "train.global_batch_examples", "optimizer.learning_rate", "eval.batches")
    assert [size.values[f"config.{key}"] for key in keys] == [768, 12, 512, 6e-4, 4]
    assert (size.values["config.train.total_steps"], size.values["config.train.total_tokens"]) == (4768, None)
    assert (size.parameters, size.embedding_parameters) == (124_475_904, 51_328 * 768)


REFUSED: dict[str, tuple[str, list[str], str]] = {
    "images": ("specs/vit_nano.yaml", [], "job: .* needs a decoder, whose data are tokens"),
    "experts": ("specs/moe_nano.yaml", [], r"config\.model\.moe: no rule says how it grows"),
    "no trainer": ("specs/counter.yaml", [], "only a trainer|needs a decoder"),
    "stages": (
        "specs/gpt_nano.yaml",
        ['config.stages=[{"from_step": 9, "set": {"eval.batches": 2}}]'],
        r"config\.stages: .* leave them out|stages",
    ),
    "another total": ("specs/gpt_nano.yaml", ["config.train.total_steps=9"], "follows from the depth"),
    "both totals": ("specs/gpt_nano.yaml", ["config.train.total_tokens=99999"], "follows from the depth"),
    "odd head": ("specs/llama_nano.yaml", ["config.model.head_dim=15"], "head_dim"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_specs_without_rules_are_refused(name: str) -> None:
    spec, overrides, message = REFUSED[name]
    with pytest.raises(InvalidError, match=message):
        derive_sizes(spec, overrides, [2], [20], 16, None)


@pytest.mark.parametrize("spec", ["specs/gpt_nano.yaml", "specs/llama_nano.yaml", "specs/gpt2_124m.yaml"])
def test_the_written_spec_is_complete_and_has_its_rules(spec: str, tmp_path: Path) -> None:
    path = tmp_path / "d3.yaml"
    assert run_command(["scale", spec, "--depth", "3", "--tokens-per-parameter", "5", "-o", str(path)]) == 0
    findings = Findings()
    job = open_job(load_document(path), findings)
    assert job is not None, findings.problems
    (size,) = derive_sizes(spec, [], [3], [5], 64, None)
    assert job.config.model.width == size.values["config.model.width"]
    assert job.spec.name == f"{Path(spec).stem}_d3"
    text = path.read_text()
    assert all(f"# {rule}" in text for key, rule in size.rules.items() if size.values[key] is not None)
    with pytest.raises(InvalidError, match="needs a new name"):
        run_command(["scale", spec, "--depth", "3", "-o", str(path)])


def test_several_sizes_are_printed_as_json(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["scale", "specs/gpt_nano.yaml", "--depth", "1,2", "--tokens-per-parameter", "5,10"]
    assert run_command([*words, "--json"]) == 0
    sizes = json.loads(capfd.readouterr().out)
    assert [(size["depth"], size["tokens_per_parameter"]) for size in sizes] == [(1, 5), (1, 10), (2, 5), (2, 10)]
    with pytest.raises(InvalidError, match="one --depth and one ratio, or --json"):
        run_command(words)


BAD_OPTIONS = {
    "descending": ["--depth", "3,2", "--json"],
    "repeated": ["--depth", "2,2", "--json"],
    "zero": ["--depth", "0"],
    "fraction": ["--depth", "1.5"],
    "words": ["--depth", "two"],
    "no ratio": ["--depth", "2", "--tokens-per-parameter", "-1"],
    "infinite ratio": ["--depth", "2", "--tokens-per-parameter", "inf"],
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_numbers_of_options_are_checked(name: str) -> None:
    with pytest.raises(InvalidError, match="ascending order"):
        run_command(["scale", "specs/gpt_nano.yaml", *BAD_OPTIONS[name]])
