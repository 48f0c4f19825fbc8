"""Forecasts: written before a run begins, never replaced, and a part of its lineage."""

from pathlib import Path

import pytest

from runner.attempts.layout import FORECAST, DamagedRecordError, read_forecast, read_owner, write_forecast
from runner.cli.app import run_command
from runner.errors import InvalidError
from runner.storage import JsonObject, LocalStore
from tests.support.job_process import Job

RECORD: JsonObject = {"loss": 2.0, "low": 1.9, "high": 2.1, "coverage": 0.9, "parameters": 10**6, "tokens": 2 * 10**7}
RECORD |= {"ladder": "runs/ladder", "law": {"formula": "L = 1 + 2 / N^0.3", "points": [], "curve": []}}


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job("specs/counter.yaml", tmp_path / "run", ("config.total_steps=3",))


def test_a_run_begins_with_its_forecast(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    store = LocalStore(job.directory)
    write_forecast(store, RECORD)
    write_forecast(store, RECORD)  # as after an interruption
    with pytest.raises(InvalidError, match="another forecast is there"):
        write_forecast(store, RECORD | {"loss": 1.0})
    job.finish()
    write_forecast(store, RECORD)
    assert read_forecast(store) == RECORD | {"format": 1}
    capfd.readouterr()
    assert run_command(["lineage", str(job.directory)]) == 0
    assert "forecast before it began: loss 2.0000 (1.9000 to 2.1000, 90%), by runs/ladder" in capfd.readouterr().out


def test_no_forecast_is_made_afterwards(job: Job) -> None:
    job.finish()
    store = LocalStore(job.directory)
    owner = read_owner(store)
    assert owner is not None
    assert owner.forecast is None
    with pytest.raises(InvalidError, match="the run has begun without this forecast"):
        write_forecast(store, RECORD)
    # What was written all the same is none.
    with pytest.raises(DamagedRecordError, match="after the run had begun"):
        read_forecast(store)
    with pytest.raises(InvalidError, match="no forecast"):
        run_command(["lineage", str(job.directory)])


def test_a_changed_forecast_is_noticed(job: Job) -> None:
    store = LocalStore(job.directory)
    write_forecast(store, RECORD)
    job.finish()
    store.write(FORECAST, store.read(FORECAST).replace(b"2.0", b"2.5"))
    with pytest.raises(DamagedRecordError, match="changed after the run had begun"):
        read_forecast(store)


def test_a_run_without_one_has_the_same_record_as_before(job: Job) -> None:
    job.finish()
    assert b"forecast" not in LocalStore(job.directory).read("job.json")
    assert read_forecast(LocalStore(job.directory)) is None
