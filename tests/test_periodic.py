"""Predicates about steps and minutes."""

from runner.periodic import count_tokens, is_due, is_overdue


def due(every_steps, last_step, steps=10):
    return [step for step in range(steps + 1) if is_due(step, every_steps, last_step)]


def test_due_at_every_multiple_and_never_at_step_0():
    assert due(3, None) == [3, 6, 9]


def test_due_at_the_last_step_whatever_the_cadence():
    assert due(3, 10) == [3, 6, 9, 10]
    assert due(None, 10) == [10]
    assert due(None, None) == []


def test_overdue_once_the_minutes_have_passed():
    assert not is_overdue(159.9, 100.0, every_minutes=1)
    assert is_overdue(160.0, 100.0, every_minutes=1)
    assert is_overdue(130.0, 100.0, every_minutes=0.5)
    assert not is_overdue(1e9, 0.0, every_minutes=None)


def test_tokens_are_steps_times_tokens_of_a_step():
    assert count_tokens(0, 512 * 1024) == 0
    assert count_tokens(4768, 512 * 1024) == 2_499_805_184
