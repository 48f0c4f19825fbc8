"""The supervisor: exit codes that restart a job, restart limits and pauses."""

import itertools

import pytest

from launch import supervisor
from launch.supervisor import CRASH_LOOP_ATTEMPTS, Supervisor


@pytest.fixture(autouse=True)
def _remove_pauses(monkeypatch):
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_SECONDS", 0.0)


def supervise(codes, steps=None, max_restarts=100, is_stopping=lambda: False):
    """Run a supervisor on given exit codes and newest steps; return its exit code and the number of attempts."""
    left, newest = iter(codes), iter(itertools.count() if steps is None else steps)
    code, attempts = Supervisor(lambda: next(left), lambda: next(newest), is_stopping, max_restarts).run()
    return code, len(attempts)


@pytest.mark.parametrize("code", [0, 1, 2])
def test_a_final_code_is_not_restarted(code):
    assert supervise([code]) == (code, 1)
    assert supervise([76, 75, code]) == (code, 3)


def test_only_failures_count_as_restarts():
    assert supervise([75] * 50 + [0], max_restarts=0) == (0, 51)
    assert supervise([76, 75, 76, 0], max_restarts=2) == (0, 4)
    assert supervise([76, 75, 76, 0], max_restarts=1) == (76, 3)
    assert supervise([76], max_restarts=0) == (76, 1)


def test_a_crash_loop_at_one_step_ends_with_its_reason(capsys):
    assert supervise([76] * 99, steps=[40] * 99) == (1, CRASH_LOOP_ATTEMPTS)
    assert "5 attempts in a row ended with 76 and step 40 is still the newest" in capsys.readouterr().out
    assert supervise([76] * 99, steps=[None] * 99) == (1, CRASH_LOOP_ATTEMPTS)
    assert "before any step was committed" in capsys.readouterr().out


def test_failures_with_progress_are_not_a_crash_loop():
    steps = [0, 0, 0, 0, 0, 10, 10, 10, 10, 20, 20]
    assert supervise([76] * 9 + [0], steps=steps) == (0, 10)


def test_the_pause_doubles_until_there_is_progress(monkeypatch):
    pauses = []
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_SECONDS", 20.0)
    monkeypatch.setattr(Supervisor, "_pause", lambda self, seconds: not pauses.append(seconds))
    assert supervise([76] * 6 + [0], steps=[0, 0, 0, 0, 7, 7, 7, 7]) == (0, 7)
    assert pauses == [20, 40, 60, 20, 40, 60]


def test_a_stop_request_ends_the_supervisor():
    assert supervise([75, 0], is_stopping=lambda: True) == (75, 1)
    asked = iter([False, True, True])
    assert supervise([76, 0], is_stopping=lambda: next(asked)) == (76, 1)
