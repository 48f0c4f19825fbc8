"""What a job's own `sys.exit` is to whoever started it: no end. What is printed of errors that nobody can catch."""

import sys

import pytest

from runner import job
from runner.cli import app, run
from tests.support.faulty_jobs import ExitingCounter
from tests.support.job_process import Job

COUNTER = (
    "config.total_steps=4",
    "config.step_seconds=0",
    "config.width=16",
    "job=tests.support.faulty_jobs:ExitingCounter",
)


class EndedError(Exception):
    """In the place of the end of this process."""


@pytest.fixture
def command(monkeypatch, tmp_path):
    """The command in this process, on whose signals and end it has no hold; its exit code and what it said."""

    def end(code, message=None):
        raise EndedError(code, message)

    monkeypatch.setattr(run, "end_process", end)
    monkeypatch.setattr(run.preemption, "watch_gcp_preemption", lambda ask: None)
    monkeypatch.setattr(app.StopNotice, "install_signal_handlers", lambda notice: None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def call(*words):
        try:
            return app.main([*words, *Job("specs/counter.yaml", tmp_path / "run", COUNTER).arguments]), None
        except EndedError as ended:
            return ended.args

    return call


@pytest.mark.parametrize("place", ["setup", "prepare", "init", "run", "save_or_stop", "make_save_contents", "result"])
def test_sys_exit_in_a_job_is_1_and_one_line(place, command, monkeypatch):
    monkeypatch.setattr(ExitingCounter, "place", place)
    code, line = command()
    assert code == 1
    assert line.startswith("the job called sys.exit(0), which does not end a job")


@pytest.mark.parametrize("code", [None, 75, 76, "good bye"])
def test_no_code_of_its_own_makes_it_another_end(code, command, monkeypatch):
    monkeypatch.setattr(ExitingCounter, "place", "run")
    monkeypatch.setattr(ExitingCounter, "code", code)
    assert command()[0] == 1


@pytest.mark.parametrize("words", [(), ("plan",)])
def test_sys_exit_before_the_job_has_begun_is_1_and_one_line(words, command, monkeypatch, capsys):
    monkeypatch.setattr(job.RestoreableJob, "__init__", lambda *_: sys.exit(0))
    assert command(*words)[0] == 1
    assert capsys.readouterr().err.startswith("the job called sys.exit(0), which does not end a job")


class Raises:
    """Raises where nobody can catch it."""

    def __init__(self, error: Exception):
        self.error = error

    def __del__(self):
        raise self.error


def test_only_what_a_failed_save_has_told_already_is_left_out(capsys, monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", run._drop_late_write_errors)
    for error in (RuntimeError("Event loop is closed"), RuntimeError("another"), ValueError("Event loop is closed")):
        Raises(error)
    assert [line for line in capsys.readouterr().err.splitlines() if "Error" in line] == [
        "RuntimeError: another",
        "ValueError: Event loop is closed",
    ]


def test_help_is_no_failure(capsys):
    assert app.main(["--help"]) == 0
    assert "Usage" in capsys.readouterr().out
