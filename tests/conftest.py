"""Session setup of all tests: eight simulated CPU devices, one shared cache, and the cleanup of processes."""

import ctypes
import gc
import importlib
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from runner import console
from tests.support import leftover, simulated_devices

# The pytest-xdist controller makes the directory; its workers inherit the variable.
SESSION_VARIABLE = "RUNNER_TESTS_SESSION"
_is_session_mine = SESSION_VARIABLE not in os.environ
if _is_session_mine:
    os.environ[SESSION_VARIABLE] = tempfile.mkdtemp(prefix="runner-tests-")
os.environ["RUNNER_CACHE"] = os.path.join(os.environ[SESSION_VARIABLE], "cache")
# Keep every compiled program for all workers and files, not only those that took long; compilation is most of the work.
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
simulated_devices.configure_simulated_devices(8)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, child processes would inherit that it is ignored

pytest_plugins = ("pytester",)
LONGEST_FILES = (
    "tests/test_trainer.py",
    "tests/test_values.py",
    "tests/repository/test_readme.py",
    "tests/repository/test_snapshot.py",
    "tests/plan/test_plan.py",
    "tests/experiments/test_gpt.py",
    "tests/survival/test_refusal.py",
    "tests/survival/test_signal.py",
    "tests/survival/test_kill.py",
)
ALLOWED_SKIP = "needs an accelerator"
ROOT = Path(__file__).parents[1]


def pytest_unconfigure() -> None:
    """Remove the session directory in the process that made it, which ends last."""
    if _is_session_mine:
        shutil.rmtree(os.environ.pop(SESSION_VARIABLE, ""), ignore_errors=True)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Import the test modules from another one on in each worker of pytest-xdist, if all are collected.

    pytest rewrites the assertions of a module where it finds no rewritten copy on the disk, which takes longer than all
    imports. Workers that import the modules in one order find none and rewrite every module at the same time.
    """
    config = session.config
    worker = getattr(config, "workerinput", None)
    if worker is None or config.args != config.getini("testpaths"):
        return
    paths = sorted(path.relative_to(ROOT).with_suffix("") for path in (ROOT / "tests").rglob("test_*.py"))
    first = len(paths) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    for path in paths[first:] + paths[:first]:
        importlib.import_module(".".join(path.parts))


def pytest_collection_finish() -> None:
    """Exempt the imported modules from garbage collection, which otherwise takes 5% of the test time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], 50)


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark members of families as soak tests, and run the longest files first.

    Of the parameters of a function with `pytest.mark.daily(number)`, that many stay daily, from the first to the last.
    Members that are soak tests already are not counted. The longest files come first so that no worker runs one of them
    alone at the end.
    """
    families: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("daily") is not None and item.get_closest_marker("soak") is None:
            families.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for members in families.values():
        marker = members[0].get_closest_marker("daily")
        assert marker is not None
        (number,) = marker.args
        daily = {round(place * (len(members) - 1) / max(number - 1, 1)) for place in range(number)}
        for place, item in enumerate(members):
            if place not in daily:
                item.add_marker(pytest.mark.soak)
    items.sort(key=lambda item: not item.path.as_posix().endswith(LONGEST_FILES))


class ImmediateFailures:
    """Plugin that prints each failure at once, since a session ended by a time limit never prints its summary."""

    def __init__(self, reporter: pytest.TerminalReporter):
        self._reporter = reporter

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._reporter.write_sep("!", f"{report.nodeid}: {report.when}")
            self._reporter.write_line(report.longreprtext)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") == "true" and reporter is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(ImmediateFailures(reporter))


@pytest.fixture(autouse=True, scope="module")
def _clear_compiled_programs() -> Iterator[None]:
    """Free the compiled programs after each file; otherwise they take gigabytes in each worker."""
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(autouse=True)
def _kill_remaining_processes() -> Iterator[None]:
    """Kill the processes that a test leaves; fixtures of a wider scope stop their own."""
    before = leftover.find()
    yield
    leftover.end_all_but(before)


@pytest.fixture(autouse=True, scope="module")
def _restore_hangup_signal() -> None:
    """Undo that libtpu ignores the signal once it has been loaded, which child processes inherit."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True, scope="module")
def _restore_environment_of_file() -> Iterator[None]:
    """Restore the environment: `plan` and imports of libraries set variables, which children would inherit."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(autouse=True)
def _restore_environment() -> Iterator[None]:
    """Do the same after each test."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(autouse=True)
def _restore_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the formatters, levels and handlers that a job run in this process replaces."""
    loggers = [logging.getLogger(name) for name in (None, "runner", "experiments")]
    handlers_and_levels = [(list(logger.handlers), logger.level) for logger in loggers]
    before = [(stream.formatter, stream.level) for stream in console._streams]
    monkeypatch.setattr(console, "_secrets", set())
    yield
    for stream, (form, level) in zip(console._streams, before, strict=True):
        stream.setFormatter(form)
        stream.setLevel(level)
    for logger, (handlers, level) in zip(loggers, handlers_and_levels, strict=True):
        logger.handlers[:] = handlers
        logger.setLevel(level)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Count a skipped test as failed under CI, unless it needs an accelerator."""
    report = yield
    if os.environ.get("CI") == "true" and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if ALLOWED_SKIP not in reason:
            report.outcome = "failed"
            report.longrepr = f"skipped under CI: {reason}"
    return report
