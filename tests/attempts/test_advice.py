"""A refusal advises only what would be accepted: each advice is followed here, up to the claim of the directory."""

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from experiments.gpt import PretrainGPT
from experiments.model.decoder import PretrainDecoder
from runner import BaseTrainer, ExecutionSpec, lifecycle
from runner.attempts.attempt import claim_attempt
from runner.config import TrainerConfig
from runner.errors import InvalidError
from runner.spec import parse_document, validate_config
from tests.support.tiny_jobs import make_gpt_document, merge, stop_after

STEP = 3
TINY: dict[str, Any] = {
    "config.model": {"layers": 1, "heads": 2, "width": 16},
    "config.eval.every_steps": None,
    "config.train.global_batch_examples": 16,
}
soak = pytest.mark.soak


class AcceptedError(Exception):
    """Raised instead of the claim of a directory, before which all checks are made."""


@pytest.fixture(autouse=True)
def no_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a job end where it would claim its directory, but for a run that a fixture makes."""

    def claim(*args: Any, **kwargs: Any) -> Any:
        raise AcceptedError

    monkeypatch.setattr(lifecycle, "claim_attempt", claim)


def write_sources(root: Path) -> dict[str, str]:
    """Write a second text and token files; return the paths by name."""
    root.mkdir(exist_ok=True)
    (root / "other.txt").write_text("hello world, this is it.\n" * 2000)
    for name, seed in (("ids", 0), ("more", 1)):
        np.random.default_rng(seed).integers(0, 200, 20000).astype("<u2").tofile(root / f"{name}.bin")
    return {name: str(root / name) for name in ("text.txt", "other.txt", "ids.bin", "more.bin")}


def mixture(*sources: str) -> list[dict[str, Any]]:
    return [{"name": f"s{number}", "source": source, "weight": 1.0} for number, source in enumerate(sources)]


# Run -> changes of its spec, as functions of the sources.
RUNS: dict[str, Any] = {
    "text": lambda files: {},
    "ids": lambda files: {"config.data": {"source": files["ids.bin"], "dtype": "uint16", "sequence_length": 16}},
    "mixture": lambda files: {
        "config.data": {"mixture": mixture(files["text.txt"], files["other.txt"]), "sequence_length": 16}
    },
    "stages": lambda files: {"config.stages": [{"from_step": 2, "set": {"optimizer.weight_decay": 0.3}}]},
    "experts": lambda files: {
        "job": "experiments.model.decoder:PretrainDecoder",
        "config.model": {
            "layers": 1,
            "heads": 2,
            "width": 16,
            "mlp_width": 32,
            "moe": {"experts": 4, "experts_per_token": 2},
        },
    },
}
JOBS: dict[str, type[BaseTrainer]] = {"experts": PretrainDecoder}
# (run, changed keys, advised key) of a refused start; no advice where nothing that could be advised is accepted.
STAGE, FORK, INIT, NOTHING = "config.stages", "checkpoint.fork_from", "checkpoint.init_from", ""
REFUSALS: dict[str, tuple[str, Any, str]] = {
    "a rate": ("text", {"config.optimizer.learning_rate": 2e-3}, STAGE),
    "another schedule": ("text", {"config.schedule": {"name": "constant"}}, STAGE),
    "mixture for source": (
        "text",
        lambda files: {"config.data": {"mixture": mixture(*files.values()), "sequence_length": 16}},
        STAGE,
    ),
    "longer sequences": ("text", {"config.data.sequence_length": 8}, NOTHING),
    "other tokenizer": ("text", {"config.data.tokenizer": "characters"}, NOTHING),
    "seed": ("text", {"seed": 5}, FORK),
    "other data": ("text", lambda files: {"config.data.source": files["other.txt"]}, FORK),
    "optimizer": ("text", {"config.optimizer.name": "lion"}, INIT),
    "frozen": ("text", {"config.optimizer.groups": [{"pattern": "*embedding*", "frozen": True}]}, INIT),
    "type of parameters": ("text", {"config.precision.params": "bfloat16"}, NOTHING),
    "documents of ids": ("ids", {"config.data.packing": "pad"}, NOTHING),
    "source for mixture": (
        "mixture",
        lambda files: {"config.data": {"source": files["other.txt"], "sequence_length": 16}},
        STAGE,
    ),
    "beside a stage": ("stages", {"config.optimizer.clip_norm": 0.5}, STAGE),
    "without a stage": ("stages", {"config.stages": []}, STAGE),
    "another stage": ("stages", {"config.stages": [{"from_step": 1, "set": {"optimizer.weight_decay": 0.3}}]}, STAGE),
    "number of experts": ("experts", {"config.model.moe.experts": 8}, NOTHING),
}
SOAK_REFUSALS: dict[str, tuple[str, Any, str]] = {
    "layers": ("text", {"config.model.layers": 2}, NOTHING),
    "heads": ("text", {"config.model.heads": 1}, INIT),
    "dropout": ("text", {"config.model.dropout": 0.1}, STAGE),
    "vocabulary": ("text", {"config.model.vocabulary_size": 300}, NOTHING),
    "ids for text": (
        "text",
        lambda files: {"config.data.source": files["ids.bin"], "config.data.dtype": "uint16"},
        NOTHING,
    ),
    "padded": ("text", {"config.data.packing": "pad"}, STAGE),
    "validation": ("text", {"config.data.validation_fraction": 0.1}, FORK),
    "weight decay": ("text", {"config.optimizer.weight_decay": 0.2}, STAGE),
    "groups": ("text", {"config.optimizer.groups": [{"pattern": "*", "rate": 0.5}]}, STAGE),
    "moments": ("text", {"config.optimizer.moments": "bfloat16"}, INIT),
    "linear": ("text", {"config.schedule.name": "linear"}, STAGE),
    "warm-up": ("text", {"config.schedule.warmup_steps": 1}, STAGE),
    "share": ("text", {"config.schedule": {"warmup_share": 0.1}}, STAGE),
    "wsd": ("text", {"config.schedule": {"name": "wsd", "decay_steps": 2}}, STAGE),
    "batch": ("text", {"config.train.global_batch_examples": 32}, STAGE),
    "same bits": ("text", {"config.train.same_bits_devices": 8, "config.train.micro_batch_examples": 1}, FORK),
    "compute": ("text", {"config.precision.compute": "bfloat16"}, FORK),
    "matmuls": ("text", {"config.precision.matmul": "int8"}, FORK),
    "averages": ("text", {"config.ema": {"decays": [0.9]}}, INIT),
    "policy": ("text", {"config.stability": {"non_finite": "skip"}}, INIT),
    "other ids": ("ids", lambda files: {"config.data.source": files["more.bin"]}, FORK),
    "tokenizer of ids": ("ids", {"config.data.tokenizer": "characters"}, NOTHING),
    "weights": (
        "mixture",
        lambda files: {"config.data.mixture": mixture(files["text.txt"], files["other.txt"])[:1]},
        STAGE,
    ),
    "experts for a token": ("experts", {"config.model.moe.experts_per_token": 1}, INIT),
}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function of the name of a run, which returns its document and the sources; each run is made once."""
    made: dict[str, tuple[dict[str, Any], dict[str, str]]] = {}
    claim = lifecycle.claim_attempt

    def make(name: str) -> tuple[dict[str, Any], dict[str, str]]:
        if name not in made:
            root = tmp_path_factory.mktemp(name)
            files = write_sources(root)
            document = merge(make_gpt_document(root / "run", **TINY), RUNS[name](files))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(lifecycle, "claim_attempt", claim)
                stop_after(JOBS.get(name, PretrainGPT)(ExecutionSpec.model_validate(document)), STEP)
            made[name] = document, files
        document, files = made[name]
        return copy.deepcopy(document), files

    return make


