"""The model card: deterministic facts of the run, without unknown values."""

from dataclasses import replace
from typing import Any

import pytest
from huggingface_hub import ModelCard

from runner.checkpoint.manifest import Manifest
from runner.config import DataConfig
from runner.history.records import History, RunState, Throughput
from runner.huggingface.hub import EVALUATIONS_MAX, ExportedCheckpoint, ModelCardText, format_model_card
from runner.spec import ExecutionSpec

MANIFEST = Manifest(
    name="300",
    step=300,
    fingerprint="0123456789abcdef" * 2,
    leaves={
        name: {"shape": shape, "dtype": "float32", "digest": ""}
        for name, shape in {"params.a": [4, 300], "params.b": [34], "opt_state.m": [4, 300]}.items()
    },
    topology={"mesh": {"data": 4, "fsdp": 2, "tensor": 1}, "device_kind": "TPU v5 lite", "processes": 2},
    environment={"versions": {"jax": "0.10.1", "python": "3.11.7"}, "hosts": ["secret-host"]},
)
CONFIG = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
WORDS = ModelCardText("owner/model")


def make_spec(**changes: Any) -> ExecutionSpec:
    document = {"name": "nano", "job": "experiments.gpt:PretrainGPT", "directory": "/home/me/runs/nano"}
    return ExecutionSpec.model_validate(document | changes)


def make_rows(last: int = 300) -> list[dict[str, Any]]:
    """Make a row every 10 steps, with validation every 20."""
    found = []
    for step in range(10, last + 1, 10):
        row: dict[str, Any] = {"step": step, "train/loss": 4 - step / 100, "train/tokens": step * 1000}
        found.append(row | ({"val/loss": 5 - step / 100, "val/news/loss": 6.0} if step % 20 == 0 else {}))
    return found


def make_history(state: RunState) -> History:
    return History("/run", None, None, 0.0, state, 0.0, None, 300, 300, (), {}, 7200.0, 0.975, 0, Throughput())


EVIDENCE = ExportedCheckpoint(
    spec=make_spec(),
    data=DataConfig(source="/home/me/text/*.txt", sequence_length=1024),
    manifest=MANIFEST,
    rows=make_rows(),
    history=make_history(RunState.DONE),
    config=CONFIG,
    files=["config.json", "tokenizer.json", "model.safetensors"],
)


def find_cells(card: str, name: str) -> str:
    """Return the cells of a row of the table."""
    line, *_ = [line for line in card.splitlines() if line.startswith(f"| {name} |")]
    return line.removeprefix(f"| {name} |").removesuffix("|").strip()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", "300"),
        ("tokens", "300,000"),
        ("training loss, nats a token", "1.0000"),
        ("validation loss, nats a token", "2.0000"),
        ("parameters", "1,234"),
        ("data", "`*.txt`"),
        ("tokens of an example", "1,024"),
        ("tokenizer", "`tokenizer.json`"),
        ("seed", "0"),
        ("hardware", "8 x `TPU v5 lite` (data 4, fsdp 2)"),
        ("versions", "jax 0.10.1, python 3.11.7"),
        ("time", "2.00 h, 97.5% of it in steps"),
        ("fingerprint of the whole state", "`0123456789abcdef0123456789abcdef`"),
        ("260", "1.4000 | 2.4000 | 6.0000"),
    ],
)
def test_the_card_shows_the_facts_of_the_run(name: str, value: str) -> None:
    assert find_cells(format_model_card(EVIDENCE, WORDS), name) == value


def test_the_card_hides_directories_and_hosts() -> None:
    card = format_model_card(replace(EVIDENCE, spec=make_spec(checkpoint={"init_from": "/home/me/base"})), WORDS)
    assert not [word for word in ("/home", "secret-host", "runs/nano") if word in card]
    assert find_cells(card, "began with") == "`base`"


def test_the_card_shows_some_of_many_evaluations_and_the_last() -> None:
    card = format_model_card(replace(EVIDENCE, rows=make_rows(10_000)), WORDS)
    steps = [line.split("|")[1].strip() for line in card.split("## Losses")[1].splitlines()[4:]]
    assert 1 < len(steps) <= EVALUATIONS_MAX
    assert steps[-1] == "10,000"


def test_the_card_shows_the_duration_of_finished_runs_only() -> None:
    live, later = (
        replace(EVIDENCE, history=replace(make_history(RunState.RUNNING), wall_seconds=s)) for s in (1.0, 2.0)
    )
    assert format_model_card(live, WORDS) == format_model_card(later, WORDS)
    assert "| time |" not in format_model_card(live, WORDS)


FRONT: dict[str, tuple[ExportedCheckpoint, ModelCardText, dict[str, Any]]] = {
    "nothing more": (EVIDENCE, WORDS, {"tags": ["jax", "gpt2"], "pipeline_tag": "text-generation"}),
    "a licence": (EVIDENCE, replace(WORDS, license="mit"), {"license": "mit"}),
    "a base model": (EVIDENCE, replace(WORDS, base_model="a/b"), {"base_model": "a/b"}),
    "a base model from the Hub's cache": (
        replace(EVIDENCE, spec=make_spec(checkpoint={"init_from": "/c/hub/models--a--b/snapshots/0123"})),
        WORDS,
        {"base_model": "a/b"},
    ),
    "data that have a name": (
        replace(EVIDENCE, data=DataConfig(source="python-stdlib", sequence_length=8)),
        WORDS,
        {"datasets": ["python-stdlib"]},
    ),
    "an architecture that makes no text": (
        replace(EVIDENCE, config={"model_type": "bert"}),
        WORDS,
        {"library_name": None, "pipeline_tag": None, "tags": ["jax", "bert"]},
    ),
}


@pytest.mark.parametrize("name", FRONT)
def test_the_front_matter_has_only_known_keys(name: str) -> None:
    evidence, words, expected = FRONT[name]
    usual = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["jax", "gpt2"]}
    found = ModelCard(format_model_card(evidence, words)).data.to_dict()
    assert found == {key: value for key, value in (usual | expected).items() if value is not None}


def test_names_in_a_spec_cannot_make_markup() -> None:
    hostile = "s3://b/a|b`<img src=x>\n\n# owned\x1b[2J"
    card = format_model_card(replace(EVIDENCE, data=DataConfig(source=hostile, sequence_length=8)), WORDS)
    assert card.count("\n") == format_model_card(EVIDENCE, WORDS).count("\n")
    assert not [mark for mark in ("<img", "\x1b", "a|b") if mark in card]
    ModelCard(card)


def test_a_run_with_few_records_has_a_card() -> None:
    bare = Manifest(name="1", step=1, fingerprint="0" * 32)
    card = format_model_card(
        ExportedCheckpoint(make_spec(), None, bare, [], make_history(RunState.KILLED), {}, []), WORDS
    )
    assert find_cells(card, "step") == "1"
    assert "## Losses" not in card
