"""The supervisor: exit codes that restart a job, restart limits and pauses."""

import itertools
from pathlib import Path

import pytest

from launch import supervisor
from launch.supervisor import CRASH_LOOP_ATTEMPTS, JobProgress, Supervisor

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _remove_pauses(monkeypatch):
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_SECONDS", 0.0)


def supervise(
    codes, steps=None, max_restarts=100, is_stopping=lambda: False, claims=None, is_done=lambda: False, commits=None
):
    """Run a supervisor on given exit codes, newest steps, claims and times of the last commit.

    Without `commits` each new step is one. Returns the exit code and the number of attempts.
    """
    left, newest = iter(codes), iter(itertools.count() if steps is None else steps)
    claimed = itertools.repeat(None) if claims is None else iter(claims)

    counts = None if commits is None else iter(commits)

    def read_progress():
        step = next(newest)
        commit = step if counts is None else next(counts)
        return JobProgress(step, next(claimed), is_done(), frozenset() if commit is None else frozenset([commit]))

    has_peers = claims is not None or is_done()
    return Supervisor(lambda: next(left), read_progress, is_stopping, max_restarts, has_peers).run()


@pytest.mark.parametrize("code", [0, 1, 2])
def test_a_final_code_is_not_restarted(code):
    assert supervise([code]) == (code, 1)
    assert supervise([76, 75, code]) == (code, 3)


def test_only_failures_count_as_restarts():
    assert supervise([75] * 50 + [0], max_restarts=0) == (0, 51)
    assert supervise([76, 75, 76, 0], steps=[7] * 9, max_restarts=2) == (0, 4)
    assert supervise([76, 75, 76, 0], steps=[7] * 9, max_restarts=1) == (76, 3)
    assert supervise([76], max_restarts=0) == (76, 1)


def test_a_commit_begins_a_new_count_of_restarts():
    assert supervise([76] * 50 + [0], max_restarts=1) == (0, 51)
    steps = [0, 0, 5, 5, 5]
    assert supervise([76] * 9, steps=steps, max_restarts=1) == (76, 3)
    # The directory cannot be read after every second attempt.
    assert supervise([76] * 9, steps=[5, None, 5, None, 5, None], max_restarts=3) == (76, 4)


def test_a_crash_loop_at_one_step_ends_with_its_reason(capsys):
    assert supervise([76] * 99, steps=[40] * 99) == (1, CRASH_LOOP_ATTEMPTS)
    assert "5 attempts in a row ended with 76 and step 40 is still the newest" in capsys.readouterr().out
    assert supervise([76] * 99, steps=[None] * 99) == (1, CRASH_LOOP_ATTEMPTS)
    assert "before any step was committed" in capsys.readouterr().out


def test_a_host_that_waits_for_its_peers_is_in_no_crash_loop():
    num_waits = 3 * CRASH_LOOP_ATTEMPTS
    assert supervise([76] * num_waits + [0], steps=[40] * 99, claims=[7] * 99) == (0, num_waits + 1)
    # Attempts that have claimed the directory count, with waits between them.
    claims = [7, 8, 8, 9, 9, 10, 10, 11, 11, 12]
    assert supervise([76] * 99, steps=[40] * 99, claims=claims) == (1, len(claims) - 1)
    # A commit begins a new count.
    steps = [0, 0, 0, 0, 0, 10, 10, 10, 10, 20, 20]
    assert supervise([76] * 9 + [0], steps=steps, claims=itertools.count()) == (0, 10)
    assert supervise([76] * 99, steps=[40] * 99, claims=[7] * 99, max_restarts=3) == (76, 4)


@pytest.mark.parametrize("code", [75, 76])
def test_a_job_that_is_done_is_not_started_again(code):
    assert supervise([code, 1], is_done=lambda: True) == (0, 1)


def test_a_host_that_an_elastic_job_does_without_waits_as_long_as_it_takes():
    commits = itertools.count()
    assert supervise([76] * 30 + [0], max_restarts=2, claims=[7] * 99, steps=[40] * 99, commits=commits) == (0, 31)


def test_attempts_of_other_hosts_are_no_crashes_of_this_one():
    claimed = itertools.count(1)

    def supervise_host(takes_part):
        codes = iter([76] * 2 * CRASH_LOOP_ATTEMPTS + [0])
        return Supervisor(
            lambda: next(codes), lambda: JobProgress(40, next(claimed), takes_part=takes_part), bool, 99, has_peers=True
        ).run()

    assert supervise_host(False) == (0, 2 * CRASH_LOOP_ATTEMPTS + 1)
    assert supervise_host(True) == (1, CRASH_LOOP_ATTEMPTS)


def test_commits_after_a_roll_back_are_progress():
    assert supervise([76] * 9 + [0], steps=itertools.repeat(500), commits=itertools.count()) == (0, 10)
    assert supervise([76] * 99, steps=itertools.repeat(500), commits=itertools.repeat(7)) == (1, CRASH_LOOP_ATTEMPTS)


def test_a_directory_that_cannot_be_read_has_no_progress(tmp_path):
    options = (str(tmp_path / "none.yaml"), [])
    progress = supervisor.read_progress(*options)
    assert progress.newest_step is None
    assert progress.newest_attempt is None
    assert not progress.is_done


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
