"""Eight faked devices on however few CPUs: no step waits for ever for a thread that there is not."""

from pathlib import Path

import pytest

from tests.support.job_process import Job

pytestmark = pytest.mark.soak

NUM_RUNS = 50
OPTIONS = (
    "name=llama",
    "job=tests.support.llama:PretrainLlama",
    "topology.mesh={data: 2, fsdp: 2, tensor: 2}",
    "config.model={}",
    "config.data.sequence_length=64",
    "config.train.total_steps=20",
    "config.train.global_batch_examples=16",
    "config.schedule.warmup_steps=4",
    "config.eval.every_steps=10",
    "config.eval.batches=2",
    "checkpoint.every_steps=5",
    "deadlines.step_seconds=60",  # a stall ends the run with 76
)


@pytest.mark.parametrize("number", range(NUM_RUNS))
def test_a_llama_on_eight_faked_devices_finishes(number: int, tmp_path: Path) -> None:
    job = Job("specs/gpt_nano.yaml", tmp_path / "run", OPTIONS, devices=8)
    job.launch(num_processes=1).expect(0)
