"""A bit that flips in one device's memory is found at the next save, named, and never committed."""

from pathlib import Path

import pytest

from tests.support.corrupt_counter import BAD_STEP
from tests.support.job_process import Job, make_uninterrupted_counter_run

SPEC = "specs/counter.yaml"
OPTIONS = ("config.total_steps=60", "config.step_seconds=0.005", "checkpoint.every_steps=5")


@pytest.mark.soak
@pytest.mark.parametrize("tier", ["durable", "fast"])
def test_a_corrupt_replica_is_named_and_not_committed(tmp_path: Path, tier: str) -> None:
    fast = (
        f"checkpoint.local_directory={tmp_path / 'fast'}",
        "checkpoint.local_every_steps=1",
        "checkpoint.every_steps=30",
    )
    options = OPTIONS + (fast if tier == "fast" else ())
    job = Job(SPEC, tmp_path / "run", (*options, "job=tests.support.corrupt_counter:CorruptCounter"), devices=4)
    attempt = job.start()
    attempt.expect(76)
    (line,) = [line for line in attempt.output.splitlines() if "replicas" in line]
    assert f"step {BAD_STEP} is not saved: values: device 1 (process 0) has other bits" in line
    assert "Traceback" not in attempt.output
    (event,) = attempt.events("corruption")
    assert (event["step"], event["devices"], event["processes"]) == (BAD_STEP, [1], [0])
    assert max(job.committed(), default=0) < BAD_STEP
    again = job.finish()
    (restore,) = again.events("restore")
    assert (restore["step"], restore["tier"]) == ((24, "fast") if tier == "fast" else (20, "durable"))
    assert job.outcome() == make_uninterrupted_counter_run(OPTIONS).outcome()
