"""Finished runs of every kind, which the tests of this directory read and do not change."""

from pathlib import Path

import pytest

from tests.retrace.runs import RUNS


@pytest.fixture(scope="session")
def run_of(tmp_path_factory):
    """Return a function from a kind to the directory of a run, made once."""
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("retrace") / "run"
            RUNS[kind](made[kind])
        return made[kind]

    return get
