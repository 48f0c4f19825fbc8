"""Outcome of an attempt, for every way it can end."""

import errno
import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.attempts import clock_file
from runner.attempts.fence import Fence
from runner.errors import InvalidError
from runner.history.reader import read_history
from runner.history.records import History, RunState
from runner.storage import LocalStore
from tests.support import run_outcomes

ENDS: dict[str, tuple[Callable[[Path], None], RunState, int | None, str | None]] = {
    "done": (run_outcomes.complete_run, RunState.DONE, 0, None),
    "preempted": (run_outcomes.preempt_run, RunState.PREEMPTED, 75, None),
    "idle": (run_outcomes.exit_idle, RunState.PREEMPTED, 75, None),
    "broken": (run_outcomes.fail_with_bug, RunState.FAILED, 1, "ZeroDivisionError: division by zero"),
    "diverged": (run_outcomes.diverge, RunState.FAILED, 1, "step 13: training diverged"),
    "refused": (run_outcomes.reject_data, RunState.INVALID, 2, "a token file has changed"),
    "unreachable": (run_outcomes.lose_storage, RunState.RETRYABLE, 76, "the bucket does not answer"),
    "stuck": (run_outcomes.hang, RunState.RETRYABLE, 76, "the job cannot continue: process 0 is in step 1"),
    "fenced": (run_outcomes.fence_run, RunState.FENCED, None, None),
    "killed": (run_outcomes.kill_run, RunState.KILLED, None, None),
}


@functools.cache
def get_template(name: str) -> Path:
    directory = Path(os.environ["RUNNER_TESTS_SESSION"]) / "ends" / f"{name}.{os.getpid()}" / "run"
    directory.parent.mkdir(parents=True)
    ENDS[name][0](directory)
    return directory


@pytest.fixture(params=ENDS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def read_newest_state(directory: Path, **when: float) -> History:
    return read_history(LocalStore(directory), **when)


def test_an_outcome_is_known_once_another_attempt_has_started(name: str, tmp_path: Path) -> None:
    directory = shutil.copytree(get_template(name), tmp_path / "run")
    Fence(LocalStore(directory)).claim()
    first = read_newest_state(directory).attempts[0]
    _, state, code, reason = ENDS[name]
    assert (first.state, first.code, first.reason) == (state, code, reason)


def test_an_outcome_is_known_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_file, "read_creation_ticks", lambda process: None)  # no process of it is running here
    directory, (_, state, _, reason) = get_template(name), ENDS[name]
    found = read_newest_state(directory)
    assert found.attempts[0].state is state
    if name != "fenced":  # the newer record counts
        assert (found.state, found.reason, found.since) == (state, reason, found.attempts[-1].ended)


def test_without_a_clock_the_events_give_the_outcome(name: str, tmp_path: Path) -> None:
    directory = shutil.copytree(get_template(name), tmp_path / "run")
    (directory / "attempts/1.clock").unlink()
    Fence(LocalStore(directory)).claim()
    state = ENDS[name][1]
    assert read_newest_state(directory).attempts[0].state is (RunState.KILLED if state is RunState.FENCED else state)


def test_a_run_without_an_end_is_alive_stalled_or_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = get_template("killed")  # this process, in which the run ran, is alive
    last = read_newest_state(directory, now=0.0).attempts[0].ended
    assert read_newest_state(directory, now=last + 20).state is RunState.RUNNING
    assert read_newest_state(directory, now=last + 40).state is RunState.STALLED
    monkeypatch.setattr(clock_file, "read_machine_id", lambda: "another machine")
    assert read_newest_state(directory, now=last + 20).state is RunState.RUNNING
    found = read_newest_state(directory, now=last + 40)
    assert (found.state, found.since) == (RunState.STALLED, last)


def test_a_run_with_heartbeats_but_no_steps_is_stalled(tmp_path: Path) -> None:
    directory = shutil.copytree(get_template("killed"), tmp_path / "run")
    path = directory / "attempts/1.clock"
    kept = clock_file.decode_clock_file(path.read_bytes())
    later = kept.reading._replace(time=kept.reading.time + 500.0)
    head = path.read_bytes()[: clock_file.HEADER_BYTES]
    path.write_bytes(head + clock_file.encode_slot(99, later))
    found = read_newest_state(directory, now=later.time + 1.0)
    assert (found.state, found.since) == (RunState.STALLED, kept.reading.since)


def test_only_a_live_run_lasts_until_now(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = get_template("killed")
    last = read_newest_state(directory, now=0.0).attempts[0].ended
    assert read_newest_state(directory, now=last + 7.0).attempts[0].ended == last + 7.0
    assert read_newest_state(directory, now=last + 700.0).attempts[0].ended == last
    monkeypatch.setattr(clock_file, "read_creation_ticks", lambda process: None)
    assert read_newest_state(directory, now=last + 7.0).attempts[0].ended == last


@pytest.mark.parametrize("place", ["missing", "empty", "file"])
def test_a_directory_without_a_run_is_an_error(place: str, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    act = {"missing": lambda: None, "empty": directory.mkdir, "file": lambda: directory.write_bytes(b"")}
    act[place]()
    with pytest.raises(InvalidError, match="no run is here"):
        read_newest_state(directory)


def test_a_full_disk_at_a_hang_loses_the_stacks_and_not_the_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write = LocalStore.write

    def refuse_stacks(store: LocalStore, name: str, content: bytes) -> None:
        if name.startswith("stacks/"):
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        write(store, name, content)

    monkeypatch.setattr(LocalStore, "write", refuse_stacks)
    run_outcomes.hang(tmp_path / "run")
    assert "the stacks of this process cannot be written" in capsys.readouterr().err
    Fence(LocalStore(tmp_path / "run")).claim()
    first = read_newest_state(tmp_path / "run").attempts[0]
    assert (first.state, first.code, first.reason) == ENDS["stuck"][1:]
