"""Predicates for periodic work in steps or minutes."""

from runner.periodic import is_due, is_overdue


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
