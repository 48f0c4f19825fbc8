"""An adapter beside its base, killed and moved: the bits and rows of an undisturbed run."""

import pytest

from runner.checkpoint.manifest import CHECKPOINTS
from tests.support.harness import Job, undisturbed
from tests.survival.test_kill import NANO, TRAINER_DELAYS, assert_each_logged_step_once, kill_before_done, storm

SPEC = "specs/gpt_nano.yaml"
pytestmark = pytest.mark.soak


def test_an_adapter_killed_in_every_phase_ends_with_the_same_bits_and_rows(tmp_path):
    base = Job(SPEC, tmp_path / "base", (*NANO, "seed=3"))
    base.finish()
    options = (
        *NANO,
        f"checkpoint.init_from={tmp_path / 'base' / CHECKPOINTS / '120'}",
        "config.adapter={rank: 4, targets: [blocks.query, blocks.value]}",
        "config.ema={decays: [0.9], evaluate: true}",
    )
    job = Job(SPEC, tmp_path / "run", options)
    storm(job, 7, seed=8, delays=TRAINER_DELAYS)
    kill_before_done(job, 120)
    job.finish()
    assert_each_logged_step_once(job, 4, 10, 120)
    assert job.outcome() == undisturbed(SPEC, options).outcome()
