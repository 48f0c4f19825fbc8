"""`launch local` through a storm of random faults: the job ends by itself, with the bits of an undisturbed run."""

import contextlib
import os
import random
import re
import resource
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.support.job_process import (
    WHOLE_RUN_DEADLINE_SECONDS,
    Attempt,
    Job,
    make_uninterrupted_counter_run,
    make_uninterrupted_run,
)

SICK = Path(__file__).parents[1] / "support" / "sick_process"
SHORT_FREEZE_SECONDS = 2.0
SMALL_FILE_BYTES = 4096


def children(parent: int) -> list[int]:
    """The living child processes of a process."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, ppid = path.read_text().rpartition(")")[2].split()[:2]
            if int(ppid) == parent and state != "Z":
                found.append(int(path.parent.name))
    return found


FAULTS_IN_A_ROW_MAX = 3  # without a commit: the launcher gives a job up that ends five times without getting on


@dataclass
class Storm:
    """Faults at random moments in random processes of a launched job."""

    launched: Attempt
    chance: random.Random
    slow_disk: Path
    longest_pause_seconds: float
    num_faults: int = 0

    def lose_streams(self) -> None:
        """Inject one fault; do nothing if no process is alive."""
        time.sleep(self.chance.uniform(0.0, self.longest_pause_seconds))
        pids = children(self.launched.process.pid)
        if not pids:
            return
        fault = self.chance.choice([self.kill, self.terminate, self.freeze, self.fill_disk, self.slow_down])
        with contextlib.suppress(ProcessLookupError):
            fault(self.chance.choice(pids))
            self.num_faults += 1

    def kill(self, pid: int) -> None:
        """kill -9."""
        os.kill(pid, signal.SIGKILL)

    def terminate(self, pid: int) -> None:
        """SIGTERM."""
        os.kill(pid, signal.SIGTERM)

    def freeze(self, pid: int) -> None:
        """Stop the process for a while; some never continue where peers can notice it."""
        is_for_good = len(children(self.launched.process.pid)) > 1 and self.chance.random() < 0.5
        os.kill(pid, signal.SIGSTOP)
        if not is_for_good:
            time.sleep(self.chance.uniform(0.0, SHORT_FREEZE_SECONDS))
            os.kill(pid, signal.SIGCONT)

    def fill_disk(self, pid: int) -> None:
        """Make larger writes fail for a while."""
        soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (SMALL_FILE_BYTES, hard))
        time.sleep(self.chance.uniform(0.0, SHORT_FREEZE_SECONDS))
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))

    def slow_down(self, pid: int) -> None:
        """Make every fsync slow for a while."""
        self.slow_disk.touch()
        time.sleep(self.chance.uniform(0.0, 2 * SHORT_FREEZE_SECONDS))
        self.slow_disk.unlink()


def weather(job: Job, num_processes: int, num_faults: int, longest_pause_seconds: float, monkeypatch) -> float:
    """Run the job through so many faults to its end; the seconds that it took."""
    slow_disk = job.directory.parent / "slow"
    monkeypatch.setenv("SLOW_DISK", str(slow_disk))
    monkeypatch.setenv("PYTHONPATH", str(SICK))
    started = time.monotonic()
    launched = job.launch(num_processes, max_restarts=1000, grace_seconds=30)
    storm = Storm(launched, random.Random(num_faults), slow_disk, longest_pause_seconds)
    newest, num_in_a_row = 0, 0
    while storm.num_faults < num_faults:
        assert launched.process.poll() is None, launched.report(f"ended after {storm.num_faults} faults")
        storm.lose_streams()
        num_in_a_row += 1
        if num_in_a_row == FAULTS_IN_A_ROW_MAX:
            launched.wait_until(lambda newest=newest: job.newest() > newest, f"a commit beyond {newest}")
        if job.newest() > newest:
            newest, num_in_a_row = job.newest(), 0
    launched.expect(0, WHOLE_RUN_DEADLINE_SECONDS)
    # Orbax prints one of its own when a disk is full: its loop is closed before its last write has failed.
    assert not re.search(r'File "[^"]*/runner/', launched.output), launched.report("printed a traceback")
    return time.monotonic() - started


def at_its_pace(job: Job, whole: Job, num_processes: int) -> float:
    """Seconds of the undisturbed job, at the pace of the disturbed one."""
    started = time.monotonic()
    undisturbed_job = replace(job, directory=job.directory.parent / "undisturbed")
    undisturbed_job.launch(num_processes).expect(0, WHOLE_RUN_DEADLINE_SECONDS)
    assert undisturbed_job.outcome() == whole.outcome()
    return time.monotonic() - started


COUNTER = ("config.width=64", "checkpoint.every_steps=10")


@pytest.mark.soak
def test_a_few_faults(tmp_path, monkeypatch):
    steps = ("config.total_steps=1000",)
    job = Job("specs/counter.yaml", tmp_path / "run", (*COUNTER, *steps, "config.step_seconds=0.02"))
    weather(job, 1, 3, 1.0, monkeypatch)
    assert job.result() == make_uninterrupted_counter_run((*COUNTER, *steps)).result()


@pytest.mark.soak
def test_a_hundred_faults(tmp_path, monkeypatch):
    steps = ("config.total_steps=24000",)
    job = Job("specs/counter.yaml", tmp_path / "run", (*COUNTER, *steps, "config.step_seconds=0.01"))
    seconds = weather(job, 1, 100, 6.0, monkeypatch)
    whole = make_uninterrupted_run("specs/counter.yaml", (*COUNTER, *steps))
    assert job.result() == whole.result()
    print(f"100 faults: {seconds:.0f} s, undisturbed {at_its_pace(job, whole, 1):.0f} s")


@pytest.mark.soak
def test_fifteen_faults_of_a_gpt_on_two_processes(tmp_path, monkeypatch):
    options = ("config.train.total_steps=2000", "checkpoint.every_steps=20", "logging.every_steps=100")
    job = Job("specs/gpt_nano.yaml", tmp_path / "run", options, devices=1)
    seconds = weather(job, 2, 15, 20.0, monkeypatch)
    whole = make_uninterrupted_run("specs/gpt_nano.yaml", options, num_processes=2)
    assert job.outcome() == whole.outcome()
    print(f"15 faults: {seconds:.0f} s, undisturbed {at_its_pace(job, whole, 2):.0f} s")
