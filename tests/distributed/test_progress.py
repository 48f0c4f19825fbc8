"""Phases, steps and deadlines of the training thread."""

import pytest

from runner.distributed.clock import DATA, EVALUATION, STEP, Progress
from runner.spec import Deadlines


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test advances."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_the_step_deadline_is_a_multiple_of_recent_steps_and_at_least_a_minute(clock):
    progress, deadlines = Progress(), Deadlines(phase_seconds=500.0)
    assert progress.deadline_seconds(deadlines) == 500.0
    progress.report_step(0)
    assert progress.deadline_seconds(deadlines) == 500.0  # the first step may still load a program
    for step in range(1, 4):
        clock[0] += 0.5
        progress.report_step(step)
    assert progress.get_step_seconds() == [0.5, 0.5, 0.5]
    assert progress.deadline_seconds(deadlines) == 60.0
    clock[0] += 7.0
    progress.report_step(4)
    assert progress.deadline_seconds(deadlines) == 140.0
    assert progress.deadline_seconds(Deadlines(step_seconds=3.0)) == 3.0


def test_a_phase_has_its_own_deadline_and_does_not_count_as_a_step(clock):
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


def test_a_wait_for_data_has_a_phase_deadline_outside_the_step(clock):
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


def test_an_awaited_step_sets_the_event():
    progress = Progress()
    progress.awaited_step = 5
    progress.report_step(4)
    assert not progress.has_arrived.is_set()
    progress.report_step(6)
    assert progress.has_arrived.is_set()
    assert progress.awaited_step is None
