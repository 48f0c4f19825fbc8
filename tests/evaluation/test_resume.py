"""Rows depend only on the trajectory: a kill or stop at any step leaves the same rows for every evaluator."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from runner import BaseTrainer
from runner.storage import LocalStore, read_json
from tests.support.bigram import BIGRAM_OPTIONS, EvaluatedBigramTrainer, read_trajectory, write_questions
from tests.support.tiny_jobs import make_gpt, stop_after

STEPS = 12


class KilledError(Exception):
    """Simulated kill of the process."""


def make_changes(directory: Path) -> dict[str, Any]:
    return BIGRAM_OPTIONS | {
        "config.train.total_steps": STEPS,
        "config.eval.every_steps": 4,
        "config.eval.at_start": True,
        "config.eval.at_end": True,
        "config.eval.bits_per_byte": True,
        "config.eval.multiple_choice": [
            {"name": "squares", "path": str(write_questions(directory / "q.jsonl")), "every_steps": 5}
        ],
        "config.eval.samples": {"prompts": ["1 squared"], "tokens": 3, "every_steps": 6},
        "config.metrics.norms": "groups",
        "logging.every_steps": 5,
        "checkpoint.every_steps": 7,  # between two rows
    }


class KilledTrainer(EvaluatedBigramTrainer):
    """A job killed after `at` steps, once its saves are committed."""

    at = 0

    def save_or_stop(self) -> None:
        super().save_or_stop()
        self.checkpointer.wait_until_finished()
        if self.step == self.at:
            raise KilledError


def make_killed_class(step: int) -> type[BaseTrainer]:
    return type("StruckAt", (KilledTrainer,), {"at": step, "__module__": __name__})


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole") / "run"
    make_gpt(directory, EvaluatedBigramTrainer, **make_changes(directory.parent))()
    return directory


def test_rows_contain_metrics_of_forward_and_every_evaluator(uninterrupted: Path) -> None:
    rows = {row["step"]: row for row in read_trajectory(uninterrupted)}
    assert list(rows) == [0, 3, 4, 5, 6, 8, 9, 10, 12]
    cadences = {"val/loss": 4, "val/bits_per_byte": 4, "val/squares/acc": 5, "val/sample/0": 6, "val/own/sum": 3}
    for key, every in cadences.items():
        assert [step for step in rows if key in rows[step]] == sorted({*range(0, STEPS + 1, every), STEPS}), key
    last = rows[STEPS]
    assert len(last["train/by_part"]) == len(last["train/parts"]) == len(last["val/parts"]) == 4
    assert (len(last["train/logits"]["counts"]), len(last["train/logits"]["edges"])) == (8, 9)
    assert sum(last["train/logits"]["counts"]) == 16 * 256  # of the last shard of the last micro-batch
    assert last["train/entropy"] == pytest.approx(last["train/loss"], rel=1e-6)
    assert last["val/entropy"] == pytest.approx(last["val/loss"], rel=1e-6)
    assert last["train/nothing"] is last["val/nothing"] is None
    assert 0 <= last["train/right"] <= 1
    assert sum(last["train/parts"]) == pytest.approx(last["train/right"], rel=1e-5)
    assert last["val/bits_per_byte"] == pytest.approx(last["val/loss"] / math.log(2))
    assert last["val/sample/0"].startswith("1 squared")
    assert last["train/grad_norm/table"] == pytest.approx(last["train/grad_norm"], rel=1e-6)
    assert last["train/param_norm/table"] == last["train/param_norm"]
    assert isinstance(last["val/own/rows"], list)


@pytest.mark.parametrize("step", [9, *(pytest.param(step, marks=pytest.mark.soak) for step in (1, 7, 8, 11))])
def test_rows_of_a_killed_and_resumed_run_are_identical(uninterrupted: Path, tmp_path: Path, step: int) -> None:
    with pytest.raises(KilledError):
        make_gpt(tmp_path / "run", make_killed_class(step), **make_changes(uninterrupted.parent))()
    make_gpt(tmp_path / "run", EvaluatedBigramTrainer, **make_changes(uninterrupted.parent))()
    assert read_trajectory(tmp_path / "run") == read_trajectory(uninterrupted)
    assert read_json_result(tmp_path / "run") == read_json_result(uninterrupted)


@pytest.mark.parametrize("step", [8, *(pytest.param(step, marks=pytest.mark.soak) for step in (0, 1, 7))])
def test_rows_of_a_stopped_and_resumed_run_are_identical(uninterrupted: Path, tmp_path: Path, step: int) -> None:
    job = make_gpt(tmp_path / "run", EvaluatedBigramTrainer, **make_changes(uninterrupted.parent))
    stop_after(job, step)
    make_gpt(tmp_path / "run", EvaluatedBigramTrainer, **make_changes(uninterrupted.parent))()
    assert read_trajectory(tmp_path / "run") == read_trajectory(uninterrupted)


def test_evaluators_leave_training_bit_identical_and_means_cover_the_steps_since_the_last_row(
    uninterrupted: Path, tmp_path: Path
) -> None:
    make_gpt(tmp_path / "run", EvaluatedBigramTrainer, **BIGRAM_OPTIONS, **{"config.train.total_steps": STEPS})()
    assert read_json_result(tmp_path / "run")["fingerprint"] == read_json_result(uninterrupted)["fingerprint"]
    losses = {row["step"]: row["train/loss"] for row in read_trajectory(tmp_path / "run")}
    for before, row in itertools.pairwise(read_trajectory(uninterrupted)):
        window = [losses[step] for step in range(before["step"] + 1, row["step"] + 1)]
        assert row["train/loss_mean"] == pytest.approx(sum(window) / len(window), rel=1e-12)


def read_json_result(directory: Path) -> dict[str, Any]:
    return read_json(LocalStore(directory), "result.json")
