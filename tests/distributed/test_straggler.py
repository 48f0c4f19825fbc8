"""Detection of stragglers."""

import pytest

from runner.distributed.clock import Progress
from runner.distributed.watchdog import StragglerDetector, find_stragglers
from tests.support.coordinator import MemoryCoordinator


@pytest.mark.parametrize(
    ("after_seconds", "step_seconds", "late"),
    [
        ([0.0, 0.01, 0.05, 0.02], 0.3, []),
        ([0.0, 0.01, 0.25, 0.02], 0.3, [2]),
        ([0.3, 0.0], 0.3, [0]),
        ([0.0, 0.3], 0.3, [1]),
        ([0.0, 0.3], 10.0, []),
        ([0.0, 2.0], 10.0, [1]),
        ([0.0, 0.0, 0.5, 0.6], 1.0, [2, 3]),
        ([0.0], 1.0, []),
    ],
)
def test_a_straggler_is_significantly_later_than_the_median(after_seconds, step_seconds, late):
    assert find_stragglers(after_seconds, step_seconds) == late


def simulate_steps(delays_seconds, monkeypatch, seconds=60.0, tick_seconds=0.01, step_seconds=0.5):
    """Simulate steps at which processes arrive with the given delays, and return the reported stragglers."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    rounds = [StragglerDetector(host, Progress()) for host in MemoryCoordinator(len(delays_seconds)).hosts()]
    for every in rounds:
        every._progress.report_step(0)
    found = []
    for tick in range(1, int(seconds / tick_seconds)):
        now[0] = tick * tick_seconds
        for every, delay_seconds in zip(rounds, delays_seconds, strict=True):
            step = int(max(now[0] - delay_seconds, 0.0) / step_seconds)
            if step > every._progress.step:
                every._progress.report_step(step)
            if tick % 100 == 0:
                every.update_round()
            straggling = every.exchange_arrivals()
            if straggling is not None:
                found.append(straggling)
    return found


def test_a_process_that_straggles_twice_is_reported_once(monkeypatch):
    (found,) = simulate_steps([0.0, 0.2, 0.0, 0.01], monkeypatch)
    assert found.processes == [1]
    assert found.after_seconds == pytest.approx([0.0, 0.2, 0.0, 0.01], abs=0.02)


def test_process_0_can_be_a_straggler(monkeypatch):
    (found,) = simulate_steps([0.3, 0.0, 0.0], monkeypatch)
    assert found.processes == [0]


def test_small_delays_are_not_reported(monkeypatch):
    assert simulate_steps([0.0, 0.02, 0.04], monkeypatch) == []
