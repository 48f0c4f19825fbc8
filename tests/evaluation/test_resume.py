"""Rows are a function of the trajectory: whatever judges a run, a kill or a stop at any step leaves the same rows."""

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


class StrikeError(Exception):
    """A process that is killed, as far as its files go."""


def changes(directory: Path) -> dict[str, Any]:
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


class Struck(EvaluatedBigramTrainer):
    """Ends like one that is killed after `at` steps, once what was saved is committed."""

    at = 0

    def save_or_stop(self) -> None:
        super().save_or_stop()
        self.checkpointer.wait_until_finished()
        if self.step == self.at:
            raise StrikeError


def struck_at(step: int) -> type[BaseTrainer]:
    return type("StruckAt", (Struck,), {"at": step, "__module__": __name__})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole") / "run"
    make_gpt(directory, EvaluatedBigramTrainer, **changes(directory.parent))()
    return directory


def test_rows_hold_what_forward_and_every_evaluator_say_at_its_own_cadence(whole: Path) -> None:
    rows = {row["step"]: row for row in read_trajectory(whole)}
    assert list(rows) == [0, 3, 4, 5, 6, 8, 9, 10, 12]
    cadences = {"val/loss": 4, "val/bits_per_byte": 4, "val/squares/acc": 5, "val/sample/0": 6, "val/own/sum": 3}
    for key, every in cadences.items():
        assert [step for step in rows if key in rows[step]] == sorted({*range(0, STEPS + 1, every), STEPS}), key
    last = rows[STEPS]
    assert len(last["train/by_part"]) == len(last["train/parts"]) == len(last["val/parts"]) == 4
    assert (len(last["train/logits"]["counts"]), len(last["train/logits"]["edges"])) == (8, 9)
    assert sum(last["train/logits"]["counts"]) == 16 * 256  # of the last part of the last micro-batch
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
def test_rows_of_a_run_that_was_killed_and_resumed_are_those_of_an_undisturbed_one(
    whole: Path, tmp_path: Path, step: int
) -> None:
    with pytest.raises(StrikeError):
        make_gpt(tmp_path / "run", struck_at(step), **changes(whole.parent))()
    make_gpt(tmp_path / "run", EvaluatedBigramTrainer, **changes(whole.parent))()
    assert read_trajectory(tmp_path / "run") == read_trajectory(whole)
    assert read_json_result(tmp_path / "run") == read_json_result(whole)


@pytest.mark.parametrize("step", [8, *(pytest.param(step, marks=pytest.mark.soak) for step in (0, 1, 7))])
def test_rows_of_a_run_that_was_stopped_and_resumed_are_those_of_an_undisturbed_one(
    whole: Path, tmp_path: Path, step: int
) -> None:
    job = make_gpt(tmp_path / "run", EvaluatedBigramTrainer, **changes(whole.parent))
    stop_after(job, step)
    make_gpt(tmp_path / "run", EvaluatedBigramTrainer, **changes(whole.parent))()
    assert read_trajectory(tmp_path / "run") == read_trajectory(whole)


def test_what_judges_a_run_moves_no_bit_of_it_and_the_mean_is_over_the_steps_since_the_row_before(
    whole: Path, tmp_path: Path
) -> None:
    make_gpt(tmp_path / "run", EvaluatedBigramTrainer, **BIGRAM_OPTIONS, **{"config.train.total_steps": STEPS})()
    assert read_json_result(tmp_path / "run")["fingerprint"] == read_json_result(whole)["fingerprint"]
    losses = {row["step"]: row["train/loss"] for row in read_trajectory(tmp_path / "run")}
    for before, row in itertools.pairwise(read_trajectory(whole)):
        window = [losses[step] for step in range(before["step"] + 1, row["step"] + 1)]
        assert row["train/loss_mean"] == pytest.approx(sum(window) / len(window), rel=1e-12)


def read_json_result(directory: Path) -> dict[str, Any]:
    return read_json(LocalStore(directory), "result.json")
