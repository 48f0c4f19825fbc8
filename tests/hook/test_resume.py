"""Runs with hooks that are stopped or killed: same bits, rows and hook calls as in an uninterrupted run.

The table of hooks is `HOOKS`, where a new hook takes one line. The daily tests combine several hooks in one run; the
soak tests each alone.
"""

import contextlib
import json
from typing import Any
from unittest import mock

import pytest

from runner.errors import PreemptedError
from runner.session import Session
from runner.storage import parse_lines
from runner.train.report import Report
from tests.hook.small_job import make_job
from tests.support.tiny_jobs import StopAfter

HOOKS_MODULE = "tests.support.hooks"
HOOKS: dict[str, list[Any]] = {
    "counters": [f"{HOOKS_MODULE}:DiaryHook"],
    "observer": [f"{HOOKS_MODULE}:DiaryObserver"],
    "early stopping": [{"hook": "runner.hook:EarlyStopping", "config": {"patience": 2, "min_delta": 10.0}}],
    "stop at a loss": [{"hook": "runner.hook:StopAtLoss", "config": {"value": 100.0, "metric": "train/tokens"}}],
    "stop between evaluations": [
        f"{HOOKS_MODULE}:DiaryHook",
        {"hook": f"{HOOKS_MODULE}:StepActionHook", "config": {"step": 5}},
    ],
    "evaluate": [
        f"{HOOKS_MODULE}:DiaryHook",
        {"hook": f"{HOOKS_MODULE}:StepActionHook", "config": {"step": 3, "act": "evaluate"}},
    ],
    "save": [
        f"{HOOKS_MODULE}:DiaryHook",
        {"hook": f"{HOOKS_MODULE}:StepActionHook", "config": {"step": 3, "act": "save"}},
    ],
    "best at end": ["runner.hook:BestAtEnd"],
    "logging": [f"{HOOKS_MODULE}:LoggingObserver", f"{HOOKS_MODULE}:LoggingHook"],
    "logging at a requested evaluation": [
        f"{HOOKS_MODULE}:LoggingHook",
        {"hook": f"{HOOKS_MODULE}:StepActionHook", "config": {"step": 3, "act": "evaluate"}},
        f"{HOOKS_MODULE}:LoggingObserver",
    ],
}
_PATIENT = {"hook": "runner.hook:EarlyStopping", "config": {"patience": 4, "min_delta": 10.0}}
HOOKS["several"] = [
    *HOOKS["evaluate"],
    f"{HOOKS_MODULE}:DiaryObserver",
    "runner.hook:BestAtEnd",
    *HOOKS["logging"],
    _PATIENT,
]
ALL = [name if name == "several" else pytest.param(name, marks=pytest.mark.soak) for name in HOOKS]
STOPPING = ["early stopping", "stop at a loss", "stop between evaluations"]
BEST = {"checkpoint.keep_best": {"metric": "val/loss"}}


class KilledError(BaseException):
    """Simulated kill -9: nothing is saved or written."""


def read_outcome(directory) -> tuple[Any, Any]:
    """Return result and rows without fields that differ between any two runs."""
    rows = parse_lines((directory / "metrics.jsonl").read_bytes())
    kept = [{key: row[key] for key in row if not key.startswith("perf/")} for row in rows]
    return json.loads((directory / "result.json").read_text()), kept


def read_calls(directory) -> list[str]:
    """Return the recorded calls, without starts."""
    path = directory / "diary"
    return [line for line in path.read_text().splitlines() if not line.startswith("start")] if path.exists() else []


def exclude_saves(lines: list[str]) -> list[str]:
    """Return the calls without saves, which depend on when a run was stopped."""
    return [line for line in lines if not line.startswith("checkpoint")]


def make_hooked_job(directory, name, **changes):
    return make_job(directory, *HOOKS[name], **{"checkpoint.every_steps": 3, **BEST, **changes})


