"""What a job leaves in a process that goes on to others: no thread, and no open file."""

import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from runner import RestoreableJob
from runner.storage import bucket
from tests.support.tiny_jobs import make_counter, make_gpt, stop_after
from tests.test_values import TrainLookup


def run(job: RestoreableJob) -> None:
    job()


def stop(job: RestoreableJob) -> None:
    stop_after(job, 4)


def make_with_fast_tier(directory: Path) -> RestoreableJob:
    return make_counter(
        directory, **{"checkpoint.local_directory": f"{directory}.fast", "checkpoint.local_every_steps": 2}
    )


JOBS: dict[str, Callable[[Path], RestoreableJob]] = {
    "counter": make_counter,
    "fast tier": make_with_fast_tier,
    "trainer": lambda directory: make_gpt(directory, TrainLookup),
}


def list_threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.is_alive()}


def list_descriptors() -> set[str]:
    return {os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.exists()}


@pytest.mark.daily(3)
@pytest.mark.parametrize("end", [run, stop], ids=lambda end: end.__name__)
@pytest.mark.parametrize("kind", JOBS)
def test_a_job_that_has_ended_leaves_no_thread_and_no_open_file(
    kind: str, end: Callable[[RestoreableJob], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket, "IDLE_SECONDS", 0.1)
    threads = list_threads()
    end(JOBS[kind](tmp_path / "run"))
    deadline_seconds = time.monotonic() + 30
    while (left := list_threads() - threads) and time.monotonic() < deadline_seconds:
        gc.collect()
        time.sleep(0.1)
    assert left == set()
    gc.collect()
    assert [name for name in list_descriptors() if name.startswith(str(tmp_path))] == []
