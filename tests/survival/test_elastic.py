"""A pod that starts again with fewer hosts: refused with who is missing, or gone on with if the spec allows it."""

from tests.support.harness import Attempt, Job, undisturbed

SPEC = "specs/counter.yaml"
OPTIONS = ("config.width=64", "config.total_steps=400", "deadlines.start_seconds=5")


def without(job: Job, lost: int) -> list[Attempt]:
    """Three processes are started, and one is lost before it has said anything."""
    attempts = job.start_processes(3)
    attempts[lost].kill()
    return [attempt for process, attempt in enumerate(attempts) if process != lost]


def test_hosts_that_do_not_come_are_named_and_nobody_runs_alone(tmp_path):
    job = Job(SPEC, tmp_path / "run", OPTIONS)
    for attempt in without(job, 1):
        attempt.expect(76)
        assert "process 1 of 3 did not come within 5 s; run the same command again" in attempt.output
    for attempt in without(job, 0):
        attempt.expect(76)
        assert "process 0 of 3 at 127.0.0.1:" in attempt.output
    assert not job.directory.exists()


def test_an_elastic_job_resumes_with_the_hosts_that_came(tmp_path):
    job = Job(SPEC, tmp_path / "run", (*OPTIONS, "topology.elastic=true", "config.step_seconds=0.02"))
    attempts = job.start_processes(3)
    attempts[0].until(lambda: job.newest() >= 50, "step 50")
    for attempt in attempts:
        attempt.kill()
    for attempt in without(job.with_options("config.step_seconds=0"), 1):
        attempt.expect(0)
    assert [start["processes"] for start in job.events("start")] == [3, 2]
    assert job.events("restore")[0]["step"] >= 50
    assert job.result() == undisturbed(SPEC, OPTIONS[:2]).result()
