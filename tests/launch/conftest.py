"""Tests of launchers render hundreds of jobs; `test_checks.py` tests the checks that come before."""

import pytest

from launch.kubernetes import engine as jobset
from launch.slurm import engine as slurm
from launch.tpu_vm import engine as tpu_vm


@pytest.fixture(autouse=True)
def skip_checks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the checks of `plan`, but in tests of these."""
    if request.path.name != "test_checks.py":
        for engine in (jobset, slurm, tpu_vm):
            monkeypatch.setattr(engine, "check_job", lambda arguments, **keys: None)
