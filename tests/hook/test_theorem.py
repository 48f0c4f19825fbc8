"""However a run is stopped and killed: the bits, the rows and the calls of hooks are those of an undisturbed run.

The table of hooks is `HOOKS`; a hook that steers joins by a line. Daily, several share a run; the soak has each alone.
"""

import json
from typing import Any

import pytest

from runner.errors import PreemptedError
from runner.storage import parse_lines
from tests.hook.small import job
from tests.support.tiny_jobs import StopAfter

HERE = "tests.support.hooks"
HOOKS: dict[str, list[Any]] = {
    "counters": [f"{HERE}:DiaryHook"],
    "observer": [f"{HERE}:DiaryObserver"],
    "early stopping": [{"hook": "runner.hook:EarlyStopping", "config": {"patience": 2, "min_delta": 10.0}}],
    "stop at a loss": [{"hook": "runner.hook:StopAtLoss", "config": {"value": 100.0, "metric": "train/tokens"}}],
    "stop between evaluations": [f"{HERE}:DiaryHook", {"hook": f"{HERE}:StepActionHook", "config": {"step": 5}}],
    "evaluate": [f"{HERE}:DiaryHook", {"hook": f"{HERE}:StepActionHook", "config": {"step": 3, "act": "evaluate"}}],
    "save": [f"{HERE}:DiaryHook", {"hook": f"{HERE}:StepActionHook", "config": {"step": 3, "act": "save"}}],
    "best at end": ["runner.hook:BestAtEnd"],
}
_PATIENT = {"hook": "runner.hook:EarlyStopping", "config": {"patience": 4, "min_delta": 10.0}}
HOOKS["several"] = [*HOOKS["evaluate"], f"{HERE}:DiaryObserver", "runner.hook:BestAtEnd", _PATIENT]
ALL = [name if name == "several" else pytest.param(name, marks=pytest.mark.soak) for name in HOOKS]
STOPPING = ["early stopping", "stop at a loss", "stop between evaluations"]
BEST = {"checkpoint.keep_best": {"metric": "val/loss"}}


class Killed(BaseException):
    """Stands for kill -9: nothing is saved, nothing is written."""


def outcome(directory) -> tuple[Any, Any]:
    """Result and rows, without what no two runs share."""
    rows = parse_lines((directory / "metrics.jsonl").read_bytes())
    kept = [{key: row[key] for key in row if not key.startswith("perf/")} for row in rows]
    return json.loads((directory / "result.json").read_text()), kept


def calls(directory) -> list[str]:
    """The diary, without starts."""
    path = directory / "diary"
    return [line for line in path.read_text().splitlines() if not line.startswith("start")] if path.exists() else []


def not_of_saves(lines: list[str]) -> list[str]:
    """Without those that depend on when a run was stopped."""
    return [line for line in lines if not line.startswith("checkpoint")]


def made(directory, name, **changes):
    return job(directory, *HOOKS[name], **{"checkpoint.every_steps": 3, **BEST, **changes})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The undisturbed run with certain hooks, run once."""
    known: dict[str, Any] = {}

    def find(name):
        if name not in known:
            known[name] = tmp_path_factory.mktemp("whole") / "run"
            made(known[name], name)()
        return known[name]

    return find


def stop(directory, name, step) -> None:
    """Stop the run at `step`, in its evaluation if it has one; nothing if it ends before."""
    found = made(directory, name)
    try:
        found(stop=StopAfter(found, step))
    except PreemptedError:
        assert found.step <= step


def kill(directory, name, step) -> None:
    """Kill the run after the calls of `step`, before it can be saved."""
    found = made(directory, name)
    call_hooks = found.call_hooks

    def die() -> None:
        call_hooks()
        if found.step == step:
            raise Killed

    found.call_hooks = die  # type: ignore[method-assign]
    try:
        found()
    except Killed:
        return


@pytest.mark.parametrize("name", ALL)
def test_a_run_that_is_stopped_again_and_again_is_the_undisturbed_one_call_by_call(name, whole, tmp_path) -> None:
    for step in (2, 3, 4, 6):
        stop(tmp_path / "run", name, step)
    made(tmp_path / "run", name)()
    assert outcome(tmp_path / "run") == outcome(whole(name))
    assert not_of_saves(calls(tmp_path / "run")) == not_of_saves(calls(whole(name)))


@pytest.mark.parametrize("name", ALL)
def test_a_run_that_is_killed_again_and_again_is_the_undisturbed_one_and_repeats_lost_steps_alone(
    name, whole, tmp_path
) -> None:
    for step in (2, 5, 4, 8):
        kill(tmp_path / "run", name, step)
    made(tmp_path / "run", name)()
    assert outcome(tmp_path / "run") == outcome(whole(name))
    assert [*dict.fromkeys(calls(tmp_path / "run"))] == calls(whole(name))


@pytest.mark.parametrize("name", ALL)
def test_a_run_that_is_stopped_in_an_evaluation_and_killed_once_that_is_made_up_for_is_the_undisturbed_one(
    name, whole, tmp_path
) -> None:
    for step in (4, 6):
        stop(tmp_path / "run", name, step)
        kill(tmp_path / "run", name, step)
    made(tmp_path / "run", name)()
    assert outcome(tmp_path / "run") == outcome(whole(name))
    assert [*dict.fromkeys(not_of_saves(calls(tmp_path / "run")))] == not_of_saves(calls(whole(name)))


@pytest.mark.parametrize("name", [STOPPING[0], *(pytest.param(name, marks=pytest.mark.soak) for name in STOPPING[1:])])
def test_a_run_that_a_hook_has_ended_is_done_whatever_kills_it_before_it_has_said_so(name, whole, tmp_path) -> None:
    found = made(tmp_path / "run", name)

    def die() -> None:
        found.save()
        found.checkpointer.wait_until_committed(found.step)
        raise Killed

    found.finish = die  # type: ignore[method-assign]
    with pytest.raises(Killed):
        found()
    assert not found.done
    again = made(tmp_path / "run", name)
    again()
    assert outcome(tmp_path / "run") == outcome(whole(name))
    assert again.done
    assert made(tmp_path / "run", name).done
