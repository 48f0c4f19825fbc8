"""Stages change the config of a run at steps that are known in advance, and stay part of its trajectory."""

import dataclasses
import json
import shutil
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from experiments.model.decoder import PretrainDecoder
from runner import BaseTrainer, ExecutionSpec, train_recipe
from runner.checkpoint.inspect import open_checkpoint
from runner.checkpoint.leaves import flatten_with_names
from runner.cli.app import run_command
from runner.config import TrainerConfig
from runner.data import Dataset
from runner.distributed.agreement import Hosts
from runner.errors import EXIT_DONE, InvalidError, SpecError
from runner.evaluation.generation import Sampler
from runner.inference.evaluate import EvaluationRequest, LossEvaluator, evaluate
from runner.inference.open_run import ReadOnlyRun, SampleRequest, open_run, sample
from runner.parallel.mesh import AXES, make_mesh
from runner.spec import SpecLocation, compute_trajectory
from runner.spec.document import parse_yaml
from runner.spec.model import Policy, list_keys
from runner.storage import JsonObject, LocalStore, read_log
from runner.train.program import Programs
from runner.train.stages import format_rounded_starts
from tests.data.datasets import write_bin
from tests.support.tiny_jobs import (
    get_job_name,
    make_gpt,
    make_gpt_document,
    read_outcome,
    read_trajectory,
    stop_after,
)
from tests.test_values import TrainLookup

STEPS = 14
BASE = "BASE"  # another run
SETTINGS: dict[str, Any] = {
    "job": "tests.test_values:TrainLookup",
    "config.model.vocabulary_size": 256,
    "config.schedule": {"name": "wsd", "warmup_steps": 2, "decay_steps": 3},
    "config.train": {"global_batch_examples": 8, "total_steps": STEPS},
    "config.eval": {"every_steps": 4, "batches": 1},
    "checkpoint.every_steps": 3,
    "logging.every_steps": 1,
}


def job(directory: Path, stages: list[dict[str, Any]] | None = None, **changes: Any) -> BaseTrainer:
    return make_gpt(directory, TrainLookup, **job_settings(directory) | {"config.stages": stages or []} | changes)


def job_settings(directory: Path) -> dict[str, Any]:
    for name, seed in {"a": 0, "b": 1, "c": 2}.items():
        path = directory.parent / f"{name}.bin"
        if not path.exists():
            write_bin(path, np.random.default_rng(seed).integers(256, size=4000))
    data = {
        "mixture": [source(directory, "a", 1), source(directory, "b", 1)],
        "sequence_length": 16,
        "validation_fraction": 0.1,
    }
    return SETTINGS | {"config.data": data}


def read_events(directory: Path, name: str) -> list[JsonObject]:
    return [event for event in read_log(LocalStore(directory), "events") if event["event"] == name]


def source(directory: Path, name: str, weight: float) -> dict[str, Any]:
    return {"name": name, "source": str(directory.parent / f"{name}.bin"), "weight": weight}


def three_stages(directory: Path) -> list[dict[str, Any]]:
    """Mixture; batch and sequence length; schedule."""
    return [
        {"from_step": 4, "set": {"data.mixture": [source(directory, "a", 3), source(directory, "b", 1)]}},
        {"from_step": 7, "set": {"train.global_batch_examples": 16, "data.sequence_length": 32}},
        {"from_step": 10, "set": {"schedule": {"name": "linear"}, "optimizer.weight_decay": 0.5}, "why": "anneal"},
    ]


# The daily theorems share the beginning of a run, which knew the first stage alone and stops at the second.
KNOWN, STOPPED_AT = 1, 7
SHORT: dict[str, Any] = {"config.eval": {"every_steps": None, "at_end": False}, "checkpoint.every_steps": 100}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("stages") / "stopped"
    stop_after(job(directory, three_stages(directory)[:KNOWN], **SHORT), STOPPED_AT)
    return directory


def test_a_stage_added_while_it_ran_gives_the_run_that_had_it_from_the_start(stopped: Path) -> None:
    stages, shorter = three_stages(stopped)[:2], SHORT | {"config.train.total_steps": 9}
    run, whole = stopped.with_name("run"), stopped.with_name("whole")
    shutil.copytree(stopped, run)
    # Its end may come earlier too, because the decay has not begun.
    for directory in (run, whole):
        job(directory, stages, **shorter, **{"config.schedule.decay_steps": 1})()
    assert read_outcome(run) == read_outcome(whole)
    assert [row["train/tokens"] for row in read_trajectory(whole)][5:9] == [768, 896, 1408, 1920]
    (changed,) = read_events(run, "spec_changed")
    assert changed["step"] == STOPPED_AT
    assert any(change.startswith("config.stages:") for change in changed["changes"])


@pytest.mark.soak
def test_stages_added_while_it_ran_give_the_run_that_had_them_from_the_start(tmp_path: Path) -> None:
    stages = three_stages(tmp_path / "whole")
    job(tmp_path / "whole", stages)()
    # One restart is at a border, and one right after another.
    for step, known in {4: 0, 8: 2}.items():
        stop_after(job(tmp_path / "run", stages[:known]), step)
    job(tmp_path / "run", stages)()
    assert read_outcome(tmp_path / "run") == read_outcome(tmp_path / "whole")
    rows = read_trajectory(tmp_path / "whole")
    assert [row["train/learning_rate"] for row in rows][10:] == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])
    starts = [(event["step"], event["number"], event["why"]) for event in read_events(tmp_path / "whole", "stage")]
    assert starts == [(4, 1, ""), (7, 2, ""), (10, 3, "anneal")]


