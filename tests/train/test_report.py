"""The rows of an attempt, as the saves and restores of its states see them."""

from pathlib import Path

import pytest

from runner.metrics.file import read_rows
from runner.storage import LocalStore, Store
from runner.train.report import Report
from tests.support.attempt import make_attempt
from tests.support.memory_bucket import memory_bucket
from tests.support.tiny import gpt

METRICS = "metrics.jsonl"


@pytest.fixture(params=["disk", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return LocalStore(tmp_path / "run") if request.param == "disk" else memory_bucket()


def next_report(store: Store, tmp_path: Path) -> Report:
    """That of a new attempt, before it knows at which step it stands."""
    job = gpt(tmp_path / "job")
    return Report(make_attempt(store), job.spec, job.config, [], 0.0, lambda step: {}, lambda: None)


def add(report: Report, *steps: int) -> None:
    """Rows that are not durable yet; in a bucket they may be at any moment."""
    for step in steps:
        report._metrics.append({"step": step, "train/loss": 1.0 / step})


def test_rows_that_were_kept_beside_a_state_are_gone_on_from_unless_a_later_attempt_went_back_behind_them(
    store: Store, tmp_path: Path
) -> None:
    first = next_report(store, tmp_path)
    first.resume(0, {})
    add(first, 1, 2, 3)
    first.sync()
    add(first, 4)
    kept = first.attachments()

    crashed = next_report(store, tmp_path)
    assert crashed.find_problem(kept) is None
    crashed.resume(4, kept)
    assert [row["step"] for row in read_rows(store)] == [1, 2, 3, 4]
    tokens = 4 * gpt(tmp_path / "job").config.tokens_per_step
    assert crashed.result(4) == {"tokens": tokens, "train_loss": 0.25, "val_loss": None}
    assert crashed.metric("train/loss", 4) == 0.25
    assert crashed.metric("train/loss", 3) is None

    elsewhere = next_report(store, tmp_path)
    elsewhere.resume(2, {})
    problem = next_report(store, tmp_path).find_problem(kept)
    assert any(problem.startswith(f"a later attempt resumed from a step before {step},") for step in (3, 4))


def test_rows_that_were_kept_torn_are_a_problem_and_none_are_not(store: Store, tmp_path: Path) -> None:
    report = next_report(store, tmp_path)
    report.resume(0, {})
    add(report, 1, 2)
    kept = report.attachments()[METRICS]
    assert next_report(store, tmp_path).find_problem({METRICS: kept[:-9]}) == (
        "the rows that were kept beside it are not whole"
    )
    assert next_report(store, tmp_path).find_problem({}) is None
