"""Optimizers whose state is more than moments, and groups, killed again and again: the bits and rows of a whole run."""

import pytest

from tests.support.harness import Job, undisturbed
from tests.survival.test_kill import NANO, TRAINER_DELAYS, assert_each_logged_step_once, kill_before_done, storm

SPEC = "specs/gpt_nano.yaml"
RECIPES = {
    "muon": ("config.optimizer.name=muon",),
    "galore": ("config.optimizer={name: galore, learning_rate: 0.001, rank: 8, projection_every_steps: 7}",),
    "schedule_free": (
        "config.optimizer={name: schedule_free_adamw, learning_rate: 0.001}",
        "config.schedule={name: constant, warmup_share: 0.1}",
    ),
    "groups": (
        "config.optimizer.groups=[{pattern: '*embedding', frozen: true}, "
        "{pattern: '*bias', rate: 0.5, clip_norm: 0.1}]",
        "config.optimizer.moments=bfloat16",
    ),
}
pytestmark = pytest.mark.soak


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_killed_in_every_phase_ends_with_the_same_bits_and_rows(tmp_path, recipe):
    options = (*NANO, *RECIPES[recipe])
    job = Job(SPEC, tmp_path / "run", options)
    storm(job, 7, seed=6, delays=TRAINER_DELAYS)
    kill_before_done(job, 120)
    job.finish()
    assert_each_logged_step_once(job, 4, 10, 120)
    assert job.outcome() == undisturbed(SPEC, options).outcome()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_on_two_processes_killed_again_and_again_ends_with_the_same_bits_and_rows(tmp_path, recipe):
    options = (*NANO, "topology.mesh={data: 1, fsdp: auto, tensor: 1}", *RECIPES[recipe])
    job = Job(SPEC, tmp_path / "run", options)
    for step in (6, 30, 72):
        attempt = job.launch(2)
        attempt.until(lambda step=step: any(committed >= step for committed in job.committed()), f"step {step}")
        attempt.kill_tree()
    job.launch(2).expect(0)
    assert_each_logged_step_once(job, 4, 10, 120)
    assert job.outcome() == undisturbed(SPEC, options, num_processes=2).outcome()