@pytest.fixture(scope="module")
def get_uninterrupted_run(tmp_path_factory):
    """Return the uninterrupted run with the given hooks, which runs once."""
    known: dict[str, Any] = {}

    def find(name):
        if name not in known:
            known[name] = tmp_path_factory.mktemp("whole") / "run"
            make_hooked_job(known[name], name)()
        return known[name]

    return find


def stop(directory, name, step) -> None:
    """Stop the run at `step`, during its evaluation if it has one, unless it ends before."""
    found = make_hooked_job(directory, name)
    try:
        found(stop=StopAfter(found, step))
    except PreemptedError:
        assert found.step <= step


def kill(directory, name, step, is_before_row=False) -> None:
    """Kill the run after the hook calls of `step`, before it can save or, optionally, write the row."""
    found = make_hooked_job(directory, name)
    owner, method = (Report, "_append") if is_before_row else (Session, "write_row")
    write = getattr(owner, method)

    def die(*arguments: object) -> None:
        if not is_before_row:
            write(*arguments)
        if found.step == step:
            raise KilledError
        if is_before_row:
            write(*arguments)

    with mock.patch.object(owner, method, die), contextlib.suppress(KilledError):
        found()


@pytest.mark.soak
@pytest.mark.parametrize("name", ALL)
def test_a_repeatedly_stopped_run_makes_the_same_hook_calls(name, get_uninterrupted_run, tmp_path) -> None:
    for step in (2, 3, 4, 6):
        stop(tmp_path / "run", name, step)
    make_hooked_job(tmp_path / "run", name)()
    assert read_outcome(tmp_path / "run") == read_outcome(get_uninterrupted_run(name))
    assert exclude_saves(read_calls(tmp_path / "run")) == exclude_saves(read_calls(get_uninterrupted_run(name)))


@pytest.mark.soak
@pytest.mark.parametrize("is_before_row", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_a_repeatedly_killed_run_repeats_only_the_calls_of_lost_steps(
    name, is_before_row, get_uninterrupted_run, tmp_path
) -> None:
    for step in (2, 5, 4, 8):
        kill(tmp_path / "run", name, step, is_before_row)
    make_hooked_job(tmp_path / "run", name)()
    assert read_outcome(tmp_path / "run") == read_outcome(get_uninterrupted_run(name))
    assert [*dict.fromkeys(read_calls(tmp_path / "run"))] == read_calls(get_uninterrupted_run(name))


@pytest.mark.parametrize("name", ALL)
def test_a_run_stopped_during_evaluation_and_killed_after_it_is_identical(
    name, get_uninterrupted_run, tmp_path
) -> None:
    for step in (4, 6):
        stop(tmp_path / "run", name, step)
        kill(tmp_path / "run", name, step)
    make_hooked_job(tmp_path / "run", name)()
    assert read_outcome(tmp_path / "run") == read_outcome(get_uninterrupted_run(name))
    assert [*dict.fromkeys(exclude_saves(read_calls(tmp_path / "run")))] == exclude_saves(
        read_calls(get_uninterrupted_run(name))
    )


@pytest.mark.parametrize("name", [STOPPING[0], *(pytest.param(name, marks=pytest.mark.soak) for name in STOPPING[1:])])
def test_a_run_ended_by_a_hook_is_done_after_a_kill_before_its_end(name, get_uninterrupted_run, tmp_path) -> None:
    found = make_hooked_job(tmp_path / "run", name)

    def die() -> None:
        found.save()
        found.checkpointer.wait_until_committed(found.step)
        raise KilledError

    found.lifecycle.finish = die  # type: ignore[method-assign]
    with pytest.raises(KilledError):
        found()
    assert not found.done
    again = make_hooked_job(tmp_path / "run", name)
    again()
    assert read_outcome(tmp_path / "run") == read_outcome(get_uninterrupted_run(name))
    assert again.done
    assert make_hooked_job(tmp_path / "run", name).done
