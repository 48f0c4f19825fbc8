"""A job that begins with foreign weights, killed in every phase, and as several processes."""

from pathlib import Path

import pytest

from tests.support.job_process import (
    Job,
    Phase,
    compiling,
    has_state,
    just_committed,
    make_uninterrupted_run,
    run_runner,
    saving,
    start_up,
)
from tests.support.simulated_devices import environment
from tests.survival.test_kill import NANO, storm
from tests.survival.test_process import DEVICES, NUM_PROCESSES, OPTIONS, SPEC

pytestmark = pytest.mark.soak
DELAYS: dict[Phase, float] = {start_up: 1.0, compiling: 0.5, has_state: 0.3, saving: 0.03, just_committed: 0.0}


def exported(job: Job, directory: Path) -> Path:
    code, output = run_runner(environment(1), "export", str(job.directory), "-o", str(directory / "exported"))
    assert code == 0, output
    return directory / "exported"


def test_kills_after_a_warm_start_change_no_bit(tmp_path: Path) -> None:
    source = exported(make_uninterrupted_run("specs/gpt_nano.yaml", NANO), tmp_path)
    begun = (*NANO, f"checkpoint.init_from={source}")
    whole = Job("specs/gpt_nano.yaml", tmp_path / "whole", begun)
    whole.launch(1).expect(0)
    job = Job("specs/gpt_nano.yaml", tmp_path / "killed", begun)
    storm(job, 10, 0, DELAYS)
    job.launch(1).expect(0)
    assert job.outcome() == whole.outcome()


def test_two_processes_start_from_equal_bits(tmp_path: Path) -> None:
    source = exported(make_uninterrupted_run(SPEC, OPTIONS, DEVICES, NUM_PROCESSES), tmp_path)
    options = (*OPTIONS, f"checkpoint.init_from={source}", "topology.mesh={data: 1, fsdp: 2, tensor: 2}")
    digests = []
    for number, devices in ((1, 4), (2, 2)):
        attempt = Job(SPEC, tmp_path / str(number), options, devices).launch(number)
        attempt.expect(0)
        digests += [event["fingerprint"] for event in attempt.events("init")]
    assert len(digests) == 2
    assert len(set(digests)) == 1
