"""Saves and restores of whole runs in a bucket of each service."""

from pathlib import Path
from typing import Any

import pytest

from runner.storage import LocalStore, open_store, read_json, read_log
from tests.support.object_stores import BACKENDS, route_stores_to, start_backend
from tests.support.tiny_jobs import make_counter, stop_after


@pytest.mark.parametrize("name", BACKENDS)
def test_a_run_in_a_bucket_of_each_service_resumes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_counter(tmp_path / "whole")()
    with start_backend(name) as backend:
        route_stores_to(monkeypatch, backend)
        url: Any = backend.url("services/run")
        stop_after(make_counter(url), 15)
        make_counter(url)()
        store = open_store(url)
        restores = [row["step"] for row in read_log(store, "events") if row["event"] == "restore"]
        assert restores == [15]
        result, whole = read_json(store, "result.json"), read_json(LocalStore(tmp_path / "whole"), "result.json")
        assert (result["step"], result["fingerprint"]) == (whole["step"], whole["fingerprint"])
