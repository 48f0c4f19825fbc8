"""Counter runs in this process with every outcome; a killed run is a copy of the directory of a running one."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.counter import Counter
from runner.attempts.attempt import IncidentRecorder
from runner.attempts.fence import Fence
from runner.distributed.preemption import StopNotice
from runner.distributed.watchdog import Diagnosis
from runner.errors import DataError, DivergedError, FencedError, StorageError
from runner.storage import LocalStore
from tests.support.attempt import start
from tests.support.tiny_jobs import make_counter, stop_after

OPTIONS = {"config.total_steps": 40, "config.width": 8, "checkpoint.every_steps": 10, "checkpoint.keep_last": 9}


class StepCallback(StopNotice):
    """Stop notice that calls `act` after `job` has completed a step and its saves, and never requests a stop."""

    def __init__(self, job: Counter, step: int, act: Callable[[], None]):
        super().__init__()
        self._job, self._step, self._act = job, step, act

    def poll(self) -> bool:
        if self._job.step == self._step:
            self._job.checkpointer.wait_until_finished()
            self._act()
        return False


class AbortRunError(Exception):
    """Ends a run in the middle of its loop."""


def make_job(directory: Path, **changes: object) -> Counter:
    return make_counter(directory, **OPTIONS | changes)


def complete_run(directory: Path) -> None:
    make_job(directory)()


def stop_after_step(directory: Path, step: int, **changes: object) -> None:
    job = make_job(directory, **changes)
    stop_after(job, step)


def preempt_run(directory: Path) -> None:
    stop_after_step(directory, 13)


def exit_idle(directory: Path) -> None:
    """Prepare a run and exit before its first step, as after an early stop request."""
    start(make_job(directory)).attempt.record_idle_exit(0)


def fail_after_step(directory: Path, step: int, error: Exception) -> None:
    def act() -> None:
        raise error

    job = make_job(directory)
    with pytest.raises(type(error)):
        job(stop=StepCallback(job, step, act))


def fail_with_bug(directory: Path) -> None:
    fail_after_step(directory, 13, ZeroDivisionError("division by zero"))


def diverge(directory: Path) -> None:
    fail_after_step(directory, 13, DivergedError("step 13: training diverged\nand more"))


def reject_data(directory: Path) -> None:
    fail_after_step(directory, 13, DataError("a token file has changed"))


def lose_storage(directory: Path) -> None:
    fail_after_step(directory, 13, StorageError("the bucket does not answer"))


def hang(directory: Path) -> None:
    incidents = IncidentRecorder()
    incidents.attempt = start(make_job(directory)).attempt
    incidents.on_diagnosis(Diagnosis("the job cannot continue: process 0 is in step 1", 76), is_recorder=True)


def kill_after_step(directory: Path, step: int, **changes: object) -> None:
    """Leave the directory as a kill -9 right after a step would."""
    aside, job = directory.with_name(f"{directory.name}.aside"), make_job(directory, **changes)

    def act() -> None:
        shutil.copytree(directory, aside, symlinks=True)
        raise AbortRunError

    with pytest.raises(AbortRunError):
        job(stop=StepCallback(job, step, act))
    shutil.rmtree(directory)
    aside.rename(directory)


def kill_run(directory: Path) -> None:
    kill_after_step(directory, 13)


def fence_run(directory: Path) -> None:
    """Run until another attempt claims the directory, so that the next save fails."""
    job = make_job(directory)
    with pytest.raises(FencedError):
        job(stop=StepCallback(job, 13, lambda: Fence(LocalStore(directory)).claim() and None))
