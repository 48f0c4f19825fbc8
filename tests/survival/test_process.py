"""Two processes of two devices: kill -9 and SIGTERM to either of them, or to the launcher above them."""

import contextlib
import os
import signal
from pathlib import Path

import pytest

from tests.support.job_process import Attempt, Job, compiling, has_state, make_uninterrupted_run, saving

SPEC = "specs/gpt_nano.yaml"
OPTIONS = (
    "config.train.total_steps=20",
    "config.train.global_batch_examples=8",
    "config.data.sequence_length=32",
    "config.schedule.warmup_steps=4",
    "checkpoint.every_steps=4",
    "logging.every_steps=1",
    "config.eval.every_steps=10",
    "config.eval.batches=2",
)
NUM_PROCESSES = 2
DEVICES = 2


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(SPEC, tmp_path / "run", OPTIONS, DEVICES)


def assert_ends_like_undisturbed(job: Job) -> None:
    job.launch(NUM_PROCESSES).expect(0)
    assert job.outcome() == make_uninterrupted_run(SPEC, OPTIONS, DEVICES, NUM_PROCESSES).outcome()
    assert [row["step"] for row in job.rows()] == list(range(1, 21))


def find_child(launcher: Attempt, process_id: int) -> int:
    """Process id, in the system's sense, of one process of a launched job."""
    for pid in launcher.children():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            if f"\0--process-id\0{process_id}\0".encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    raise AssertionError(launcher.report(f"has no process {process_id}"))


def row_beyond_the_newest_commit(attempt: Attempt) -> bool:
    """Return True if a row of a step beyond the newest commit has been written."""
    rows = attempt.job.rows()
    return has_state(attempt) and bool(rows) and rows[-1]["step"] > attempt.job.newest() > attempt.newest_at_start


@pytest.mark.soak  # daily with a counter, in test_exit_code.py
def test_the_peer_of_a_killed_process_exits_76(job: Job) -> None:
    for victim in range(NUM_PROCESSES):
        attempts = job.start_processes(NUM_PROCESSES)
        main, survivor = attempts[0], attempts[1 - victim]
        main.wait_until(lambda main=main: row_beyond_the_newest_commit(main), "the step after a commit")  # type: ignore[misc]
        attempts[victim].kill()
        survivor.expect(76)
    assert_ends_like_undisturbed(job)


@pytest.mark.soak
def test_a_launcher_without_restarts_exits_76_after_a_kill(job: Job) -> None:
    launcher = job.launch(NUM_PROCESSES)
    launcher.wait_until(lambda: compiling(launcher), "compiling")
    os.kill(find_child(launcher, 1), signal.SIGKILL)
    launcher.expect(76)
    assert not launcher.children()
    assert_ends_like_undisturbed(job)


@pytest.mark.soak  # daily with a counter, in test_exit_code.py and tests/launch/test_local.py
def test_sigterm_to_one_process_stops_all_at_one_step(job: Job) -> None:
    stopped_at = 0
    for target in range(NUM_PROCESSES):
        attempts = job.start_processes(NUM_PROCESSES)
        main = attempts[0]
        main.wait_until(lambda main=main: row_beyond_the_newest_commit(main), "the step after a commit")  # type: ignore[misc]
        attempts[target].process.send_signal(signal.SIGTERM)
        for attempt in attempts:
            attempt.expect(75)
        assert_all_is_saved(main, stopped_at)
        stopped_at = job.newest()
    launcher = job.launch(NUM_PROCESSES)
    launcher.wait_until(lambda: has_state(launcher) and job.rows()[-1]["step"] > stopped_at, "a step")
    launcher.process.send_signal(signal.SIGTERM)
    launcher.expect(75)
    assert_all_is_saved(launcher, stopped_at)
    assert_ends_like_undisturbed(job)


def assert_all_is_saved(attempt: Attempt, restored_step: int) -> None:
    """One stop, at one step, which is committed and is the last step that was made."""
    assert [event["step"] for event in attempt.events("restore")] == [restored_step] * bool(restored_step)
    (event,) = attempt.events("preempt")
    assert event["saved"]
    assert event["step"] == attempt.job.newest() == attempt.job.rows()[-1]["step"] > restored_step


@pytest.mark.soak
@pytest.mark.parametrize("target", [pytest.param(0, marks=pytest.mark.soak), 1])
def test_sigterm_during_compilation_ends_all_with_75(job: Job, tmp_path: Path, target: int) -> None:
    cold = Job(job.spec, job.directory, job.options, job.devices, cache=tmp_path / "cold cache")
    attempts = cold.start_processes(NUM_PROCESSES)
    attempts[0].wait_until(lambda: compiling(attempts[0]), "compiling")
    attempts[target].process.send_signal(signal.SIGTERM)
    for attempt in attempts:
        attempt.expect(75)
    assert not attempts[0].events("init")
    assert not job.committed()


@pytest.mark.soak
def test_restarts_by_the_launcher_change_no_bit(
    tmp_path: Path,
) -> None:
    spec = "specs/counter.yaml"
    options = ("config.total_steps=400", "config.width=65536", "config.step_seconds=0.03", "checkpoint.every_steps=5")
    job = Job(spec, tmp_path / "run", options, DEVICES)
    launcher = job.launch(NUM_PROCESSES, max_restarts=3)
    strikes = [
        (0, signal.SIGKILL, saving),
        (1, signal.SIGTERM, has_state),
        (1, signal.SIGKILL, saving),
        (1, signal.SIGKILL, has_state),
    ]
    for number, (victim, strike, phase) in enumerate(strikes):
        launcher.wait_until(
            lambda number=number, phase=phase: job.newest() >= 20 * (number + 1) and phase(launcher),  # type: ignore[misc]
            f"progress and {phase.__name__}",
        )
        os.kill(find_child(launcher, victim), strike)
        launcher.wait_until(lambda number=number: job.num_attempts() == number + 2, "another attempt")  # type: ignore[misc]
    launcher.expect(0)
    assert job.outcome() == make_uninterrupted_run(spec, options, DEVICES, NUM_PROCESSES).outcome()
    counted, phases = [line for line in launcher.output.splitlines() if line.startswith("launch: ")][-2:]
    assert "5 attempts (3 retryable, 1 preempted, 1 done)" in counted
    assert "lost" in phases


def test_the_launcher_kills_after_the_grace_period(tmp_path: Path) -> None:
    job = Job("specs/counter.yaml", tmp_path / "run", ("config.total_steps=1000", "config.step_seconds=0.05"))
    launcher = job.launch(1, grace_seconds=2)
    launcher.wait_until(lambda: has_state(launcher), "a state")
    (stuck,) = launcher.children()
    os.kill(stuck, signal.SIGSTOP)
    launcher.process.send_signal(signal.SIGTERM)
    launcher.expect(76)
    assert not Path(f"/proc/{stuck}").exists()
