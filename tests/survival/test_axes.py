"""Rows, experts and state cut over all that a mesh has, killed again and again: an undisturbed run's bits and rows."""

import pytest

from tests.support.harness import Job, undisturbed
from tests.survival.test_kill import NANO, TRAINER_DELAYS, assert_each_logged_step_once, kill_before_done, storm

CUT = "topology.mesh={data: 1, fsdp: 2, sequence: 2, expert: 2}"
SPEC, OPTIONS = "specs/moe_nano.yaml", (*NANO, CUT, "config.data.packing=documents")
pytestmark = pytest.mark.soak


def test_killed_in_every_phase_it_ends_with_the_same_bits_and_rows(tmp_path):
    job = Job(SPEC, tmp_path / "run", OPTIONS, devices=8)
    storm(job, 7, seed=6, delays=TRAINER_DELAYS)
    kill_before_done(job, 120)
    job.finish()
    assert_each_logged_step_once(job, 4, 10, 120)
    assert job.outcome() == undisturbed(SPEC, OPTIONS, devices=8).outcome()


def test_on_two_processes_killed_again_and_again_it_ends_with_the_same_bits_and_rows(tmp_path):
    job = Job(SPEC, tmp_path / "run", OPTIONS, devices=4)
    for step in (6, 30, 72):
        attempt = job.launch(2)
        attempt.until(lambda step=step: any(committed >= step for committed in job.committed()), f"step {step}")
        attempt.kill_tree()
    job.launch(2).expect(0)
    assert_each_logged_step_once(job, 4, 10, 120)
    assert job.outcome() == undisturbed(SPEC, OPTIONS, devices=4, num_processes=2).outcome()
