"""What the training thread is at, and how long it may be at it."""

import pytest

from runner.distributed.clock import DATA, EVALUATION, STEP, Progress
from runner.spec import Deadlines


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_a_step_may_take_many_times_the_usual_and_never_less_than_a_minute(clock):
    progress, deadlines = Progress(), Deadlines(phase_seconds=500.0)
    assert progress.deadline_seconds(deadlines) == 500.0
    progress.report_step(0)
    assert progress.deadline_seconds(deadlines) == 500.0  # the first step may still load what the others have
    for step in range(1, 4):
        clock[0] += 0.5
        progress.report_step(step)
    assert progress.get_step_seconds() == [0.5, 0.5, 0.5]
    assert progress.deadline_seconds(deadlines) == 60.0
    clock[0] += 7.0
    progress.report_step(4)
    assert progress.deadline_seconds(deadlines) == 140.0
    assert progress.deadline_seconds(Deadlines(step_seconds=3.0)) == 3.0


def test_what_is_no_step_has_its_own_deadline_and_does_not_count_as_one(clock):
    progress, deadlines = Progress(), Deadlines(phase_seconds=500.0, step_seconds=3.0)
    progress.report_step(0)
    clock[0] += 1.0
    progress.report_step(1)
    with progress.report_phase(EVALUATION):
        assert progress.phase == EVALUATION
        assert progress.deadline_seconds(deadlines) == 500.0
        clock[0] += 100.0
    assert (progress.phase, progress.since_seconds) == (STEP, clock[0])
    clock[0] += 1.0
    progress.report_step(2)
    assert progress.get_step_seconds() == [1.0, 1.0]


def test_a_wait_for_data_has_a_phases_deadline_and_is_no_part_of_the_step(clock):
    progress, deadlines = Progress(), Deadlines(phase_seconds=500.0, step_seconds=3.0)
    progress.report_step(0)
    clock[0] += 1.0
    progress.report_step(1)
    clock[0] += 0.5

    def batches():
        assert (progress.phase, progress.since_seconds) == (DATA, clock[0])
        assert progress.deadline_seconds(deadlines) == 500.0
        clock[0] += 100.0
        yield "batch"

    assert progress.take_batch(batches()) == "batch"
    assert (progress.phase, clock[0] - progress.since_seconds) == (STEP, 0.5)
    clock[0] += 1.0
    progress.report_step(2)
    assert progress.get_step_seconds() == [1.0, 1.5]


def test_an_awaited_step_wakes_who_waits_for_it():
    progress = Progress()
    progress.awaited_step = 5
    progress.report_step(4)
    assert not progress.has_arrived.is_set()
    progress.report_step(6)
    assert progress.has_arrived.is_set()
    assert progress.awaited_step is None
