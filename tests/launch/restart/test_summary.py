"""Where the time of all attempts is said to have gone."""

import pytest

from launch.restart import summary
from launch.restart.supervisor import Attempt


def row(time, event, step=None, **details):
    return {"time": time, "process": 0, "event": event, "step": step} | details


def test_phases_say_what_was_lost_and_sum_to_the_whole():
    attempts = [Attempt(100.0, 150.0, 76, 20), Attempt(151.0, 153.0, 76, 20), Attempt(155.0, 200.0, 0, 60)]
    ledger = [
        row(102, "start"),
        row(107, "prepare"),
        row(108, "init", 0),
        row(118, "save", 10, blocked_seconds=0.5),
        row(128, "save", 20, blocked_seconds=0.25),
        row(129, "commit", 20),
        row(138, "save", 30, blocked_seconds=0.5),
        row(149, "progress", 33),
        row(152, "start"),
        row(156, "start"),
        row(157, "prepare"),
        row(159, "restore", 20),
        row(199, "save", 60, blocked_seconds=1.0),
    ]
    found = summary.phases(attempts, ledger)
    assert sum(found.values()) == pytest.approx(100.0)
    assert summary.lost_steps(attempts, ledger) == 33 - 20
    assert found == pytest.approx(
        {
            "start-up": 2 + 1 + 1,
            "compile": 5 + 1 + 1,
            "restore": 1 + 0 + 2,
            "saves blocked": 0.75 + 1.0,
            "train": (128 - 108 - 0.75) + (200 - 159 - 1.0),
            "lost": 150 - 128,
            "between attempts": 1 + 2,
        }
    )