class PatientPrograms(Programs):
    """Programs whose steps take longer than the compilation of the next stage."""

    def compile_next(self) -> None:
        super().compile_next()
        for thread in threading.enumerate():
            if thread.name.startswith("compile"):
                thread.join()


@pytest.mark.soak
@pytest.mark.parametrize("every_steps", [1, 3, None])
def test_nothing_is_compiled_on_the_main_thread_after_a_border(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every_steps: int | None
) -> None:
    monkeypatch.setattr(train_recipe, "Programs", PatientPrograms)
    compiled: list[tuple[int, int, str]] = []

    def count(event: str, *others: Any, **details: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append((patient.programs.current.plan.number, patient.step, threading.current_thread().name))

    evaluations = {"every_steps": every_steps, "batches": 2, "at_end": True}
    settings = job_settings(tmp_path / "run") | {"config.stages": three_stages(tmp_path / "run")}
    changes = {"config.eval": evaluations, "checkpoint.every_steps": 100}
    patient = make_gpt(tmp_path / "run", TrainLookup, **settings | changes)
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        patient()
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    # Fingerprints are compiled by the only save, which is the last.
    assert [step for _, step, name in compiled if 4 < step < STEPS and name == "MainThread"] == []
    # Each stage compiles the programs of the next one, with a validation step only if something is evaluated there.
    ahead = Counter(stage for stage, _, name in compiled if stage and name.startswith("compile"))
    assert ahead == ({1: 2, 2: 2} if every_steps else {1: 1, 2: 2})


@pytest.mark.soak
def test_a_run_of_three_stages_restarts_at_every_step(tmp_path: Path) -> None:
    job(tmp_path / "whole", three_stages(tmp_path / "whole"))()
    for step in range(1, STEPS):
        stop_after(job(tmp_path / "run", three_stages(tmp_path / "run")), step)
    job(tmp_path / "run", three_stages(tmp_path / "run"))()
    assert read_outcome(tmp_path / "run") == read_outcome(tmp_path / "whole")


class OwnBatchLookup(TrainLookup):
    """Job whose targets depend on the position of a batch in the data."""

    def batch(self, slice: str = "train", step: int | None = None) -> Any:
        batch = super().batch(slice, step)
        number = self.get_data_step(self.step if step is None else step) if slice == "train" else 0
        return batch | {"y": (batch["y"] + number) % 256}


SKIPS = {"config.train.skip_steps": [[3, 6], [9, 12]]}  # from before a border to behind it
# What runs beside stages: job class, changes, and values that the second stage sets besides.
NEIGHBOURS: dict[str, tuple[type[BaseTrainer], dict[str, Any], dict[str, Any]]] = {
    "adapter": (TrainLookup, {"config.adapter": {"rank": 4, "targets": ["Embed_*"]}, "checkpoint.init_from": BASE}, {}),
    "averages": (
        TrainLookup,
        {"config.ema": {"decays": [0.9], "evaluate": True}},
        {"ema.decays": [0.5]},
    ),
    "own batch": (OwnBatchLookup, SKIPS, {}),
    "skipped data": (TrainLookup, SKIPS, {}),
    "skipped updates": (
        TrainLookup,
        {"config.stability": {"skip_update": {"grad_norm_above": {"sigmas": 0.3, "over_steps": 3}}}},
        {},
    ),
    "rounding": (TrainLookup, {"config.precision": {"params": "bfloat16", "rounding": "stochastic"}}, {}),
}


@pytest.mark.soak
@pytest.mark.parametrize("name", NEIGHBOURS)
def test_stages_beside_a_neighbour_restart_around_their_borders(name: str, tmp_path: Path) -> None:
    job_class, changes, values = NEIGHBOURS[name]
    changes = SETTINGS | changes | {"job": get_job_name(job_class)}
    if changes.get("checkpoint.init_from") == BASE:
        job(tmp_path / "base", seed=3)()
        changes["checkpoint.init_from"] = str(tmp_path / "base")

    def make(directory: Path) -> BaseTrainer:
        stages = three_stages(directory)
        stages[1]["set"] |= values
        return make_gpt(directory, job_class, **job_settings(directory) | changes | {"config.stages": stages})

    make(tmp_path / "whole")()
    for step in (3, 4, 5, 7, 9, 10):
        stop_after(make(tmp_path / "run"), step)
    make(tmp_path / "run")()
    assert read_outcome(tmp_path / "run") == read_outcome(tmp_path / "whole")
    job(tmp_path / "plain", three_stages(tmp_path / "plain"))()
    assert read_outcome(tmp_path / "plain")[1]["fingerprint"] != read_outcome(tmp_path / "whole")[1]["fingerprint"]


@pytest.mark.soak
def test_a_fork_inside_a_stage_ends_as_its_parent(tmp_path: Path) -> None:
    kept = {"checkpoint": {"every_steps": 1, "keep_last": 99}}
    stages = three_stages(tmp_path / "parent")
    job(tmp_path / "parent", stages, **kept)()
    rows, result = read_outcome(tmp_path / "parent")
    # At a border, behind it, and inside of the second stage.
    for step in (7, 8, 9):
        fork = {"checkpoint.fork_from": {"run": str(tmp_path / "parent"), "step": step}}
        stop_after(job(tmp_path / f"fork-{step}", stages, **kept | fork), step + 1)
        job(tmp_path / f"fork-{step}", stages, **kept)()
        assert read_outcome(tmp_path / f"fork-{step}") == ([row for row in rows if row["step"] > step], result)


@pytest.mark.soak
def test_a_fork_that_adds_a_stage_ends_as_the_run_to_which_it_was_added(tmp_path: Path) -> None:
    kept = {"checkpoint": {"every_steps": 1, "keep_last": 99}}
    stages = three_stages(tmp_path / "parent")
    job(tmp_path / "parent", stages[:2], **kept)()
    job(tmp_path / "whole", stages, **kept)()
    rows, result = read_outcome(tmp_path / "whole")
    # Inside of the second stage and at the border to the third, which need not be listed.
    for step in (8, 10):
        fork = {"checkpoint.fork_from": {"run": str(tmp_path / "parent"), "step": step}}
        job(tmp_path / f"fork-{step}", stages, **kept | fork)()
        assert read_outcome(tmp_path / f"fork-{step}") == ([row for row in rows if row["step"] > step], result)
    late = {"checkpoint.fork_from": {"run": str(tmp_path / "parent"), "step": 11}}
    with pytest.raises(InvalidError, match=r"changes: \[config.stages"):
        job(tmp_path / "late", stages, **kept | late)()
    assert not (tmp_path / "late").exists()


DECAY = {"optimizer.weight_decay": 0.5}
# What a run had, what it has now, and the first step that is followed by another update; None: there is none.
CHANGES: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any], int | None]] = {
    "added": ([], [{"from_step": 8, "set": DECAY}], {}, 8),
    "removed": ([{"from_step": 8, "set": DECAY}], [], {}, 8),
    "shifted": ([{"from_step": 8, "set": DECAY}], [{"from_step": 6, "set": DECAY}], {}, 6),
    "the same, written otherwise": (
        [{"from_step": 8, "set": {"schedule": {"name": "linear"}}}],
        [{"from_tokens": 1000, "set": {"schedule": {"name": "linear", "final_learning_rate": 0.0}}, "why": "decay"}],
        {},
        None,
    ),
    "without effect": ([], [{"from_step": 8, "set": {"optimizer.weight_decay": 0.1}}], {}, None),
    "free key": ([], [{"from_step": 3, "set": {"memory.remat": "none", "train.micro_batch_examples": 1}}], {}, None),
    "other rate": ([], [{"from_step": 5, "set": {"optimizer.learning_rate": 5e-4}}], {}, 5),
    "the same rate": ([], [{"from_step": 5, "set": {"optimizer.learning_rate": 1e-3}}], {}, None),
    "schedule that begins with the same rate": ([], [{"from_step": 5, "set": {"schedule": {"name": "linear"}}}], {}, 6),
    "longer total in a stage": (
        [],
        [{"from_step": 5, "set": {"train.total_steps": 20, "schedule": {"name": "wsd", "decay_steps": 3}}}],
        {},
        12,
    ),
    "base changed behind a stage that covers it": (
        [{"from_step": 1, "set": DECAY}],
        [{"from_step": 1, "set": DECAY}],
        {"config.optimizer.weight_decay": 0.2},
        0,
    ),
    "second stage changed": (
        [{"from_step": 3, "set": DECAY}, {"from_step": 9, "set": {"optimizer.b2": 0.9}}],
        [{"from_step": 3, "set": DECAY}, {"from_step": 9, "set": {"optimizer.b2": 0.8}}],
        {},
        9,
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_the_first_changed_step_is_found_over_stages(tmp_path: Path, case: str) -> None:
    former, stages, changes, first = CHANGES[case]
    saved, present = job(tmp_path / "run", former), job(tmp_path / "run", stages, **changes)
    identity = json.loads(json.dumps(compute_trajectory(saved.spec, saved.config)))
    run_identity = present.make_run_identity(compute_trajectory(present.spec, present.config))
    for step in {0, 1, STEPS - 1} | (set() if first is None else {first, first + 1}):
        assert run_identity.is_continued(identity, step) == (first is None or max(step, 1) <= first), step


# Stages, and words of the message.
BAD: dict[str, tuple[list[dict[str, Any]], str]] = {
    "out of order": ([{"from_step": 5, "set": DECAY}, {"from_step": 3, "set": DECAY}], "1.from_step.*in order"),
    "two at one step": ([{"from_step": 5, "set": DECAY}, {"from_step": 5, "set": DECAY}], "1.from_step.*make one"),
    "beyond the total": ([{"from_step": STEPS, "set": DECAY}], "0.from_step.*ends at step 14"),
    "fixed key": ([{"from_step": 5, "set": {"precision.compute": "bfloat16"}}], "precision.compute.*may not change"),
    "nearly a key": ([{"from_step": 5, "set": {"optimizer.weight_decai": 1}}], "mean optimizer.weight_decay"),
    "bad value": ([{"from_step": 5, "set": {"optimizer.b1": 2.0}}], "0.set.optimizer.b1.*below 1"),
    "bad total": ([{"from_step": 5, "set": {"train.total_steps": "x"}}], "0.set.train.total_steps.*whole number"),
    "bad part": ([{"from_step": 5, "set": {"data.mixture.5.weight": 1}}], "0.set.data.mixture.5.weight.*0 to 1"),
    "no start": ([{"set": DECAY}], "exactly one of from_step"),
    "two starts": ([{"from_step": 5, "from_tokens": 5, "set": DECAY}], "exactly one of from_step"),
    "nothing to set": ([{"from_step": 5, "set": {}}], "set"),
    "long warm-up": ([{"from_step": 10, "set": {"schedule.warmup_steps": 4}}], "0.set.*from step 10 on.*total of 4"),
    "unread key": ([{"from_step": 5, "set": {"optimizer.momentum": 0.5}}], "0.set.optimizer.momentum.*does not read"),
    "batch that does not divide": ([{"from_step": 5, "set": {"train.global_batch_examples": 7}}], "0.set.*8 devices"),
    "missing data": (
        [{"from_step": 5, "set": {"data.mixture": [{"name": "x", "source": "/no/such.bin"}]}}],
        "0.set.*such.bin",
    ),
    "other state": (
        [{"from_step": 5, "set": {"optimizer.groups": [{"pattern": "bias", "frozen": True}]}}],
        "0.set.*shape of the state.*opt_state",
    ),
    "rate of nothing": (
        [
            {"from_step": 5, "set": {"schedule": {"name": "linear"}, "train.total_steps": 8}},
            {"from_step": 8, "set": {"schedule": {"name": "linear"}, "train.total_steps": 14}},
        ],
        "1.set.schedule.*reached 0 at step 8",
    ),
    "after the end of those before": (
        [
            {"from_step": 5, "set": {"train.total_steps": 8}},
            {"from_step": 9, "set": {"train.total_steps": 14}},
        ],
        "1.from_step.*ends at step 8",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_stage_is_named_and_nothing_is_written(tmp_path: Path, case: str) -> None:
    stages, words = BAD[case]
    with pytest.raises(SpecError, match=words) as caught:
        job(tmp_path / "run", stages)()
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("decays", [[0.5], [0.5, 0.6, 0.7]])
def test_a_stage_needs_a_decay_for_each_average_of_the_run(tmp_path: Path, decays: list[float]) -> None:
    stages = [{"from_step": 5, "set": {"ema.decays": decays}}]
    with pytest.raises(
        SpecError, match=r"config\.stages\.0\.set: .*ema: decays has . entries, and the run keeps 2 averages"
    ):
        job(tmp_path / "run", stages, **{"config.ema": {"decays": [0.9, 0.99]}})()
    assert not (tmp_path / "run").exists()


def test_the_past_is_fixed(stopped: Path) -> None:
    (stage,) = three_stages(stopped)[:KNOWN]
    for others in ([], [stage | {"from_step": 3}], [stage | {"from_step": 6}]):
        with pytest.raises(InvalidError, match=r"(?s)config.stages.*another trajectory"):
            job(stopped, others, **SHORT)()


# The schedule of a run of 14 steps, the step that it has reached, and what is asked of it then.
REFUSED: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "longer cosine": ({"name": "cosine", "warmup_steps": 2}, 5, {"config.train.total_steps": 20}),
    "longer linear, at its end": ({"name": "linear"}, STEPS, {"config.train.total_steps": 20}),
    "decay and rate": ({"name": "constant"}, 5, {"config.optimizer.weight_decay": 0.7, "config.optimizer.b2": 0.9}),
    "rate": ({"name": "constant"}, 5, {"config.optimizer.learning_rate": 5e-4}),
    "batch": ({"name": "constant"}, 5, {"config.train.global_batch_examples": 16}),
    "weight": ({"name": "constant"}, 5, {"config.data.mixture.1.weight": 3.0}),
}


@pytest.mark.soak
@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_prints_the_stage_that_does_it(tmp_path: Path, case: str) -> None:
    schedule, step, changes = REFUSED[case]
    base = {"config.schedule": schedule}
    if step < STEPS:
        stop_after(job(tmp_path / "run", **base), step)
    else:
        job(tmp_path / "run", **base)()
    asked = make_gpt_document(tmp_path / "run", **job_settings(tmp_path / "run") | base | {"config.stages": []})
    for key, value in changes.items():
        section: Any = asked
        *parents, last = key.split(".")
        for parent in parents:
            section = section[int(parent) if isinstance(section, list) else parent]
        section[last] = value
    with pytest.raises(InvalidError, match="another trajectory") as caught:
        TrainLookup(ExecutionSpec.model_validate(asked))()
    line = str(caught.value).splitlines()[-1]
    (stage,) = parse_yaml(line.partition("config.stages: ")[2], lambda line: SpecLocation(str(line)))[0]
    assert stage["from_step"] == step
    job(tmp_path / "run", [stage], **base)()
    assert len(read_trajectory(tmp_path / "run")) == changes.get("config.train.total_steps", STEPS)


# Changes that no stage makes, and what the fork that makes them lists. None: no fork can, but another run with the
# weights; NOTHING: these do not fit either.
NOTHING = ["nothing"]
FORKED: dict[str, tuple[dict[str, Any], list[str] | None]] = {
    "seed": ({"seed": 3}, ["seed", "config.data", "config.stages"]),
    "with a key of stages": (
        {"seed": 3, "config.optimizer.weight_decay": 0.3},
        ["seed", "config.optimizer.weight_decay", "config.data", "config.stages"],
    ),
    "split of the data": (
        {"config.data.validation_fraction": 0.2},
        ["config.data.validation_fraction", "config.stages"],
    ),
    "type of the matmuls": ({"config.precision.compute": "bfloat16"}, ["config.precision.compute"]),
    "optimizer": ({"config.optimizer": {"name": "lion", "learning_rate": 1e-3}}, None),
    "type of the parameters": ({"config.precision.params": "bfloat16"}, NOTHING),
    "vocabulary": ({"config.model.vocabulary_size": 320}, NOTHING),
    "average": ({"config.ema": {"decays": [0.9]}}, None),
    "policy": ({"config.stability": {"non_finite": "skip"}}, None),
}


@pytest.mark.daily(4)
@pytest.mark.parametrize("case", FORKED)
def test_a_refusal_without_a_stage_prints_the_fork(stopped: Path, case: str) -> None:
    changes, listed = FORKED[case]
    with pytest.raises(InvalidError, match="another trajectory") as caught:
        job(stopped, three_stages(stopped)[:KNOWN], **SHORT | changes)()
    assert "config.stages: [" not in str(caught.value)
    if listed is NOTHING:
        assert str(caught.value).endswith("; use another directory")
        return
    _, _, fork = str(caught.value).partition("checkpoint.fork_from: ")
    if listed is None:
        assert not fork
        assert str(caught.value).endswith(f"checkpoint.init_from: {stopped}/checkpoints/{STOPPED_AT}")
    else:
        parsed = parse_yaml(fork, lambda line: SpecLocation(str(line)))[0]
        assert parsed == {"run": str(stopped), "step": STOPPED_AT, "changes": listed}


@pytest.mark.soak
@pytest.mark.parametrize("case", [case for case, (_, listed) in FORKED.items() if listed not in (None, NOTHING)])
def test_a_printed_fork_works(stopped: Path, case: str) -> None:
    changes, listed = FORKED[case]
    fork = {"run": str(stopped), "step": STOPPED_AT, "changes": listed}
    directory = stopped.with_name(f"fork, {case}")
    job(directory, three_stages(stopped)[:KNOWN], **SHORT | changes | {"checkpoint.fork_from": fork})()
    assert read_trajectory(directory)[0]["step"] == STOPPED_AT + 1


# Keys of a section with state that a fork may change all the same, each with values before and after.
GALORE = {"config.optimizer.name": "galore", "config.optimizer.matrices": ["*embedding"]}
WITHOUT_STATE: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "optimizer.projection_every_steps": (GALORE, 100, 7),
    "optimizer.projection_scale": (GALORE, 0.25, 0.5),
    "precision.compute": ({}, "float32", "bfloat16"),
    "precision.matmul": ({}, "int8", "float8"),
    "precision.gradient_rounding": ({"config.precision.matmul": "int8"}, "nearest", "stochastic"),
    "precision.rounding": ({"config.precision.params": "bfloat16"}, "nearest", "stochastic"),
    "adapter.alpha": (
        {"config.adapter": {"rank": 4, "targets": ["Embed_*"]}, "checkpoint.init_from": "runs/base"},
        16.0,
        8.0,
    ),
    "stability.skip_update.grad_norm_above.sigmas": ({}, 6.0, 3.0),
    "stability.skip_update.loss_above.sigmas": ({}, 6.0, 3.0),
}


def test_every_key_without_state_has_a_case() -> None:
    assert set(WITHOUT_STATE) == set(list_keys(TrainerConfig, Policy.NO_STATE))


@pytest.mark.parametrize("key", WITHOUT_STATE)
def test_a_key_that_a_fork_may_change_leaves_the_state_as_it_is(tmp_path: Path, key: str) -> None:
    settings, *values = WITHOUT_STATE[key]
    # A lookup has no matmuls in layers.
    make = make_gpt if "config.precision.matmul" in {f"config.{key}", *settings} else job
    jobs = [make(tmp_path / "run", **settings | {f"config.{key}": value}) for value in values]
    before, after = (
        {name: (leaf.shape, leaf.dtype) for name, leaf in flatten_with_names(state).items()}
        for state in (each.setup_builder.build(jax.devices()).abstract_state for each in jobs)
    )
    assert before == after
    trajectories = [compute_trajectory(each.spec, each.config) for each in jobs]
    assert [each[f"config.{key}"] for each in trajectories] == values


@pytest.mark.parametrize(
    ("policy", "key", "values"),
    [
        ({"non_finite": "skip"}, "max_consecutive_skips", (100, 5)),
        ({"roll_back": {"skip_examples": 8}}, "roll_back.at_most", (3, 9)),
    ],
)
def test_a_limit_of_the_policy_is_no_part_of_the_trajectory(
    tmp_path: Path, policy: dict[str, Any], key: str, values: tuple[int, int]
) -> None:
    changes = [{"config.stability": policy, f"config.stability.{key}": value} for value in values]
    first, second = (job(tmp_path / "run", **each) for each in changes)
    assert compute_trajectory(first.spec, first.config) == compute_trajectory(second.spec, second.config)
    assert first.config != second.config


def count_sources(data: Dataset, first: int, count: int) -> list[tuple[str, int]]:
    """Return source and index in its training tokens of each example of a stage, as reading finds them."""
    sources, indices = data._mixture.locate(first, count)
    trains = [data.train_sources[source] for source in sources]
    found = zip(trains, indices.tolist(), strict=True)
    return [(train.source.fingerprint, train.order[train.first_example + index]) for train, index in found]


def test_data_skipped_around_a_border_are_those_of_its_stages(tmp_path: Path) -> None:
    """A run reads and skips together what a run without ranges reads, source by source and in its order."""
    stages = [
        {"from_step": 20, "set": {"data.mixture.0.weight": 3.0}},
        {"from_step": 50, "set": {"train.global_batch_examples": 16}},
    ]
    skips = [[18, 23], [49, 50], [50, 53], [58, 60]]
    run = job(tmp_path / "run", stages, **{"config.train.total_steps": 70, "config.train.skip_steps": skips})
    followed: dict[str, int] = {}
    for stage in run.programs.plans:
        data, batch = run.programs.get_dataset(stage.number), stage.config.train.global_batch_examples
        drawn = [run.programs.locate_batch(step) for step in range(stage.start, stage.stop)]
        assert {each.plan.number for each, _ in drawn} == {stage.number}
        numbers = [number for _, number in drawn]
        own = {start: stop - start for start, stop in skips if stage.start <= start < stage.stop}
        assert numbers == [
            step - stage.start + sum(number for start, number in own.items() if start <= step)
            for step in range(stage.start, stage.stop)
        ]
        # A stretch behind the last step of a stage would lie ahead of it, so all were counted.
        for train in data.train_sources:
            assert train.first_example == followed.get(train.source.fingerprint, 0)
        for fingerprint, _ in count_sources(data, 0, (numbers[-1] + 1) * batch):
            followed[fingerprint] = followed.get(fingerprint, 0) + 1


@pytest.mark.parametrize("packing", ["concatenate", "pad"])
def test_each_example_of_each_source_is_taken_once_in_an_epoch(tmp_path: Path, packing: str) -> None:
    """1:1, then 3:1, then a new source instead of the second, then the second again under another name."""
    stages = [
        {"from_step": 20, "set": {"data.mixture.0.weight": 3.0}},
        {
            "from_step": 50,
            "set": {"data.mixture.1": source(tmp_path / "run", "c", 1), "train.global_batch_examples": 16},
        },
        {"from_step": 60, "set": {"data.mixture": [source(tmp_path / "run", "b", 1) | {"name": "again"}]}},
    ]
    run = job(tmp_path / "run", stages, **{"config.train.total_steps": 90})
    seen: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    for stage in run.programs.plans:
        data, batch = run.programs.get_dataset(stage.number), stage.config.train.global_batch_examples
        sizes |= {train.source.fingerprint: train.examples.num_examples for train in data.train_sources}
        for fingerprint, index in count_sources(data, 0, (stage.stop - stage.start) * batch):
            seen.setdefault(fingerprint, []).append(index)
    assert len(seen) == 3
    for fingerprint, indices in seen.items():
        size = sizes[fingerprint]
        epochs = [indices[first : first + size] for first in range(0, len(indices), size)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs[:-1])
        assert len(set(epochs[-1])) == len(epochs[-1])
    assert {len(indices) // sizes[fingerprint] for fingerprint, indices in seen.items()} > {0, 1}


def uneven(directory: Path) -> dict[str, Any]:
    """Return a mixture whose interleaving has a period that does not divide the batch."""
    mixture = [source(directory, "a", 3), source(directory, "b", 2)]
    return {"config.data": job_settings(directory)["config.data"] | {"mixture": mixture}}


# Stages that change no value of the data, and so no example of any step.
DATA_KEPT: dict[str, list[dict[str, Any]]] = {
    "the same value": [{"from_step": 5, "set": {"optimizer.weight_decay": 0.1}}],
    "another value": [{"from_step": 5, "set": DECAY}],
    "free keys": [
        {"from_step": 5, "set": {"memory.remat": "none"}},
        {"from_step": 7, "set": {"train.micro_batch_examples": 1}},
    ],
    "the same rate": [{"from_step": 5, "set": {"optimizer.learning_rate": 1e-3}}],
    "the same total": [{"from_step": 3, "set": {"train.total_steps": STEPS}}],
    "another total": [{"from_step": 3, "set": {"train.total_steps": 90}}],
    "the same batch": [{"from_step": 1, "set": {"train.global_batch_examples": 8}}],
    "the same weight": [{"from_step": 6, "set": {"data.mixture.0.weight": 3.0}}],
    "the same length": [{"from_step": 6, "set": {"data.sequence_length": 16}}],
    "limit of epochs": [{"from_step": 6, "set": {"data.mixture.0.max_epochs": 99.0}}],
    "at every step": [{"from_step": step, "set": DECAY} for step in range(1, STEPS)],
}


def list_examples(run: BaseTrainer) -> list[list[tuple[str, int]]]:
    """Return the examples of each step, and the tokens of each source after it."""
    listed: list[Any] = []
    for step in range(STEPS):
        stage, number = run.programs.locate_batch(step)
        data, batch = run.programs.get_dataset(stage.plan.number), stage.plan.config.train.global_batch_examples
        counted = run.programs.count_examples(stage.plan.number, step + 1)
        listed.append((count_sources(data, number * batch, batch), data.compute_metrics(*counted)))
    return listed


@pytest.mark.parametrize("skips", [[], [[4, 6]]], ids=["plain", "skips"])
@pytest.mark.parametrize("case", DATA_KEPT)
def test_a_stage_that_changes_no_data_moves_none(tmp_path: Path, case: str, skips: list[list[int]]) -> None:
    changes = {"config.train.skip_steps": skips} | uneven(tmp_path / "run")
    expected = list_examples(job(tmp_path / "plain", **changes))
    assert list_examples(job(tmp_path / "run", DATA_KEPT[case], **changes)) == expected
    # Behind a border with other data, too.
    others = [{"from_step": 2, "set": {"data.mixture.0.weight": 5.0}}]
    if DATA_KEPT[case][0]["from_step"] > 2 and case != "the same weight":
        changed = list_examples(job(tmp_path / "run", others, **changes))
        assert changed != expected
        assert list_examples(job(tmp_path / "run", [*others, *DATA_KEPT[case]], **changes)) == changed


@pytest.mark.soak
def test_a_stage_that_changes_nothing_comes_and_goes_behind_the_newest_step(tmp_path: Path) -> None:
    changes = SHORT | uneven(tmp_path / "run")
    job(tmp_path / "whole", **changes)()
    stop_after(job(tmp_path / "run", **changes), 8)
    kept = DATA_KEPT["the same value"]
    stop_after(job(tmp_path / "run", kept, **changes), 10)
    stop_after(job(tmp_path / "run", [kept[0] | {"from_step": 3}], **changes), 12)
    job(tmp_path / "run", **changes)()
    assert read_outcome(tmp_path / "run") == read_outcome(tmp_path / "whole")


def test_a_fork_from_before_a_stage_lists_its_own_changes_alone(tmp_path: Path) -> None:
    changes = SHORT | {"checkpoint.every_steps": 4, "checkpoint.keep_last": 9}
    stop_after(job(tmp_path / "run", **changes), 8)
    stages = [{"from_step": 8, "set": {"optimizer.weight_decay": 0.3}}]
    job(tmp_path / "run", stages, **changes)()
    fork = {"run": str(tmp_path / "run"), "step": 4, "changes": ["config.optimizer.b2"]}
    fork_changes = changes | {"checkpoint.fork_from": fork, "config.optimizer.b2": 0.9}
    forked = job(tmp_path / "fork", stages, **fork_changes)
    forked()
    assert forked.step == forked.total_steps
    # A stage that would have begun before the fork changes what is taken over.
    stages = [{"from_step": 2, "set": {"optimizer.weight_decay": 0.3}}]
    with pytest.raises(InvalidError, match=r"changes: \[config\.optimizer\.b2, config\.stages\]"):
        job(tmp_path / "other", stages, **fork_changes)()


@pytest.mark.soak
def test_a_run_whose_data_have_restarted_at_a_border_keeps_its_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier versions restarted the interleaving of sources at every border, and recorded no mark."""
    changes = SHORT | uneven(tmp_path / "run")
    stages = [{"from_step": step, "set": {"optimizer.weight_decay": 0.1}} for step in (3, 9)]
    with monkeypatch.context() as context:
        context.setattr(Programs, "continues_data", lambda sequence, number: not number)
        job(tmp_path / "whole", stages, **changes)()
        stop_after(job(tmp_path / "run", stages, **changes), 10)
    job(tmp_path / "plain", **changes)()
    assert read_outcome(tmp_path / "plain") != read_outcome(tmp_path / "whole")
    shutil.copytree(tmp_path / "run", tmp_path / "parent")
    for others in ([], stages[:1], [stages[0], stages[1] | {"from_step": 8}]):
        with pytest.raises(InvalidError, match="another trajectory: it differs from step"):
            job(tmp_path / "run", others, **changes)()
    stop_after(job(tmp_path / "run", stages, **changes), 12)
    # A stage that is added now continues the data.
    stages += [{"from_step": 12, "set": {"optimizer.weight_decay": 0.1}}]
    job(tmp_path / "run", stages, **changes)()
    assert read_outcome(tmp_path / "run") == read_outcome(tmp_path / "whole")
    # So does a fork.
    fork = {"checkpoint.fork_from": {"run": str(tmp_path / "parent"), "step": 10}}
    job(tmp_path / "fork", stages, **changes, **fork)()
    assert read_outcome(tmp_path / "fork")[1] == read_outcome(tmp_path / "whole")[1]


def test_tokens_of_a_run_are_the_sum_over_its_stages(tmp_path: Path) -> None:
    stages = [{"from_tokens": 500, "set": {"train.global_batch_examples": 16}}]
    run = job(tmp_path / "run", stages, **{"config.train": {"global_batch_examples": 8, "total_tokens": 2000}})
    # Four steps of 128 tokens, and then six of 256, rounded up.
    assert [run.config.count_units(step) for step in (0, 3, 4, 5, 10)] == [0, 384, 512, 768, 2048]
    assert (run.programs.plans[1].start, run.total_steps, run.programs.plans[0].config.total_steps) == (4, 10, 16)
    assert format_rounded_starts(run.config, run.programs.plans) == [
        "config.stages.0: 500 tokens are reached within step 4, so the stage begins after it, at 512 tokens"
    ]


RATE = {"optimizer.learning_rate": 5.0e-3}


@pytest.mark.parametrize(
    ("start", "keys", "is_idle"),
    [
        (20, {"train.total_steps": 30} | RATE, True),
        (20, {"train.total_steps": 30, "schedule": {"name": "constant"}} | RATE, False),
        (10, RATE, False),
    ],
    ids=["after the end", "with a schedule", "before the end"],
)
def test_a_rate_that_changes_no_step_is_named(start: int, keys: dict[str, Any], is_idle: bool, tmp_path: Path) -> None:
    changes = {
        "config.train": {"global_batch_examples": 8, "total_steps": 20},
        "config.schedule": {"name": "cosine", "warmup_steps": 2, "final_learning_rate": 1.0e-4},
    }
    run = job(tmp_path / "run", [{"from_step": start, "set": keys}], **changes)
    lines = run.programs.list_idle_rates()
    assert [line.partition(":")[0] for line in lines] == ["config.stages.0"] * is_idle
    assert all("set schedule in the stage too" in line for line in lines)


def test_a_batch_ramp_is_a_run_of_stages(tmp_path: Path) -> None:
    ramp = {"from_examples": 8, "over_steps": 5, "increments": 2}
    train = {"global_batch_examples": 24, "total_steps": STEPS, "batch_ramp": ramp}
    written = [{"from_step": 3, "set": {"train.global_batch_examples": 16}}]
    written += [{"from_step": 5, "set": {"train.global_batch_examples": 24}}]
    written += [{"from_step": 9, "set": DECAY}]
    short, long = job(tmp_path / "run", written[2:], **{"config.train": train}), job(tmp_path / "run", written)
    identities = [compute_trajectory(each.spec, each.config) for each in (short, long)]
    assert identities[0] == identities[1]
    assert [stage.key for stage in short.programs.plans] == ["", *["config.train.batch_ramp"] * 2, "config.stages.0"]
    tokens = train | {"batch_ramp": {"from_examples": 8, "over_tokens": 8 * 16 * 3, "increments": 1}}
    assert [stage.start for stage in job(tmp_path / "run", **{"config.train": tokens}).programs.plans] == [0, 3]


@pytest.mark.parametrize(
    ("ramp", "words"),
    [
        ({"from_examples": 8, "over_steps": 5, "increments": 3}, "use 2 or 4 increments"),
        ({"from_examples": 24, "over_steps": 5, "increments": 1}, "let the batch grow"),
        ({"from_examples": 8, "over_steps": 3, "increments": 4}, "has no room"),
        ({"from_examples": 8, "increments": 4}, "exactly one of over_steps"),
        ({"from_examples": 8, "over_steps": 5, "increments": 4}, r"batch_ramp.*global_batch_examples=12.*use 8 or 16"),
        ({"from_examples": 8, "over_steps": 20, "increments": 2}, r"batch_ramp.*run ends at step 14"),
    ],
)
def test_a_bad_ramp_is_named_before_the_start(tmp_path: Path, ramp: dict[str, int], words: str) -> None:
    train = {"global_batch_examples": 24, "total_steps": STEPS, "batch_ramp": ramp}
    with pytest.raises(SpecError, match=words) as caught:
        job(tmp_path / "run", **{"config.train": train})()
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "run").exists()


# Commands that read a checkpoint take the config of the stage that has made its step.

THETAS = {4: 10_000.0, 8: 20.0}  # by the last step with it
PROMPT = "7 squared is"


@pytest.fixture(scope="module")
def rotated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a run with a stage that changes the rotary positions."""
    directory = tmp_path_factory.mktemp("rotated") / "run"
    changes = {
        "job": "experiments.model.decoder:PretrainDecoder",
        "checkpoint": {"every_steps": 4, "keep_last": 9},
        "config.model": {"layers": 1, "heads": 2, "width": 16, "mlp_width": 24},
        "config.optimizer.learning_rate": 0.03,
        "config.eval": {"every_steps": 4, "batches": 2},
        "config.stages": [{"from_step": 4, "set": {"model.rope.theta": THETAS[8]}}],
    }
    make_gpt(directory, PretrainDecoder, **changes)()
    return directory


def compute_logits(run: ReadOnlyRun, step: int, theta: float, ids: list[int]) -> np.ndarray:
    """Return the logits after `ids` of the weights of a step with a given base of the rotary positions."""
    job = next(each for each in run.job.stage_jobs if each.config.model.rope.theta == theta)
    weights, _ = open_checkpoint(f"{run.directory}/checkpoints/{step}")
    return np.asarray(job.model().apply({"params": weights["params"]}, np.array([ids]), deterministic=True)[0, -1])


@pytest.mark.soak
@pytest.mark.parametrize("step", THETAS)
def test_samples_are_those_of_the_stage_of_a_checkpoint(rotated: Path, step: int) -> None:
    run = open_run(str(rotated))
    request = SampleRequest(PROMPT, str(step), num_tokens=4, sampling=Sampler(temperature=0.0))
    text = "".join(sample(run, request))
    ids = list(PROMPT.encode())
    for _ in range(4):
        own, other = (compute_logits(run, step, theta, ids) for theta in (THETAS[step], THETAS[12 - step]))
        assert np.abs(own - other).max() > 1e-3
        ids.append(int(own.argmax()))
    assert text == bytes(ids).decode() + "\n"


@pytest.mark.soak
def test_evaluations_are_those_of_the_stage_of_a_checkpoint(rotated: Path) -> None:
    run, hosts = open_run(str(rotated)), Hosts.single_process()
    losses = {record["step"]: record["loss"] for record in evaluate(run, EvaluationRequest(step=None), hosts)}
    rows = {row["step"]: row["val/loss"] for row in read_trajectory(rotated) if "val/loss" in row}
    assert losses == pytest.approx(rows, rel=1e-6)

    def make_evaluator(own: ReadOnlyRun) -> Any:
        mesh = make_mesh(dict.fromkeys(AXES, 1) | {"data": jax.device_count()})
        abstract = own.job.weights(own.job.setup_builder.build_on_mesh(mesh, jax.random.key(0)).abstract_state)
        theta = own.job.config.model.rope.theta
        return SimpleNamespace(
            abstract=abstract, weights="params", evaluate=lambda step, weights: {"step": step, "theta": theta}
        )

    found = evaluate(run, EvaluationRequest(step=None), hosts, make_evaluator)
    assert {record["step"]: record["theta"] for record in found} == THETAS
    with_the_other = {}
    for stage, step in enumerate(THETAS):
        job = run.job.stage_jobs[1 - stage]
        other = LossEvaluator(dataclasses.replace(run, job=job), None, hosts, "params")
        _, weights = run.load_found_weights(str(step), other.abstract, "params", hosts)
        with_the_other[step] = other.evaluate(step, weights)["loss"]  # type: ignore[index]
    assert all(abs(with_the_other[step] - rows[step]) > 1e-4 for step in THETAS)


@pytest.mark.soak
@pytest.mark.parametrize("step", THETAS)
def test_an_export_names_the_stage_of_a_checkpoint(rotated: Path, step: int, tmp_path: Path) -> None:
    assert run_command(["export", str(rotated), "--step", str(step), "-o", str(tmp_path / "out")]) == EXIT_DONE
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.get("rope_theta", config.get("rope_parameters", {}).get("rope_theta")) == THETAS[step]


def test_a_warning_about_data_is_printed_once_for_all_stages(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "text").mkdir()
    for name in ("a", "b"):
        (tmp_path / "text" / f"{name}.txt").write_text(f"text of {name} " * 400)
    data = {"source": str(tmp_path / "text" / "*.txt"), "sequence_length": 16, "validation_fraction": 0.1}
    stages = [{"from_step": step, "set": {"optimizer.weight_decay": 0.3}} for step in (4, 8)]
    settings = SETTINGS | {"config.data": data, "config.stages": stages}
    stop_after(make_gpt(tmp_path / "run", TrainLookup, **settings), 1)
    assert capsys.readouterr().err.count("validation takes the last 1 of 2 files by name") == 1
