"""Save policy as a table of rules and step times, and the optimal save interval."""

import math

import pytest

from runner.checkpoint.policy import SaveKind, SavePolicy, compute_best_interval_seconds, is_due, is_overdue
from runner.spec import CheckpointConfig

FAST, DURABLE, REQUIRED = SaveKind.FAST, SaveKind.DURABLE, SaveKind.REQUIRED
LAST_STEP = 12


class FakeClock:
    """A clock whose time the test sets."""

    def __init__(self):
        self.seconds = 1000.0

    def __call__(self):
        return self.seconds


def simulate_saves(rule, *, seconds_a_step=0.0, interval_seconds=0.0, logging_every_steps=1):
    """Simulate `LAST_STEP` steps and return the kind of save at each step with one, each starting at once."""
    clock = FakeClock()
    policy = SavePolicy(CheckpointConfig(**rule), logging_every_steps, lambda answer: answer, clock)
    found = {}
    for step in range(1, LAST_STEP + 1):
        clock.seconds += seconds_a_step
        kind = policy.find_due_save(step, LAST_STEP, interval_seconds)
        if kind is not None:
            found[step] = kind
        if kind in (DURABLE, REQUIRED):
            policy.record_save()
    return found


LOCAL = {"local_directory": "/fast", "local_every_steps": 2}


@pytest.mark.parametrize(
    ("rule", "options", "expected"),
    [
        ({"every_steps": 5}, {}, {5: DURABLE, 10: DURABLE, 12: REQUIRED}),
        ({"every_steps": 6}, {}, {6: DURABLE, 12: REQUIRED}),
        ({"every_steps": 5} | LOCAL, {}, {2: FAST, 4: FAST, 5: DURABLE, 6: FAST, 8: FAST, 10: DURABLE, 12: REQUIRED}),
        ({"every_steps": None, "every_minutes": 1.0}, {}, {12: REQUIRED}),
        (
            {"every_steps": None, "every_minutes": 1.0},
            {"seconds_a_step": 20.0},
            {3: DURABLE, 6: DURABLE, 9: DURABLE, 12: REQUIRED},
        ),
        (
            {"every_steps": None, "every_minutes": 1.0},
            {"seconds_a_step": 20.0, "logging_every_steps": 4},
            {4: DURABLE, 8: DURABLE, 12: REQUIRED},
        ),
        (
            {"every_steps": 5, "every_minutes": 1.0},
            {"seconds_a_step": 20.0},
            {3: DURABLE, 5: DURABLE, 8: DURABLE, 10: DURABLE, 12: REQUIRED},
        ),
        (
            {"every_steps": 5, "keep_every_steps": 4},
            {},
            {4: DURABLE, 5: DURABLE, 8: DURABLE, 10: DURABLE, 12: REQUIRED},
        ),
        ({"every_steps": 6, "keep_every_steps": 6}, {}, {6: DURABLE, 12: REQUIRED}),
        (
            {"every_steps": 6, "keep_every_steps": 4} | LOCAL,
            {},
            {2: FAST, 4: DURABLE, 6: DURABLE, 8: DURABLE, 10: FAST, 12: REQUIRED},
        ),
        (
            {"every_steps": None, "every_minutes": 1.0, "keep_every_steps": 5},
            {"seconds_a_step": 20.0},
            {3: DURABLE, 5: DURABLE, 8: DURABLE, 10: DURABLE, 12: REQUIRED},
        ),
        (
            {"every": "auto", "keep_every_steps": 7},
            {"seconds_a_step": 20.0, "interval_seconds": 80.0},
            {4: DURABLE, 7: DURABLE, 11: DURABLE, 12: REQUIRED},
        ),
        (
            {"every": "auto"},
            {"seconds_a_step": 20.0, "interval_seconds": 80.0},
            {4: DURABLE, 8: DURABLE, 12: REQUIRED},
        ),
    ],
    ids=str,
)
def test_saves_due_at_each_step(rule, options, expected):
    assert simulate_saves(rule, **options) == expected


def test_host_0_decides_on_saves_by_time():
    clock, asked = FakeClock(), []

    def decide(answer):
        asked.append(answer)
        return False

    policy = SavePolicy(CheckpointConfig(every_steps=None, every_minutes=1.0), 2, decide, clock)
    clock.seconds += 3600
    assert [policy.find_due_save(step, LAST_STEP, 0.0) for step in (1, 2, 3, 4)] == [None] * 4
    assert asked == [True, True], "asked at logged steps on every host"


def test_the_best_interval_is_youngs_and_at_least_the_save_time():
    assert compute_best_interval_seconds(0.5, 3.0, 24.0) == pytest.approx(math.sqrt(2 * 0.5 * 86400))
    assert compute_best_interval_seconds(0.5, 900.0, 24.0) == 900.0
    assert compute_best_interval_seconds(0.0, 0.0, 24.0) == 1.0


# Predicates for periodic work in steps or minutes.


def list_due_steps(every_steps, last_step, steps=10):
    return [step for step in range(steps + 1) if is_due(step, every_steps, last_step)]


def test_work_is_due_at_every_multiple_except_step_0():
    assert list_due_steps(3, None) == [3, 6, 9]


def test_work_is_due_at_the_last_step_for_every_interval():
    assert list_due_steps(3, 10) == [3, 6, 9, 10]
    assert list_due_steps(None, 10) == [10]
    assert list_due_steps(None, None) == []


def test_work_is_overdue_after_the_minutes():
    assert not is_overdue(159.9, 100.0, every_minutes=1)
    assert is_overdue(160.0, 100.0, every_minutes=1)
    assert is_overdue(130.0, 100.0, every_minutes=0.5)
    assert not is_overdue(1e9, 0.0, every_minutes=None)