def start(document: dict[str, Any], name: str) -> None:
    """Start the job of a document up to the claim, which is `AcceptedError`."""
    JOBS.get(name, PretrainGPT)(ExecutionSpec.model_validate(document))()


# One of each kind of advice daily.
DAILY = ("a rate", "mixture for source", "seed", "without a stage")


@pytest.mark.daily(2)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in DAILY else soak) for case in (*REFUSALS, *SOAK_REFUSALS)]
)
def test_a_refusal_advises_what_is_accepted(case: str, stopped: Any) -> None:
    name, changes, advised = (REFUSALS | SOAK_REFUSALS)[case]
    former, files = stopped(name)
    changed = merge(copy.deepcopy(former), changes(files) if callable(changes) else changes)
    with pytest.raises(InvalidError, match="another trajectory") as caught:
        start(changed, name)
    found = re.search(r" set (config\.stages|checkpoint\.\w+): (.*)$", str(caught.value))
    assert (found[1] if found else NOTHING) == advised, str(caught.value)
    if found is None:
        return
    assert not re.search(r"\{'|None|[0-9a-f]{64}", str(caught.value)), "internal notation"
    value, section = yaml.safe_load(found[2]), found[1].partition(".")[0]
    # A stage leaves the former values.
    document = former if section == "config" else changed
    if section == "checkpoint":
        document["directory"] += " of another run"
    with pytest.raises(AcceptedError):
        start(merge(document, {found[1]: value}), name)


