"""Runs in this process that end in every way; what `kill -9` leaves is a copy of the directory of one that goes on."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.counter import Counter
from runner.distributed.preemption import StopNotice
from runner.errors import DataError, DivergedError, FencedError, StorageError
from runner.run.attempt import IncidentRecorder
from runner.run.fence import Fence
from runner.storage import LocalStore
from tests.support.attempt import start
from tests.support.tiny import counter, stop_after

OPTIONS = {"config.total_steps": 40, "config.width": 8, "checkpoint.every_steps": 10, "checkpoint.keep_last": 9}


class ActAt(StopNotice):
    """Calls `act` when `job` has completed a step, with nothing on its way to the disk; stops nothing by itself."""

    def __init__(self, job: Counter, step: int, act: Callable[[], None]):
        super().__init__()
        self._job, self._step, self._act = job, step, act

    def poll(self) -> bool:
        if self._job.step == self._step:
            self._job.checkpointer.wait_until_finished()
            self._act()
        return False


class EnoughError(Exception):
    """The test has seen what it needs."""


def make(directory: Path, **changes: object) -> Counter:
    return counter(directory, **OPTIONS | changes)


def done(directory: Path) -> None:
    make(directory)()


def stop_at(directory: Path, step: int, **changes: object) -> None:
    job = make(directory, **changes)
    stop_after(job, step)


def preempted(directory: Path) -> None:
    stop_at(directory, 13)


def idle(directory: Path) -> None:
    """Asked to stop before its first step; then the process ends."""
    start(make(directory)).attempt.record_idle_exit(0)


def fail_at(directory: Path, step: int, error: Exception) -> None:
    def act() -> None:
        raise error

    job = make(directory)
    with pytest.raises(type(error)):
        job(stop=ActAt(job, step, act))


def broken(directory: Path) -> None:
    fail_at(directory, 13, ZeroDivisionError("division by zero"))


def diverged(directory: Path) -> None:
    fail_at(directory, 13, DivergedError("step 13: training diverged\nand more"))


def refused(directory: Path) -> None:
    fail_at(directory, 13, DataError("a token file has changed"))


def unreachable(directory: Path) -> None:
    fail_at(directory, 13, StorageError("the bucket does not answer"))


def stuck(directory: Path) -> None:
    incidents = IncidentRecorder()
    incidents.attempt = start(make(directory)).attempt
    incidents.on_verdict("the job cannot continue: process 0 is in step 1", 76)


def kill_at(directory: Path, step: int, **changes: object) -> None:
    """What is there once the process was killed right after a step."""
    aside, job = directory.with_name(f"{directory.name}.aside"), make(directory, **changes)

    def act() -> None:
        shutil.copytree(directory, aside, symlinks=True)
        raise EnoughError

    with pytest.raises(EnoughError):
        job(stop=ActAt(job, step, act))
    shutil.rmtree(directory)
    aside.rename(directory)


def killed(directory: Path) -> None:
    kill_at(directory, 13)


def fenced(directory: Path) -> None:
    """Another attempt claims the directory, and this one finds that when it saves."""
    job = make(directory)
    with pytest.raises(FencedError):
        job(stop=ActAt(job, 13, lambda: Fence(LocalStore(directory)).claim() and None))
