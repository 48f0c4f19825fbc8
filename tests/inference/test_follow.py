"""`evaluate --follow` on a live run: each step is scored once into its own file, also after kills."""

import json
from pathlib import Path
from typing import Any

import pytest

from runner.cli.app import main
from runner.cli.checkpoints import append_record, read_recorded_steps, validate_outside_run
from runner.distributed.agreement import Hosts
from runner.errors import InvalidError
from runner.inference.evaluate import follow
from runner.inference.open_run import open_run
from runner.storage import LocalStore
from tests.support.bigram import BIGRAM_OPTIONS, BigramTrainer, read_trajectory, write_questions
from tests.support.job_process import hash_tree
from tests.support.tiny_jobs import make_gpt, stop_after

STEPS = 6


def make_changes(directory: Path) -> dict[str, Any]:
    return BIGRAM_OPTIONS | {
        "job": "tests.support.bigram:BigramTrainer",
        "config.train.total_steps": STEPS,
        "config.eval.every_steps": 2,
        "config.eval.multiple_choice": [{"name": "squares", "path": str(write_questions(directory / "q.jsonl"))}],
        "checkpoint.every_steps": 2,
        "checkpoint.keep_last": 2,
    }


def test_each_step_of_a_live_run_is_scored_once_until_the_end(tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = make_gpt(run, BigramTrainer, **make_changes(tmp_path))
    stop_after(job, 3)
    waited = []

    def continue_run() -> None:
        """Continue the run in its own process while there are no new checkpoints."""
        waited.append(len(found))
        if len(waited) == 2:
            make_gpt(run, BigramTrainer, **make_changes(tmp_path))()

    found: list[dict[str, Any]] = []
    for record in follow(open_run(str(run), ["tests"]), None, Hosts.single_process(), wait=continue_run):
        found.append(record)
    assert waited == [2, 2]
    assert [record["step"] for record in found] == [2, 3, 4, 6]
    rows = {row["step"]: row for row in read_trajectory(run)}
    for record in found[:1] + found[2:]:
        row = rows[record["step"]]
        assert record["loss"] == row["val/loss"]
        expected = {key: row[f"val/squares/{key}"] for key in ("acc", "acc_norm", "acc_bytes")}
        assert record["tasks"]["squares"] == expected


def test_following_continues_its_own_file_and_writes_no_file_of_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, own = tmp_path / "run", tmp_path / "figures.jsonl"
    make_gpt(run, BigramTrainer, **make_changes(tmp_path))()
    before = hash_tree(run)
    append_record(own, {"step": 4, "known": True})
    with own.open("ab") as file:
        file.write(b'{"step": 6, "to')  # torn by a kill
    capfd.readouterr()
    assert main(["evaluate", str(run), "--follow", "-o", str(own), "--trust", "tests"]) == 0
    out, _ = capfd.readouterr()
    records = [json.loads(line) for line in own.read_text().splitlines()]
    assert [record["step"] for record in records] == [4, 6]
    assert records[1]["tasks"]["squares"].keys() == {"acc", "acc_norm", "acc_bytes"}
    assert [line.split(":")[0] for line in out.splitlines()] == ["step 6", "step 6 squares"]
    assert main(["evaluate", str(run), "--follow", "-o", str(own), "--trust", "tests"]) == 0
    assert read_recorded_steps(own) == [4, 6]
    assert hash_tree(run) == before


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--output", "x"], "--output OUT needs --follow or --save-top-k"),
        (["--follow", "--all"], "--step, --all and --follow exclude each other"),
        (["--harness", "some", "--data", "text.txt"], "--harness excludes --data"),
        (["--harness", "some", "--weights", "ema_0.9"], "--harness evaluates params only"),
        (["--include-path", "some"], "--include-path DIR needs --harness"),
    ],
)
def test_incompatible_options_are_rejected(words: list[str], line: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "nowhere", *words]) == 2
    assert line in capfd.readouterr().err


def test_the_output_file_cannot_be_in_the_run_directory(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="lies in the run's directory"):
        validate_outside_run(tmp_path / "run" / "x" / "figures.jsonl", LocalStore(tmp_path / "run"))
    validate_outside_run(tmp_path / "figures.jsonl", LocalStore(tmp_path / "run"))
