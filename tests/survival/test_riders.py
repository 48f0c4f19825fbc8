"""What rides along, and weights rounded by chance, killed and moved: the bits and rows of an undisturbed run."""

import pytest

from tests.support.harness import Job, undisturbed
from tests.survival.test_kill import NANO, TRAINER_DELAYS, assert_each_logged_step_once, kill_before_done, storm

SPEC = "specs/gpt_nano.yaml"
RIDING = (
    *NANO,
    "config.ema={decays: [0.9, 0.99], evaluate: true}",
    "config.noise_scale={decay: 0.9}",
    "config.precision.params=bfloat16",
    "config.precision.rounding=stochastic",
)
pytestmark = pytest.mark.soak


def test_averages_noise_and_rounding_killed_in_every_phase_end_with_the_same_bits_and_rows(tmp_path):
    job = Job(SPEC, tmp_path / "run", RIDING)
    storm(job, 7, seed=6, delays=TRAINER_DELAYS)
    kill_before_done(job, 120)
    job.finish()
    assert_each_logged_step_once(job, 4, 10, 120)
    assert job.outcome() == undisturbed(SPEC, RIDING).outcome()


def test_on_two_processes_killed_again_and_again_they_end_with_the_same_bits_and_rows(tmp_path):
    job = Job(SPEC, tmp_path / "run", RIDING)
    for step in (6, 30, 72):
        attempt = job.launch(2)
        attempt.until(lambda step=step: any(committed >= step for committed in job.committed()), f"step {step}")
        attempt.kill_tree()
    job.launch(2).expect(0)
    assert_each_logged_step_once(job, 4, 10, 120)
    assert job.outcome() == undisturbed(SPEC, RIDING, num_processes=2).outcome()
