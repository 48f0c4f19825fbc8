"""Every exit code, from a real situation, on every process of a job."""

import signal
import time
from pathlib import Path

import pytest

from tests.support.job_process import Job, make_uninterrupted_run

SPEC = "specs/counter.yaml"
OPTIONS = ("config.width=64", "checkpoint.every_steps=10")
SLOW = "config.step_seconds=0.05"


@pytest.mark.soak
def test_a_finished_job_exits_0_and_another_job_2(tmp_path):
    job = Job(SPEC, tmp_path / "run", (*OPTIONS, "config.total_steps=40"))
    for _ in range(2):
        for attempt in job.start_processes(2):
            attempt.expect(0)
    for attempt in job.with_options("name=another").start_processes(2):
        attempt.expect(2)
        assert "belongs to the job 'counter'" in attempt.output


def test_divergence_exits_1_and_keeps_the_last_checkpoint(tmp_path):
    job = Job(SPEC, tmp_path / "run", (*OPTIONS, "job=tests.support.faulty_jobs:DivergingCounter"))
    for attempt in job.start_processes(2):
        attempt.expect(1)
        assert "step 30 is not finite" in attempt.output
    assert job.committed() == [10, 20]


@pytest.mark.soak
def test_an_exception_in_one_process_exits_1_and_peers_76(tmp_path):
    job = Job(SPEC, tmp_path / "run", (*OPTIONS, "job=tests.support.faulty_jobs:FailingPeerCounter"))
    first, second = job.start_processes(2)
    second.expect(1)
    assert "ZeroDivisionError: a bug" in second.output
    first.expect(76)
    assert "process 1" in first.output
    assert "has died" in first.output
    assert "[0] counter: attempt 1 in " in first.output
    assert "attempt 1 in " not in second.output, "other hosts show warnings alone"
    logs = [(job.directory / "logs" / f"000001.{process}.log").read_text() for process in range(2)]
    assert all(f"INFO [{process}] counter: attempt 1 in " in log for process, log in enumerate(logs))
    assert r"ZeroDivisionError: a bug" in logs[1].splitlines()[-1]
    job.launch(2).expect(1)


@pytest.mark.parametrize("target", [pytest.param(0, marks=pytest.mark.soak), 1])
def test_a_preemption_exits_75_and_a_lost_peer_76(target, tmp_path):
    job = Job(SPEC, tmp_path / "run", (*OPTIONS, SLOW))
    attempts = job.start_processes(2)
    attempts[0].wait_until(lambda: job.newest() >= 20, "step 20")
    attempts[target].process.send_signal(signal.SIGTERM)
    for attempt in attempts:
        attempt.expect(75)
    newest = job.newest()
    assert [(event["step"], event["saved"]) for event in job.events("preempt")] == [(newest, True)]
    attempts = job.start_processes(2)
    attempts[0].wait_until(lambda: job.newest() >= newest + 20, "20 more steps")
    attempts[target].kill()
    attempts[1 - target].expect(76)
    assert job.events("restore")[0]["step"] == newest
    assert f"the job cannot continue: process {target} " in attempts[1 - target].output
    assert "has died" in attempts[1 - target].output


@pytest.mark.soak
def test_wrong_clocks_change_no_bit(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support" / "sick_process"))
    job = Job(SPEC, tmp_path / "run", (*OPTIONS, SLOW, "checkpoint.every_minutes=0.02"))
    for off_seconds in (3600, -3600):
        monkeypatch.setenv("CLOCK_SECONDS", str(off_seconds))
        attempt = job.start()
        newest = job.newest()
        attempt.wait_until(lambda newest=newest: job.newest() >= newest + 30, "30 more steps")
        attempt.kill()
    monkeypatch.delenv("CLOCK_SECONDS")
    job.with_options("config.step_seconds=0").finish()
    assert [row["step"] for row in job.events("restore")] == sorted(row["step"] for row in job.events("restore"))
    assert job.result() == make_uninterrupted_run(SPEC, OPTIONS).result()


@pytest.mark.soak
@pytest.mark.parametrize("off_seconds", [3600, -3600])
@pytest.mark.parametrize("process", [0, 1])
def test_a_wrong_clock_of_one_host_changes_no_bit(process, off_seconds, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support" / "sick_process"))
    wrong = {process: {"CLOCK_SECONDS": str(off_seconds)}}
    fast = (f"checkpoint.local_directory={tmp_path}/fast", "checkpoint.local_every_steps=5")
    job = Job(SPEC, tmp_path / "run", (*OPTIONS, SLOW, *fast, "checkpoint.every_minutes=0.02"))
    attempts = job.start_processes(2, wrong)
    attempts[0].wait_until(lambda: job.newest() >= 20, "step 20")
    if process == 0:  # which writes the events
        assert abs(job.events("start")[0]["time"] - time.time() - off_seconds) < 600
    attempts[1 - process].kill()
    attempts[process].expect(76)
    attempts = job.start_processes(2)
    newest = job.newest()
    attempts[0].wait_until(lambda: job.newest() >= newest + 20, "20 more steps")
    attempts[process].process.send_signal(signal.SIGTERM)
    for attempt in attempts:
        attempt.expect(75)
    for attempt in job.with_options("config.step_seconds=0").start_processes(2, wrong):
        attempt.expect(0)
    assert [row["step"] for row in job.events("restore")] == sorted(row["step"] for row in job.events("restore"))
    assert len(job.events("restore")) == 2
    assert job.result() == make_uninterrupted_run(SPEC, OPTIONS, num_processes=2).result()
