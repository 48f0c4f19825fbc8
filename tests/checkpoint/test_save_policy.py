"""Save policy as a table of rules and step times, and the optimal save interval."""

import math
from fractions import Fraction

import pytest

from runner.checkpoint.policy import (
    FailureRecord,
    SaveKind,
    SavePolicy,
    compute_best_interval_seconds,
    compute_expected_goodput,
    count_failures,
    estimate_hours_between_failures,
    find_replica_advice,
    is_due,
    is_overdue,
)
from runner.spec import CheckpointConfig

FAST, DURABLE, REQUIRED = SaveKind.FAST, SaveKind.DURABLE, SaveKind.REQUIRED
LAST_STEP = 12


class FakeClock:
    """A clock whose time the test sets."""

    def __init__(self):
        self.seconds = 1000.0

    def __call__(self):
        return self.seconds


def simulate_saves(rule, *, seconds_a_step=0.0, interval_seconds=0.0, logging_every_steps=1, steps_per_epoch=None):
    """Simulate `LAST_STEP` steps and return the kind of save at each step with one, each starting at once."""
    clock = FakeClock()
    policy = SavePolicy(CheckpointConfig(**rule), logging_every_steps, lambda answer: answer, clock, steps_per_epoch)
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
        ({"every_epochs": 1}, {"steps_per_epoch": Fraction(7, 2)}, {4: DURABLE, 7: DURABLE, 11: DURABLE, 12: REQUIRED}),
        ({"every_epochs": 0.3}, {"steps_per_epoch": Fraction(10)}, {3: DURABLE, 6: DURABLE, 9: DURABLE, 12: REQUIRED}),
        (
            {"every_epochs": 1, "every_steps": 5} | LOCAL,
            {"steps_per_epoch": Fraction(9)},
            {2: FAST, 4: FAST, 5: DURABLE, 6: FAST, 8: FAST, 9: DURABLE, 10: DURABLE, 12: REQUIRED},
        ),
        (
            {"every_epochs": 2},
            {"steps_per_epoch": Fraction(1, 4)},
            dict.fromkeys(range(1, 12), DURABLE) | {12: REQUIRED},
        ),
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


# Failures.


def attempt_events(number, hours, *ends, began=1.7e9):
    """Events of one attempt of process 0, the last of them `hours` after the first."""
    start = {"attempt": number, "process": 0, "time": began, "event": "start"}
    return [start, *({"attempt": number, "process": 0, "time": began + 3600 * hours} | end for end in ends)]


COMMIT = {"event": "commit"}


@pytest.mark.parametrize(
    ("end", "is_failure"),
    [
        (COMMIT, True),  # killed
        ({"event": "failed", "code": 76}, True),
        ({"event": "stuck"}, True),
        ({"event": "preempt", "saved": False}, True),
        ({"event": "preempt", "saved": True}, False),
        ({"event": "done"}, False),
        ({"event": "grow"}, False),
        ({"event": "failed", "code": 1}, False),
        ({"event": "failed", "code": 2}, False),
    ],
)
def test_an_attempt_that_lost_work_counts_as_a_failure(end, is_failure):
    assert count_failures(attempt_events(1, 5.0, COMMIT, end), 2) == (5.0, is_failure)


def test_failures_of_earlier_attempts_are_counted_and_no_others():
    events = [*attempt_events(1, 5.0, COMMIT), *attempt_events(2, 3.0, COMMIT), *attempt_events(3, 7.0, COMMIT)]
    assert count_failures(events, 3) == (8.0, 2)
    assert count_failures(events, 1) == count_failures([], 9) == (0.0, 0)


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"attempt": 1, "process": 0, "time": math.inf},
        {"attempt": 1, "process": 0, "time": "5"},
        {"attempt": "1", "process": 0, "time": 1e9},
        {"attempt": True, "process": 0, "time": 1e9},
        {"attempt": -1, "process": 0, "time": 1e9},
        {"attempt": 1, "process": 3, "time": 1.7e9 + 1e6, "event": "failed", "code": 2},  # a clock that is ahead
        {"attempt": 1, "event": ["done"]},
    ],
)
def test_events_that_are_not_valid_are_skipped(row):
    assert count_failures([*attempt_events(1, 5.0, COMMIT), row], 2) == (5.0, 1)


def test_the_time_between_failures_begins_with_the_devices_and_ends_with_the_record():
    assert estimate_hours_between_failures(1) == estimate_hours_between_failures(2000) == 24.0
    assert estimate_hours_between_failures(16384) == pytest.approx(3.05, abs=0.01)
    assert estimate_hours_between_failures(8, FailureRecord(hours=6.0, num_failures=2)) == 10.0
    assert estimate_hours_between_failures(8, FailureRecord(hours=999.0, num_failures=1000)) == pytest.approx(
        1, abs=0.1
    )
    assert estimate_hours_between_failures(8, FailureRecord(hours=100.0)) == 124.0


def test_the_expected_goodput_counts_stalls_lost_steps_and_restarts():
    assert compute_expected_goodput(100.0, 0.0, 0.0, 1e9) == pytest.approx(1.0)
    assert compute_expected_goodput(90.0, 10.0, 0.0, 1e9) == pytest.approx(0.9)
    assert compute_expected_goodput(1800.0, 0.0, 900.0, 0.5) == pytest.approx(0.5)
    # The best interval is better than a shorter and a longer one.
    best = compute_best_interval_seconds(5.0, 0.0, 3.0)
    shares = [compute_expected_goodput(seconds, 5.0, 120.0, 3.0) for seconds in (best / 2, best, best * 2)]
    assert max(shares) == shares[1]


def test_many_hosts_are_advised_to_use_replicas():
    tier = CheckpointConfig(local_directory="/tmp/fast", local_every_steps=10)
    assert find_replica_advice(64, CheckpointConfig()) is None
    assert "one of 65 hosts" in find_replica_advice(65, CheckpointConfig())
    assert "local_replicas: 1" in find_replica_advice(65, tier)
    assert find_replica_advice(65, tier.model_copy(update={"local_replicas": 1})) is None


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
