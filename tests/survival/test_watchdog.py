"""No wait without an end: who hangs is named, all end with 76, and the next attempt gives the same bits."""

import time

import pytest

from tests.support.job_process import Attempt, Job, make_uninterrupted_counter_run

SPEC = "specs/counter.yaml"
STEP_SECONDS = 8  # more than any step takes on a busy machine
SLOW = ("config.step_seconds=0.03", "config.total_steps=600", "config.width=64")


@pytest.mark.soak
def test_a_hanging_step_exits_76_with_stack_traces(tmp_path):
    options = ("config.total_steps=60", f"deadlines.step_seconds={STEP_SECONDS}", "checkpoint.every_steps=10")
    job = Job(SPEC, tmp_path / "run", options)
    hanging = job.with_options("job=tests.support.faulty_jobs:HangingCounter").start()
    hanging.expect(76)
    assert "is in step 20 for" in hanging.output
    assert "past the deadline; run the same command again" in hanging.output
    assert "Traceback" not in hanging.output
    stacks = (job.directory / "stacks" / "000001.0.txt").read_text()
    assert "tests/support/faulty_jobs.py" in stacks
    assert "in run" in stacks
    (stuck,) = job.events("stuck")
    assert (stuck["step"], stuck["attempt"]) == (19, 1)
    job.with_options("job=tests.support.faulty_jobs:HangingCounter").finish()
    assert job.result() == make_uninterrupted_counter_run(("config.total_steps=60",)).result()


def freeze_one(job: Job, frozen: int) -> list[Attempt]:
    """Both processes of a job, one of them stopped in mid-run."""
    attempts = job.start_processes(2)
    attempts[0].wait_until(lambda: job.newest() >= 50, "step 50")
    attempts[frozen].freeze()
    return attempts


@pytest.mark.soak
@pytest.mark.parametrize("frozen", [1, 0])
def test_peers_name_a_frozen_process_and_exit_76(frozen, tmp_path):
    job = Job(SPEC, tmp_path / "run", SLOW)
    attempts = freeze_one(job, frozen)
    survivor = attempts[1 - frozen]
    survivor.expect(76)
    assert "Traceback" not in survivor.output
    assert f"the job cannot continue: process {frozen}" in survivor.output, survivor.report("does not name the frozen")
    assert "has not responded for" in survivor.output
    assert (job.directory / "stacks" / f"000001.{1 - frozen}.txt").read_text().count("Thread 0x") > 2
    attempts[frozen].thaw()
    attempts[frozen].expect(76)
    for attempt in job.with_options("config.step_seconds=0").start_processes(2):
        attempt.expect(0)
    assert job.result() == make_uninterrupted_counter_run(SLOW).result()


@pytest.mark.soak
def test_peers_name_a_refusing_process_and_exit_76(tmp_path):
    job = Job(SPEC, tmp_path / "run", (*SLOW, "job=tests.support.faulty_jobs:RejectedDataCounter"))
    other, refusing = job.start_processes(2)
    refusing.expect(2)
    other.expect(76)
    assert "process 1" in other.output
    assert "has exited with code 2" in other.output, other.report("says else")


@pytest.mark.soak
def test_a_paused_job_continues(tmp_path):
    options = ("config.width=64", "config.total_steps=300", f"deadlines.step_seconds={STEP_SECONDS}")
    job = Job(SPEC, tmp_path / "run", (*options, "config.step_seconds=0.02"))
    attempt = job.start()
    attempt.wait_until(lambda: job.newest() >= 50, "step 50")
    attempt.freeze()
    time.sleep(1.5 * STEP_SECONDS)  # the pause itself is what must not count
    attempt.thaw()
    attempt.expect(0)
    assert not job.events("stuck")