def test_a_finished_run_is_advised_a_longer_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = make_gpt_document(tmp_path / "run", **TINY)
    with monkeypatch.context() as patch:
        patch.setattr(lifecycle, "claim_attempt", claim_attempt)
        PretrainGPT(ExecutionSpec.model_validate(document))()
    total = document["config"]["train"]["total_steps"]
    with pytest.raises(InvalidError, match="another trajectory") as caught:
        start(merge(copy.deepcopy(document), {"config.optimizer.learning_rate": 2e-3}), "text")
    found = re.search(r" set config\.stages: (.*)$", str(caught.value))
    assert found is not None, str(caught.value)
    stages = yaml.safe_load(found[1])
    assert stages == [{"from_step": total, "set": {"optimizer.learning_rate": 0.002, "train.total_steps": 2 * total}}]
    with pytest.raises(AcceptedError):
        start(merge(document, {"config.stages": stages}), "text")


def test_ranges_and_stages_may_change_where_the_refusal_says(stopped: Any) -> None:
    former, _ = stopped("text")
    for key, early, late in (
        ("config.train.skip_steps", [[1, 2]], lambda step: [[step, step + 1]]),
        (
            "config.stages",
            [{"from_step": 1, "set": {"optimizer.weight_decay": 0.3}}],
            lambda step: [{"from_step": step, "set": {"optimizer.weight_decay": 0.3}}],
        ),
    ):
        with pytest.raises(InvalidError, match=r"may .*at step|may change from step") as caught:
            start(merge(copy.deepcopy(former), {key: early}), "text")
        step = int(re.findall(r"step (\d+)", str(caught.value))[-1])
        with pytest.raises(AcceptedError):
            start(merge(copy.deepcopy(former), {key: late(step)}), "text")


def test_a_stage_may_leave_keys_unread_that_an_earlier_one_reads(stopped: Any) -> None:
    former, files = stopped("text")
    ids = {"data.source": files["ids.bin"], "data.dtype": "uint16"}
    # A tokenizer that a later stage cannot set must not be refused there.
    document = merge(
        former,
        {
            "directory": former["directory"] + " new",
            "config.data.tokenizer": "characters",
            "config.data.document_separator": "newline",
            "config.model.vocabulary_size": 300,
            "config.stages": [
                {"from_step": 4, "set": ids},
                {"from_step": 5, "set": {"data.mixture": mixture(files["ids.bin"])}},
            ],
        },
    )
    with pytest.raises(InvalidError, match=r"tokenizer=characters gives every source its own ids"):
        start(document, "text")
    del document["config"]["stages"][1]
    with pytest.raises(AcceptedError):
        start(document, "text")


