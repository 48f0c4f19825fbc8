"""History of whole runs: stopped, killed and resumed, with fallbacks to older checkpoints."""

import json
from pathlib import Path

import pytest

from runner.distributed.clock import TimeCategory
from runner.history.reader import read_history
from runner.history.records import History, RunState, Verification
from runner.storage import LocalStore
from tests.support import run_outcomes

STEP_SECONDS = 0.01


def flip_a_bit(directory: Path) -> None:
    """Flip a bit in the largest file of a checkpoint."""
    path = max((path for path in directory.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def check_sums(history: History) -> None:
    """Check that every second of wall time is in one category, for each attempt and for all."""
    assert sum(history.seconds.values()) == pytest.approx(history.wall_seconds, abs=1e-6)
    assert history.wall_seconds == pytest.approx(history.attempts[-1].ended - history.attempts[0].began)
    for before, attempt in zip([None, *history.attempts], history.attempts, strict=False):
        assert sum(attempt.seconds.values()) == pytest.approx(attempt.ended - attempt.began, abs=1e-6)
        assert min(attempt.seconds.values()) >= 0
        if before is not None:
            assert attempt.gap_seconds == pytest.approx(attempt.began - before.ended, abs=1e-6)


def test_the_history_of_a_run_is_exact_to_the_step(tmp_path: Path) -> None:
    run, pace = tmp_path / "run", {"config.step_seconds": STEP_SECONDS}
    run_outcomes.stop_after_step(run, 20, **pace)
    run_outcomes.kill_after_step(run, 34, **pace)
    run_outcomes.stop_after_step(run, 36, **pace)
    flip_a_bit(run / "checkpoints/36")
    run_outcomes.make_job(run, **pace)()
    history = read_history(LocalStore(run))
    told = [(each.state, each.resumed_step, each.reached_step, each.lost_steps) for each in history.attempts]
    assert told == [
        (RunState.PREEMPTED, 0, 20, 0),
        (RunState.KILLED, 20, 34, 4),
        (RunState.PREEMPTED, 30, 36, 6),
        (RunState.DONE, 30, 40, 0),
    ]
    assert (history.state, history.step, history.total_steps, history.lost_steps) == (RunState.DONE, 40, 40, 10)
    check_sums(history)
    assert history.seconds[TimeCategory.LOST_STEPS] >= 10 * STEP_SECONDS
    assert history.seconds[TimeCategory.STEPS] >= 40 * STEP_SECONDS
    assert history.seconds[TimeCategory.GAP] > 0
    assert history.goodput == history.seconds[TimeCategory.STEPS] / history.wall_seconds
    trusts = {each.step: each.trust for each in history.checkpoints}
    assert trusts == {
        10: Verification.VERIFIED,
        20: Verification.VERIFIED,
        30: Verification.VERIFIED,
        40: Verification.VERIFIED,  # as the first save of its attempt
    }
    assert {"fallback", "quarantine"} <= {notice.event for notice in history.warnings}
    assert not history.unread


def test_lost_time_is_the_time_since_the_save(tmp_path: Path) -> None:
    """The later steps are ten times slower, so the clock is needed; a share by step number would be wrong."""
    run = tmp_path / "run"
    run_outcomes.stop_after_step(run, 20)
    run_outcomes.kill_after_step(run, 34, **{"config.step_seconds": STEP_SECONDS})
    killed = read_history(LocalStore(run)).attempts[-1]
    run_outcomes.stop_after_step(run, 31)
    saves = [row for row in map(json.loads, (run / "events.jsonl").read_text().splitlines()) if row["event"] == "save"]
    kept_seconds = next(row["clock"]["steps"] for row in saves if (row["attempt"], row["step"]) == (2, 30))
    attempt = read_history(LocalStore(run)).attempts[1]
    assert attempt.seconds[TimeCategory.STEPS] == pytest.approx(kept_seconds, abs=1e-3)
    assert attempt.seconds[TimeCategory.LOST_STEPS] >= 4 * STEP_SECONDS
    assert killed.lost_steps == 0  # no attempt has resumed yet


def test_an_old_checkpoint_loses_steps_of_several_attempts(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (15, 25, 35):
        run_outcomes.stop_after_step(run, step)
    for path in (run / "checkpoints").iterdir():
        if int(path.name) > 10:
            flip_a_bit(path)
    run_outcomes.make_job(run)()
    history = read_history(LocalStore(run))
    assert [each.lost_steps for each in history.attempts] == [5, 10, 10, 0]
    check_sums(history)
    assert history.attempts[1].seconds[TimeCategory.STEPS] == 0
