"""What every test runs under: eight faked CPU devices in this process, and a cache of the session's own."""

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest

_CACHE = tempfile.mkdtemp(prefix="runner-tests-")
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["RUNNER_CACHE"] = _CACHE

ALLOWED_SKIP = "needs an accelerator"


@pytest.fixture(scope="session", autouse=True)
def _cache_is_removed() -> Iterator[None]:
    yield
    shutil.rmtree(_CACHE, ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Under CI a test that skips itself has failed, unless it lacks an accelerator."""
    report = yield
    if os.environ.get("CI") == "true" and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if ALLOWED_SKIP not in reason:
            report.outcome = "failed"
            report.longrepr = f"skipped under CI: {reason}"
    return report
