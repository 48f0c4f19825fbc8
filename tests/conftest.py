"""What every test runs under: eight faked CPU devices, one cache for the session, and no process left behind."""

import ctypes
import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator

import pytest

from runner import console
from tests.support import leftover, simulated_devices

# The workers of pytest-xdist inherit the variable from the process that starts them, which makes the directory.
SESSION_VARIABLE = "RUNNER_TESTS_SESSION"
_is_session_mine = SESSION_VARIABLE not in os.environ
if _is_session_mine:
    os.environ[SESSION_VARIABLE] = tempfile.mkdtemp(prefix="runner-tests-")
os.environ["RUNNER_CACHE"] = os.path.join(os.environ[SESSION_VARIABLE], "cache")
simulated_devices.configure_simulated_devices(8)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup what tests start would inherit that it is ignored

pytest_plugins = ("pytester",)
LONGEST_FILES = (
    "tests/test_trainer.py",
    "tests/test_values.py",
    "tests/repository/test_readme.py",
    "tests/plan/test_plan.py",
    "tests/experiments/test_gpt.py",
    "tests/survival/test_refusal.py",
    "tests/survival/test_signal.py",
    "tests/survival/test_kill.py",
)
ALLOWED_SKIP = "needs an accelerator"


def pytest_unconfigure() -> None:
    """Called at the end of the session, in each process of pytest; the one that made the directory is the last."""
    if _is_session_mine:
        shutil.rmtree(os.environ.pop(SESSION_VARIABLE, ""), ignore_errors=True)


def pytest_collection_finish() -> None:
    """What is loaded stays: to look through it for garbage again and again took a twentieth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], 50)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take longest come first, so that no worker is left alone with one of them at the end."""
    items.sort(key=lambda item: not item.path.as_posix().endswith(LONGEST_FILES))


class FailuresAtOnce:
    """Tells a failure when it happens: who is ended by a time limit never comes to the summary."""

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
        config.pluginmanager.register(FailuresAtOnce(reporter))


@pytest.fixture(autouse=True, scope="module")
def _no_program_survives_its_file() -> Iterator[None]:
    """Thousands of programs are compiled: kept to the end they would be gigabytes in each worker."""
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(autouse=True)
def _no_process_survives_its_test() -> Iterator[None]:
    """However a test ends, what it has started ends with it; fixtures of a wider scope end their own."""
    before = leftover.find()
    yield
    leftover.end_all_but(before)


@pytest.fixture(autouse=True)
def _the_terminal_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A job that a test runs in this process sets up how lines are shown: the next test's are shown as ever."""
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
    """Under CI a test that skips itself has failed, unless it lacks an accelerator."""
    report = yield
    if os.environ.get("CI") == "true" and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if ALLOWED_SKIP not in reason:
            report.outcome = "failed"
            report.longrepr = f"skipped under CI: {reason}"
    return report
