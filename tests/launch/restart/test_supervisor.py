"""The supervisor: exit codes that restart a job, restart limits and pauses."""

import itertools
import json
import socket
from pathlib import Path

import pytest

from launch import supervisor
from launch.supervisor import CRASH_LOOP_ATTEMPTS, JobProgress, Supervisor
from runner.spec import load_document
from runner.storage import encode_line
from tests.support.memory_bucket import MemoryDriver, make_memory_bucket

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _remove_pauses(monkeypatch):
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_SECONDS", 0.0)


def supervise(
    codes, steps=None, max_restarts=100, is_stopping=lambda: False, claims=None, is_done=lambda: False, commits=None
):
    """Run a supervisor on given exit codes, newest steps, claims and numbers of commits.

    Without `commits` each new step is one. Returns the exit code and the number of attempts.
    """
    left, newest = iter(codes), iter(itertools.count() if steps is None else steps)
    claimed = itertools.repeat(None) if claims is None else iter(claims)

    counts = None if commits is None else iter(commits)

    def read_progress():
        step = next(newest)
        return JobProgress(step, next(claimed), is_done(), (step or 0) if counts is None else next(counts))

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


@pytest.mark.parametrize(
    ("rows", "newest", "is_done"),
    [
        ([], None, False),
        ([(1, "start", None), (1, "commit", 4), (1, "done", 4)], 4, True),
        ([(1, "commit", 4), (1, "done", 4), (2, "start", None)], 4, False),
        ([(2, "done", 8), (1, "commit", 4)], 4, True),
        ([(1, "commit", "8"), (1, "commit", 4), ("2", "start", None), (None, "done", 4)], 4, False),
        ([(1, ["commit"], 8), (1, None, 4), (True, "commit", 8)], None, False),
        # The run was rolled back to an earlier step.
        ([(1, "commit", 8), (1, "commit", 12), (1, "commit", 10)], 10, False),
    ],
)
def test_progress_is_read_from_the_ledger_whatever_it_contains(rows, newest, is_done, tmp_path):
    keys = ("attempt", "event", "step")
    lines = [
        json.dumps({key: value for key, value in zip(keys, row, strict=True) if value is not None}) for row in rows
    ]
    (tmp_path / "events.jsonl").write_text("".join(f"{line}\n" for line in [*lines, '{"event"', "[]", "7"]))
    options = (str(ROOT / "specs" / "counter.yaml"), [f"directory={tmp_path}"])
    progress = supervisor.read_progress(*options)
    assert progress.newest_step == newest
    assert progress.is_done == is_done


@pytest.mark.parametrize(
    ("changes", "claims", "is_done"),
    [
        ([], [1], True),
        # The user has extended the run, and its hosts have not met yet.
        (["config.total_steps=99"], [1], False),
        # A new attempt has claimed the directory, and ended before its first event.
        ([], [1, 2], False),
    ],
)
def test_a_job_is_done_if_the_newest_attempt_has_reached_the_end_of_this_spec(changes, claims, is_done, tmp_path):
    spec, overrides = str(ROOT / "specs" / "counter.yaml"), [f"directory={tmp_path}"]
    digest = load_document(spec, overrides).compute_digest()
    (tmp_path / "events.jsonl").write_text(f'{{"attempt": 1, "event": "done", "spec": "{digest}"}}\n')
    for claim in claims:
        (tmp_path / "attempts").mkdir(exist_ok=True)
        (tmp_path / "attempts" / str(claim)).write_text("{}")
    assert supervisor.read_progress(spec, [*overrides, *changes]).is_done is is_done


def test_a_host_that_an_elastic_job_does_without_waits_as_long_as_it_takes():
    commits = itertools.count()
    assert supervise([76] * 30 + [0], max_restarts=2, claims=[7] * 99, steps=[40] * 99, commits=commits) == (0, 31)


def test_in_a_bucket_only_the_events_of_process_0_are_read(monkeypatch):
    driver = MemoryDriver()
    bucket, read = make_memory_bucket(driver), []
    for writer in ("000001.0", "000001.1", "000001.10", "000002.0"):
        for part in range(2):
            row = {"attempt": 1, "event": "commit", "step": part}
            bucket.write(f"events/{writer}.{part:04}.jsonl", encode_line(row))
    driver.before = lambda verb, key: read.append(key) if verb == "get" else None
    monkeypatch.setattr("launch.supervisor.open_store", lambda _: bucket)
    assert supervisor.read_progress(str(ROOT / "specs/gpt_nano.yaml"), []).num_commits == 4
    assert sorted(read) == [f"run/events/{attempt:06}.0.{part:04}.jsonl" for attempt in (1, 2) for part in (0, 1)]


def test_commits_after_a_roll_back_are_progress():
    assert supervise([76] * 9 + [0], steps=itertools.repeat(500), commits=itertools.count()) == (0, 10)
    assert supervise([76] * 99, steps=itertools.repeat(500), commits=itertools.repeat(7)) == (1, CRASH_LOOP_ATTEMPTS)


def test_a_directory_that_cannot_be_read_has_no_progress(tmp_path):
    options = (str(tmp_path / "none.yaml"), [])
    progress = supervisor.read_progress(*options)
    assert progress.newest_step is None
    assert progress.newest_attempt is None
    assert not progress.is_done


# Hosts of the start event of attempt 2, and the newest attempt in which this host took part.
@pytest.mark.parametrize(
    ("hosts", "newest"),
    [(None, 2), ([], 1), (["other"], 1), (["other", socket.gethostname()], 2), ("other", 2), (7, 2)],
)
def test_attempts_of_other_hosts_are_no_crashes_of_this_one(tmp_path, hosts, newest):
    for attempt in (1, 2):
        (tmp_path / "attempts").mkdir(exist_ok=True)
        (tmp_path / "attempts" / str(attempt)).write_text("{}")
    row = {"attempt": 2, "event": "start"} | ({} if hosts is None else {"hosts": hosts})
    (tmp_path / "events.jsonl").write_text(json.dumps(row) + "\n")
    progress = supervisor.read_progress(str(ROOT / "specs" / "counter.yaml"), [f"directory={tmp_path}"])
    assert progress.newest_attempt == newest


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
