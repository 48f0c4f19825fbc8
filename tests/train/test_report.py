"""Rows of metrics across saves and restores of an attempt."""

from pathlib import Path

import pytest

from runner.metrics.file import read_rows
from runner.storage import LocalStore, Store
from runner.train.report import Report
from tests.support.attempt import make_attempt
from tests.support.memory_bucket import make_memory_bucket
from tests.support.tiny_jobs import make_gpt

METRICS = "metrics.jsonl"


@pytest.fixture(params=["disk", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return LocalStore(tmp_path / "run") if request.param == "disk" else make_memory_bucket()


def make_report(store: Store, tmp_path: Path) -> Report:
    """Return the report of a new attempt that has not resumed yet."""
    job = make_gpt(tmp_path / "job")
    return Report(make_attempt(store), job.spec, job.config, [], 0.0, lambda step: {})


def append_rows(report: Report, *steps: int) -> None:
    """Append rows that are not durable yet (in a bucket they may become durable at any time)."""
    for step in steps:
        report._metrics.append({"step": step, "train/loss": 1.0 / step})


def test_saved_rows_are_continued_unless_a_later_attempt_went_back(store: Store, tmp_path: Path) -> None:
    first = make_report(store, tmp_path)
    first.resume(0, {})
    append_rows(first, 1, 2, 3)
    first.sync()
    append_rows(first, 4)
    kept = first.attachments()

    crashed = make_report(store, tmp_path)
    assert crashed.find_problem(kept) is None
    crashed.resume(4, kept)
    assert [row["step"] for row in read_rows(store)] == [1, 2, 3, 4]
    tokens = 4 * make_gpt(tmp_path / "job").config.units_per_step
    assert crashed.result(4) == {"tokens": tokens, "train_loss": 0.25, "val_loss": None}
    assert crashed.metric("train/loss", 4) == 0.25
    assert crashed.metric("train/loss", 3) is None

    elsewhere = make_report(store, tmp_path)
    elsewhere.resume(2, {})
    problem = make_report(store, tmp_path).find_problem(kept)
    assert any(problem.startswith(f"a later attempt resumed from a step before {step},") for step in (3, 4))


def test_truncated_saved_rows_are_a_problem(store: Store, tmp_path: Path) -> None:
    report = make_report(store, tmp_path)
    report.resume(0, {})
    append_rows(report, 1, 2)
    kept = report.attachments()[METRICS]
    assert make_report(store, tmp_path).find_problem({METRICS: kept[:-9]}) == (
        "the rows that were kept beside it are not whole"
    )
    assert make_report(store, tmp_path).find_problem({}) is None
