"""Restart of a pod with fewer hosts: refused naming the missing hosts, or resumed if the spec allows it."""

import pytest

from runner.process import make_placements
from tests.support.job_process import Attempt, Job, make_uninterrupted_counter_run

SPEC = "specs/counter.yaml"
OPTIONS = ("config.width=64", "config.total_steps=400")
SOON_SECONDS = 15
SOON = f"deadlines.start_seconds={SOON_SECONDS}"


def start_without(job: Job, lost: int) -> list[Attempt]:
    """Start three processes and kill one before it joins; return the others."""
    attempts = job.start_processes(3)
    attempts[lost].kill()
    return [attempt for process, attempt in enumerate(attempts) if process != lost]


@pytest.mark.soak
def test_missing_hosts_are_named_and_no_host_runs_alone(tmp_path):
    job = Job(SPEC, tmp_path / "run", (*OPTIONS, SOON))
    without_second, without_first = start_without(job, 1), start_without(job, 0)
    for attempt in without_second:
        attempt.expect(76)
        said = f"process 1 of 3 did not join within {SOON_SECONDS} s; run the same command again"
        assert said in attempt.output, attempt.output
    for attempt in without_first:
        attempt.expect(76)
        assert "process 0 of 3 at 127.0.0.1:" in attempt.output
    assert not job.directory.exists()


@pytest.mark.soak
def test_an_elastic_job_resumes_with_the_present_hosts(tmp_path):
    job = Job(SPEC, tmp_path / "run", (*OPTIONS, "topology.elastic=true", "config.step_seconds=0.02"))
    attempts = job.start_processes(3)
    attempts[0].wait_until(lambda: job.newest() >= 50, "step 50")
    for attempt in attempts:
        attempt.kill()
    for attempt in start_without(job.with_options("config.step_seconds=0", SOON), 1):
        attempt.expect(0)
    assert [start["processes"] for start in job.events("start")] == [3, 2]
    assert job.events("restore")[0]["step"] >= 50
    assert job.result() == make_uninterrupted_counter_run(OPTIONS).result()


@pytest.mark.soak
def test_an_elastic_job_waits_for_hosts_over_which_its_batch_divides(tmp_path):
    options = ("topology.elastic=true", "topology.mesh={data: auto, fsdp: 1}", "config.train.total_steps=4", SOON)
    options = (*options, "config.schedule.warmup_steps=0")
    job = Job("specs/gpt_nano.yaml", tmp_path / "run", (*options, "config.train.global_batch_examples=8"), devices=1)
    for attempt in start_without(job, 1):
        # Two of three: 8 examples divide over them.
        attempt.expect(0)
    job = Job("specs/gpt_nano.yaml", tmp_path / "other", (*options, "config.train.global_batch_examples=9"), devices=1)
    for attempt in start_without(job, 1):
        attempt.expect(76)
        assert "2 of 3 processes joined, and mesh and batch do not divide over their 2 devices" in attempt.output
    assert not job.directory.exists()
    for attempt in job.start_processes(3):
        attempt.expect(0)


@pytest.mark.soak
@pytest.mark.parametrize("num_processes", [2, 3])
def test_an_elastic_job_grows_at_a_save_once_its_lost_host_waits(tmp_path, num_processes):
    """Of three processes two go on, and their coordination service has the port that the third one asks."""
    options = ("topology.elastic=true", "topology.grow=at_save", "deadlines.start_seconds=8")
    job = Job(SPEC, tmp_path / "run", (*OPTIONS, *options, "config.step_seconds=0.3", "checkpoint.every_steps=20"))
    placements = make_placements(num_processes)

    def start_worker(process: int) -> Attempt:
        return Attempt(job, ["launch.worker", *job.arguments, *placements[process]], 1)

    workers = [start_worker(process) for process in range(num_processes)]
    workers[0].wait_until(lambda: job.newest() >= 10, "a checkpoint")
    workers[-1].kill_tree()
    workers[0].wait_until(lambda: len(job.events("start")) == 2, "the start without it")
    workers[-1] = start_worker(num_processes - 1)
    for worker in workers:
        worker.expect(0)
    assert [start["processes"] for start in job.events("start")] == [num_processes, num_processes - 1, num_processes]
    (grow,), (stop,) = job.events("grow"), job.events("preempt")
    assert grow["processes"] == 1
    assert stop["saved"] is True
    assert job.events("restore")[-1]["step"] == stop["step"]
    assert job.result() == make_uninterrupted_counter_run(OPTIONS).result()
    assert list((job.directory / "waiting").iterdir()) == []
