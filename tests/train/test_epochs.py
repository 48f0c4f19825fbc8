"""Length of a run in epochs: it is converted to steps once the data is loaded, and gives the same run."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runner.cli.app import run_command
from runner.distributed.agreement import Hosts
from runner.errors import InvalidError, PreemptedError, SpecError
from runner.plan.preflight import PlanRequest, plan
from runner.spec import dump_spec
from tests.data.datasets import write_bin
from tests.inference.test_commands import capture_command
from tests.support.tiny_jobs import StopAfter, make_counter, make_gpt, read_rows
from tests.test_values import TrainLookup

EXAMPLES, BATCH, LENGTH = 102, 8, 16
EPOCHS = 0.5
STEPS = math.ceil(EPOCHS * EXAMPLES / BATCH)
SETTINGS: dict[str, Any] = {
    "job": "tests.test_values:TrainLookup",
    "config.model.vocabulary_size": 256,
    "config.schedule": {"name": "cosine", "warmup_share": 0.3},
    "config.train": {"global_batch_examples": BATCH, "total_epochs": EPOCHS},
    "checkpoint.every_steps": 2,
}


def job(tmp_path: Path, name: str, **changes: Any) -> TrainLookup:
    data = tmp_path / "data.bin"
    if not data.exists():
        write_bin(data, np.arange(EXAMPLES * LENGTH + 1) % 256)
    source = {"source": str(data), "sequence_length": LENGTH, "validation_fraction": 0}
    return make_gpt(tmp_path / name, TrainLookup, **SETTINGS | {"config.data": source} | changes)


def test_epochs_give_the_same_run_as_steps_and_resume_bit_identically(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    steps = {"config.train": {"global_batch_examples": BATCH, "total_steps": STEPS}}
    job(tmp_path, "steps", **steps)()
    stopped = job(tmp_path, "run")
    with pytest.raises(PreemptedError):
        stopped(Hosts.single_process(), StopAfter(stopped, 3))
    job(tmp_path, "run")()
    assert (tmp_path / "run" / "result.json").read_bytes() == (tmp_path / "steps" / "result.json").read_bytes()
    assert job(tmp_path, "run").done
    assert not job(tmp_path, "run", **{"config.train.total_epochs": 1}).done
    capfd.readouterr()
    run_command(["status", str(tmp_path / "run")])
    assert f"step {STEPS} of {STEPS}" in capfd.readouterr().out
    (tmp_path / "data.bin").unlink()
    assert capture_command(capfd, tmp_path / "run", "--tokens", 4)[0] == 0, "read-only commands need no data"


@pytest.mark.soak
def test_epochs_can_be_extended_if_no_schedule_depends_on_them(tmp_path: Path) -> None:
    constant = {"config.schedule": {"name": "constant"}}
    job(tmp_path, "run", **constant)()
    longer = job(tmp_path, "run", **constant | {"config.train.total_epochs": 0.6})
    longer()
    assert longer.step == math.ceil(0.6 * EXAMPLES / BATCH) > STEPS
    job(tmp_path, "other")()
    with pytest.raises(InvalidError, match=r"config\.train\.total_epochs: .* has 0\.5, the spec 2"):
        job(tmp_path, "other", **{"config.train.total_epochs": 2})()


def test_saves_and_evaluations_by_epochs_are_at_the_same_steps_after_a_resume_on_another_mesh(tmp_path: Path) -> None:
    source = {"source": str(tmp_path / "data.bin"), "sequence_length": LENGTH, "validation_fraction": 0.2}
    changes = {
        "config.data": source,
        "config.train": {"global_batch_examples": BATCH, "total_steps": 12},
        "config.schedule": {"name": "constant"},
        "config.eval": {"every_epochs": 0.5, "batches": 1, "at_end": False},
        "checkpoint": {"every_epochs": 0.2, "keep_last": 9},
        "logging.every_steps": 20,
    }
    del_steps = {key: value for key, value in SETTINGS.items() if key != "checkpoint.every_steps"}
    write_bin(tmp_path / "data.bin", np.arange(EXAMPLES * LENGTH + 1) % 256)
    stopped = make_gpt(tmp_path / "run", TrainLookup, **del_steps | changes)
    with pytest.raises(PreemptedError):
        stopped(Hosts.single_process(), StopAfter(stopped, 4))
    make_gpt(tmp_path / "run", TrainLookup, **del_steps | changes | {"topology.mesh": {"fsdp": 2}})()
    examples = stopped.dataset.num_train_examples
    steps = {every: [math.ceil(n * every * examples / BATCH) for n in range(1, 9)] for every in (0.2, 0.5)}
    saved = {int(path.parent.name) for path in (tmp_path / "run/checkpoints").glob("*/manifest.json")}
    assert saved == {step for step in steps[0.2] if step < 12} | {4, 12} > {3, 5, 7, 9, 11}
    rows = read_rows(tmp_path / "run")
    assert [row["step"] for row in rows if "val/loss" in row] == [step for step in steps[0.5] if step <= 12]


NO_EPOCHS: dict[str, tuple[dict[str, Any], str]] = {
    "sources": ({"mixture": [{"name": "a", "source": "x"}, {"name": "b", "source": "y"}]}, "2 sources"),
    "stages": ({}, "stages may have"),
}


@pytest.mark.parametrize("key", ["checkpoint.every_epochs", "config.eval.every_epochs"])
@pytest.mark.parametrize("kind", NO_EPOCHS)
def test_intervals_in_epochs_need_epochs_of_one_length(kind: str, key: str, tmp_path: Path) -> None:
    data, reason = NO_EPOCHS[kind]
    changes: dict[str, Any] = {"config.train": {"global_batch_examples": BATCH, "total_steps": 4}, key: 0.5}
    if kind == "sources":
        changes["config.data"] = data | {"sequence_length": LENGTH}
    else:
        changes["config.stages"] = [{"from_step": 1, "set": {"optimizer.learning_rate": 0.1}}]
    with pytest.raises(SpecError, match=f"every_epochs.*{reason}.*use every_steps"):
        job(tmp_path, "run", **changes)


def test_a_job_without_data_has_no_intervals_in_epochs(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"checkpoint\.every_epochs: Counter has no epochs; use every_steps"):
        make_counter(tmp_path / "run", **{"checkpoint.every_epochs": 1})


def test_plan_counts_epochs_or_reports_missing_data(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(dump_spec(job(tmp_path, "run").spec))
    assert plan(PlanRequest(str(spec))) == 0
    out = capfd.readouterr().out
    assert re.search(rf"^  steps +{STEPS}  counted$", out, re.MULTILINE), out
    (tmp_path / "data.bin").unlink()
    assert plan(PlanRequest(str(spec))) == 2
    out = capfd.readouterr().out
    assert out.count("problem:") == 1
    assert "data.bin" in out
