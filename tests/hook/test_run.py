"""Hooks as seen by users: early stopping, changed stopping rules, and the best checkpoint."""

import json
import time
from typing import Any

import jax
import numpy as np
import pytest

from runner import open_checkpoint
from runner.attempts.layout import RESULT_KEYS
from runner.checkpoint.fingerprint import list_leaf_names
from runner.cli.app import run_command
from runner.distributed.agreement import Hosts
from runner.errors import InvalidError
from runner.history.reader import read_history
from runner.hook.hooks import Act, Moment
from runner.metrics.file import read_rows
from runner.storage import LocalStore, parse_lines, validate_record
from tests.hook.small_job import make_job
from tests.support.tiny_jobs import are_leaves_equal

HOOKS_MODULE = "tests.support.hooks"
BEST = {"checkpoint.keep_best": {"metric": "val/loss"}, "checkpoint.every_steps": 100, "checkpoint.keep_last": 1}


def make_early_stopping(patience: int, **config: Any) -> dict[str, Any]:
    return {"hook": "runner.hook:EarlyStopping", "config": {"patience": patience, "min_delta": 10.0, **config}}


def read_result(directory) -> dict[str, Any]:
    return dict(json.loads((directory / "result.json").read_text()))


def count_attempts(directory) -> int:
    return len([path for path in (directory / "attempts").iterdir() if path.name.isdecimal()])


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Run a job without hooks."""
    found = make_job(tmp_path_factory.mktemp("plain") / "run")
    found()
    return found


def test_observers_add_no_leaves_to_the_state(plain, tmp_path) -> None:
    watched = make_job(tmp_path / "watched", f"{HOOKS_MODULE}:DiaryObserver")
    watched()
    assert list_leaf_names(plain.state) == list_leaf_names(watched.state)
    assert not [name for name in list_leaf_names(plain.state) if "hooks" in name]
    assert read_result(plain.store.root) == read_result(tmp_path / "watched")
    assert plain.compiled.digest == watched.compiled.digest


def test_counters_leave_the_weights_unchanged_and_are_numpy_arrays(plain, tmp_path) -> None:
    counted = make_job(tmp_path / "counted", f"{HOOKS_MODULE}:DiaryHook")
    counted()
    assert are_leaves_equal(plain.state.params, counted.state.params)
    counters = jax.device_get(counted.state.riders["hooks"]["DiaryHook"])
    assert counters["calls"].tolist() == [8, 4]
    rows = parse_lines((tmp_path / "counted" / "metrics.jsonl").read_bytes())
    total = np.float32(0)
    for row in rows:
        total += np.float32(row.get("val/loss", row["train/loss"]))
        total += np.float32(row.get("val/loss", 0))
    assert counters["sum"] == total


def test_a_run_stopped_early_is_done_until_its_rule_changes(tmp_path, capsys) -> None:
    directory = tmp_path / "run"
    make_job(directory, make_early_stopping(2))()
    found = read_result(directory)
    assert (found["step"], found["stopped_by"]) == (6, "EarlyStopping")
    assert "is not better than" in found["stopped_because"]
    assert found["val_loss"] is not None
    validate_record(found, RESULT_KEYS, ["stopped_by", "stopped_because", "stopped_rule"])
    history = read_history(LocalStore(directory))
    assert (history.state.value, history.step, history.total_steps) == ("done", 6, 8)
    assert str(history.reason).startswith("stopped by EarlyStopping: val/loss is not better")
    again = make_job(directory, make_early_stopping(2))
    assert again.done
    again()
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("tiny: done, nothing to do, stopped by EarlyStopping: val/loss is not better")
    assert count_attempts(directory) == 1
    patient = make_job(directory, make_early_stopping(4))
    assert not patient.done
    patient()
    assert count_attempts(directory) == 2
    assert [row["step"] for row in read_rows(LocalStore(directory))] == [*range(1, 9)]
    assert "stopped_by" not in read_result(directory)
    whole = make_job(tmp_path / "whole", make_early_stopping(4))
    whole()
    assert read_result(directory) == read_result(tmp_path / "whole")


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        pytest.param(
            [],
            [make_early_stopping(2)],
            "hooks.EarlyStopping.hook: checkpoint 8 has nothing, the spec 'runner.hook:EarlyStopping'",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            [make_early_stopping(9)],
            [],
            "hooks.EarlyStopping.config.metric: checkpoint 8 has 'val/loss', the spec nothing",
            marks=pytest.mark.soak,
        ),
        (
            [make_early_stopping(9)],
            [make_early_stopping(9, min_delta=9.0)],
            "min_delta: checkpoint 8 has 10.0, the spec 9.0",
        ),
    ],
)
def test_hooks_with_counters_belong_to_the_trajectory(before: Any, after: Any, words: str, tmp_path) -> None:
    schedule = {"config.schedule": {"name": "constant"}}
    make_job(tmp_path / "run", *before, **schedule)()
    with pytest.raises(InvalidError, match=words):
        make_job(tmp_path / "run", *after, **schedule, **{"config.train.total_steps": 10})()


@pytest.mark.soak
def test_observers_can_be_added_and_removed(tmp_path) -> None:
    schedule = {"config.schedule": {"name": "constant"}}
    make_job(tmp_path / "run", **schedule)()
    make_job(tmp_path / "run", f"{HOOKS_MODULE}:DiaryObserver", **schedule, **{"config.train.total_steps": 10})()
    assert (tmp_path / "run" / "diary").read_text().splitlines() == [
        "start 8",
        *("saw row 9", "saw row 10", "saw evaluation 10"),
        *("checkpoint 10", "end 10"),
    ]
    make_job(tmp_path / "run", **schedule, **{"config.train.total_steps": 12})()
    assert read_result(tmp_path / "run")["step"] == 12


@pytest.mark.soak
def test_an_early_stop_is_evaluated_like_the_last_step(tmp_path) -> None:
    make_job(tmp_path / "run", {"hook": f"{HOOKS_MODULE}:StepActionHook", "config": {"step": 3}})()
    found = read_result(tmp_path / "run")
    assert (found["step"], found["stopped_because"]) == (3, "it was time")
    assert found["val_loss"] == read_rows(LocalStore(tmp_path / "run"))[-1]["val/loss"]


def get_verdict(hook: Any, **row: Any) -> Any:
    return hook.on_row(Moment(4, {"step": 4, **row}, {}, {}, Hosts.single_process(), 1000.0))


@pytest.mark.parametrize(
    ("rule", "now", "reason"),
    [
        ({"at": "2020-01-01T00:00:00+00:00"}, 1577836800.0, "the time is over: 2020-01-01T00:00:00+00:00"),
        ({"at": "2020-01-01T01:00:00+01:00"}, 1577836799.0, None),
        ({"after_hours": 0.5}, 2800.0, "the time is over: 0.5 hours"),
        ({"after_hours": 0.5}, 2799.0, None),
    ],
)
def test_a_run_stops_at_a_time(rule: dict[str, Any], now: float, reason: str | None, tmp_path, monkeypatch) -> None:
    (listed,) = make_job(tmp_path / "run", {"hook": "runner.hook:StopAtTime", "config": rule}).hooks.listed
    monkeypatch.setattr(time, "time", lambda: now)
    found = get_verdict(listed.hook)
    assert (None if found is None else (found.act, found.reason)) == (None if reason is None else (Act.STOP, reason))


@pytest.mark.parametrize(
    ("rule", "loss", "stops"),
    [
        ({"value": 2.0}, 2.0, True),
        ({"value": 2.0}, 2.1, False),
        ({"value": 2.0}, None, False),
        ({"value": 2.0, "mode": "max"}, 2.1, True),
        ({"value": 2.0, "metric": "val/loss"}, 1.0, False),
    ],
)
def test_a_run_stops_at_a_metric_value(rule: dict[str, Any], loss: float | None, stops: bool, tmp_path) -> None:
    (listed,) = make_job(tmp_path / "run", {"hook": "runner.hook:StopAtLoss", "config": rule}).hooks.listed
    found = get_verdict(listed.hook, **{"train/loss": loss})
    assert (found is not None and found.act is Act.STOP) == stops


def test_the_best_step_is_saved_kept_and_reported(tmp_path, capsys) -> None:
    """The best step has the largest loss, at the first evaluation, where no save is due."""
    most = BEST | {"checkpoint.keep_best": {"metric": "val/loss", "mode": "max"}}
    make_job(tmp_path / "run", "runner.hook:BestAtEnd", **most)()
    found = read_result(tmp_path / "run")
    rows = {row["step"]: row["val/loss"] for row in read_rows(LocalStore(tmp_path / "run")) if "val/loss" in row}
    best = max(rows, key=lambda step: rows[step])
    validate_record(found, RESULT_KEYS, ["best_step", "best_value"])
    assert (found["best_step"], found["best_value"]) == (best, float(np.float32(rows[best])))
    assert sorted(int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir()) == [best, 8]
    capsys.readouterr()
    assert run_command(["checkpoints", str(tmp_path / "run")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.endswith(f"best: {rows[best]:g}") for line in lines] == [True, False]
    weights, _ = open_checkpoint(f"{tmp_path / 'run'}/checkpoints/best")
    again, _ = open_checkpoint(tmp_path / "run", best)
    assert are_leaves_equal(weights, again)
    tuned = make_job(tmp_path / "tuned", **{"checkpoint.init_from": f"{tmp_path / 'run'}/checkpoints/best"})
    tuned()
    assert f"weights of step {best} taken from" in capsys.readouterr().out


@pytest.mark.soak
def test_hook_time_counts_as_evaluation_and_not_in_the_speed(tmp_path) -> None:
    slow = {"hook": f"{HOOKS_MODULE}:SleepingObserver", "config": {"seconds": 0.2}}
    found = make_job(tmp_path / "run", slow, **{"config.train.total_steps": 4})
    found()
    seconds = read_history(LocalStore(tmp_path / "run")).seconds
    spent = {bucket.value: each for bucket, each in seconds.items()}
    assert spent["evaluation"] >= 0.8
    assert sum(found.attempt.progress.get_step_seconds()) <= spent["steps"] + 1e-6


def test_a_sample_of_text_is_written_at_evaluations(tmp_path) -> None:
    hook = {"hook": "experiments.hooks:SampleText", "config": {"prompts": ["1 squared", "2"], "tokens": 8}}
    make_job(tmp_path / "run", hook)()
    files = sorted(path.name for path in (tmp_path / "run" / "samples").iterdir())
    assert files == ["2.txt", "4.txt", "6.txt", "8.txt"]
    assert (tmp_path / "run" / "samples" / "8.txt").read_text(errors="replace").startswith("1 squared")