def test_weights_of_other_shapes_are_refused_before_the_claim(stopped: Any) -> None:
    former, _ = stopped("text")
    run = former["directory"]
    for key, value, fits in (("config.model.layers", 2, False), ("config.model.dropout", 0.1, True)):
        changes = {"directory": f"{run} {key}", key: value, "checkpoint.init_from": run}
        with pytest.raises(AcceptedError if fits else InvalidError, match=None if fits else "does not fit this job"):
            start(merge(copy.deepcopy(former), changes), "text")


# Advice of validators: (overrides that are refused, words of the message, overrides that it advises besides).
BASE = """\
config:
  model: {layers: 1, heads: 2, width: 16}
  data: {source: x.txt, sequence_length: 16}
  train: {total_steps: 20, global_batch_examples: 16}
"""
MIXTURE = "data.mixture=[{name: a, source: a.txt}, {name: b, source: b.txt}]"
VALIDATORS: list[tuple[list[str], str, list[str]]] = [
    ([MIXTURE, "data.source=x.txt"], "move source into the sources", ["data.source=python-stdlib"]),
    ([MIXTURE, "data.source=python-stdlib", "data.tokenizer=characters"], "use bytes", ["data.tokenizer=bytes"]),
    (["precision.rounding=stochastic"], "use params: bfloat16", ["precision.params=bfloat16"]),
    (["precision.gradient_rounding=stochastic"], "use matmul: int8", ["precision.matmul=int8"]),
    (["memory.loss_chunk_positions=5"], "use 4 or 8", ["memory.loss_chunk_positions=4"]),
    (["memory.loss_chunk_positions=5"], "use 4 or 8", ["memory.loss_chunk_positions=8"]),
    (["train.same_bits_devices=4"], "needs micro_batch_examples", ["train.micro_batch_examples=1"]),
    (
        ["train.same_bits_devices=4", "train.micro_batch_examples=1", "optimizer={name: galore, learning_rate: 0.1}"],
        "such as adamw",
        ["optimizer={name: adamw, learning_rate: 0.1}"],
    ),
    (["schedule={name: wsd}"], "give the steps of its decay", ["schedule.decay_steps=5"]),
    (["ema={decays: [1.0]}"], "such as 0.999", ["ema.decays=[0.999]"]),
    (
        ["ema={decays: [0.9], evaluate: true}", "data.validation_fraction=0"],
        "set data.valid",
        ["data.validation_fraction=0.1"],
    ),
    (["stability={max_consecutive_skips: 5}"], "set skip_update or non_finite", ["stability.non_finite=skip"]),
    (
        ["train={total_epochs: 2.0, global_batch_examples: 16}", MIXTURE, "data.source=python-stdlib"],
        "use total_steps",
        ["train={total_steps: 20, global_batch_examples: 16}"],
    ),
    (["train.skip_steps=[[3, 2]]"], "write [first, end]", ["train.skip_steps=[[2, 3]]"]),
    (["data.sequence_length=null"], "missing key sequence_length", ["data.sequence_length=16"]),
    (["data.tokenise={}", "data.tokenizer=characters"], "leave it out", ["data.tokenizer=bytes"]),
]


@pytest.mark.parametrize(("given", "words", "advised"), VALIDATORS, ids=[words for _, words, _ in VALIDATORS])
def test_the_advice_of_a_validator_is_accepted(given: list[str], words: str, advised: list[str]) -> None:
    def validate(*overrides: str) -> TrainerConfig[Any]:
        prefixed = [f"config.{override}" for override in overrides]
        return validate_config(parse_document(BASE, "x.yaml", prefixed), PretrainGPT.Config)

    with pytest.raises(InvalidError, match=re.escape(words)):
        validate(*given)
    validate(*given, *advised)
