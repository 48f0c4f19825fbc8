"""Two processes of two devices, a fast tier each, and one bucket; machines are lost by deleting parts."""

import re
import shutil
import tempfile
import time
from pathlib import Path

import pytest

from tests.support.cloud_job import POLL_SECONDS, CloudAttempt, CloudJob, assert_same_outcome, make_unique_name
from tests.support.job_process import kill_all_when, list_common_steps, list_fast_tier_parts, make_uninterrupted_run
from tests.support.object_stores import BACKENDS, Backend, start_backend

SPEC = "specs/gpt_nano.yaml"
# Every process has a part of every large leaf.
OPTIONS = (
    "config.train.total_steps=124",  # far beyond the kills: training does not wait for a slow bucket
    "config.train.global_batch_examples=8",
    "config.data.sequence_length=32",
    "checkpoint.every_steps=10",
    "logging.every_steps=5",
    "config.eval.every_steps=20",
    "config.eval.batches=2",
    "topology.mesh={data: 1, fsdp: auto, tensor: 1}",
)
DEVICES, PROCESSES = 2, 2
RESTORED = re.compile(r"restored step (\d+) from the (run's directory|fast tier)")
ARRAYS_OF_FIRST_ATTEMPT = r"checkpoints/\d+/arrays\.1/.*"


def kill_beyond_durable_step(job: CloudJob, fast: Path, durable: int) -> CloudAttempt:
    """kill -9 to both, once `durable` is in the bucket and both have two fast steps beyond it; the first of them."""
    attempts = job.start_processes(PROCESSES)

    def is_beyond() -> bool:
        time.sleep(POLL_SECONDS)
        newest = job.newest()
        return newest >= durable and len([step for step in list_common_steps(fast, PROCESSES) if step > newest]) > 1

    kill_all_when(attempts, is_beyond, f"two fast steps beyond {durable}")
    return attempts[0]


def restored_step_and_tier(attempt: CloudAttempt) -> tuple[int, str]:
    """Step and tier, by the output: what a process says right before a kill -9 may never be in the bucket's ledger."""
    found = RESTORED.search(attempt.output)
    assert found is not None, attempt.output
    return int(found[1]), found[2]


def lose_machines(backend: Backend) -> None:
    with tempfile.TemporaryDirectory() as directory:
        fast = Path(directory)
        tier = (f"checkpoint.local_directory={fast}", "checkpoint.local_every_steps=2")
        job = CloudJob(backend, make_unique_name("machines"), SPEC, (*OPTIONS, *tier), devices=DEVICES)
        kill_beyond_durable_step(job, fast, 10)

        older, newest = list_common_steps(fast, PROCESSES)[-2:]
        part = list_fast_tier_parts(fast, 1)[newest]
        max((part / "arrays").iterdir(), key=lambda path: path.stat().st_size).unlink()
        num_requests = len(backend.proxy.requests)
        attempt = kill_beyond_durable_step(job, fast, job.newest() + 10)
        assert restored_step_and_tier(attempt) == (older, "fast tier")
        assert f"checkpoint {newest} (fast) not restored: process 1: " in attempt.output, attempt.output
        # What the second attempt saves itself it reads back.
        is_earlier = job.match_requests("GET", ARRAYS_OF_FIRST_ATTEMPT)
        assert not [request for request in backend.proxy.requests[num_requests:] if is_earlier(*request)], "reads"

        (machine,) = fast.glob("*/1")
        shutil.rmtree(machine)
        durable = job.newest()
        attempts = job.start_processes(PROCESSES)
        for attempt in attempts:
            attempt.expect(0)
        assert restored_step_and_tier(attempts[0]) == (durable, "run's directory")
        assert_same_outcome(job, make_uninterrupted_run(SPEC, OPTIONS, DEVICES, PROCESSES))


@pytest.mark.soak
@pytest.mark.parametrize("name", BACKENDS)
def test_a_lost_fast_tier_changes_no_bit(name: str) -> None:
    with start_backend(name) as backend:
        lose_machines(backend)
