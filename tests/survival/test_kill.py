"""kill -9 anywhere, over and over: the same bits and the same rows as a run that nobody disturbed."""

import random
from collections.abc import Collection
from pathlib import Path

import pytest

from tests.support.job_process import (
    SMALL_GPT_OPTIONS,
    Job,
    Phase,
    compiling,
    has_state,
    just_committed,
    last_committed,
    make_uninterrupted_counter_run,
    make_uninterrupted_run,
    restoring,
    retaining,
    saving,
    start_up,
)

# A slow pace costs no work, and leaves whoever strikes the time to do it.
COUNTER = ("config.total_steps=500", "config.step_seconds=0.01", "config.width=1000000", "checkpoint.every_steps=4")
NANO = (
    *SMALL_GPT_OPTIONS,
    "config.train.total_steps=120",
    "checkpoint.every_steps=6",
    "logging.every_steps=4",
    "config.eval.every_steps=10",
)

# How long after the beginning of a phase to strike, at most.
COUNTER_DELAYS: dict[Phase, float] = {
    start_up: 0.5,
    compiling: 0.01,
    restoring: 0.05,
    has_state: 0.15,
    saving: 0.03,
    just_committed: 0.0,
    retaining: 0.0,
}
TRAINER_DELAYS: dict[Phase, float] = COUNTER_DELAYS | {start_up: 1.0, compiling: 0.5, restoring: 0.2, has_state: 0.3}
DAILY_PHASES = (saving, restoring)


def storm(job: Job, num_kills: int, seed: int, delays: dict[Phase, float]) -> None:
    """Start and kill the job `num_kills` times or more, at random moments of every phase, each hit equally often."""
    rng = random.Random(seed)
    kills = 0
    while kills < num_kills:
        for phase in rng.sample(list(delays), len(delays)):
            hit, delay = False, rng.uniform(0, delays[phase])
            while not hit:
                attempt = job.start()
                if phase is restoring and not attempt.newest_at_start:
                    phase = compiling  # there is nothing to restore yet
                hit = attempt.kill_during(phase, delay)
                assert attempt.process.returncode == -9, attempt.report(f"ended before it was killed {phase.__name__}")
                kills, delay = kills + 1, delay / 2


def kill_before_done(job: Job, last_step: int, num_kills: int = 1) -> None:
    """Kill the job after the commit of its last step and before it has said so."""
    for _ in range(num_kills):
        attempt = job.start_paused("result")
        assert attempt.kill_during(last_committed(last_step)), attempt.report("was done before it could be killed")


def assert_each_logged_step_once(job: Job, every_steps: int, eval_steps: int, last_step: int) -> None:
    due = {*range(every_steps, last_step, every_steps), *range(eval_steps, last_step, eval_steps), last_step}
    assert [row["step"] for row in job.rows()] == sorted(due)


@pytest.mark.parametrize(
    ("num_kills", "last_step", "phases"),
    [
        (2, 60, DAILY_PHASES),
        *(pytest.param(*storm, COUNTER_DELAYS, marks=pytest.mark.soak) for storm in [(7, 300), (14, 500), (50, 500)]),
    ],
)
def test_kills_of_a_counter_change_no_bit(
    tmp_path: Path, num_kills: int, last_step: int, phases: Collection[Phase]
) -> None:
    job = Job("specs/counter.yaml", tmp_path / "run", (*COUNTER, f"config.total_steps={last_step}"))
    storm(job, num_kills, seed=1, delays={phase: COUNTER_DELAYS[phase] for phase in phases})
    kill_before_done(job.with_options("config.step_seconds=0"), last_step, num_kills // 7)
    job.finish()
    assert (
        job.outcome()
        == make_uninterrupted_counter_run((f"config.total_steps={last_step}", "config.width=1000000")).outcome()
    )
    assert job.committed() == [last_step - 8, last_step - 4, last_step]
    assert not job.uncommitted()


@pytest.mark.soak
@pytest.mark.parametrize("num_kills", [7, 14])
def test_kills_of_gpt_nano_in_every_phase_change_no_bit(tmp_path: Path, num_kills: int) -> None:
    job = Job("specs/gpt_nano.yaml", tmp_path / "run", NANO)
    cold = Job("specs/gpt_nano.yaml", tmp_path / "run", NANO, cache=tmp_path / "cold cache")
    first = cold.start()
    assert first.kill_during(compiling, 0.2), first.report("was not caught compiling")
    storm(job, num_kills, seed=2, delays=TRAINER_DELAYS)
    kill_before_done(job, 120, num_kills // 7)
    job.finish()
    assert_each_logged_step_once(job, 4, 10, 120)
    assert job.outcome() == make_uninterrupted_run("specs/gpt_nano.yaml", NANO).outcome()


@pytest.mark.soak
def test_kills_of_gpt_small_in_every_phase_change_no_bit(tmp_path: Path) -> None:
    whole = make_uninterrupted_run("specs/gpt_small.yaml")
    job = Job("specs/gpt_small.yaml", tmp_path / "run")
    storm(job, 21, seed=3, delays=TRAINER_DELAYS)
    kill_before_done(job, whole.result()["step"], num_kills=2)
    job.finish()
    assert job.outcome() == whole.outcome()
