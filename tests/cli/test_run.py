"""Effect of a job's own `sys.exit`, which is an error, and the report of exceptions that cannot be caught."""

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


class ProcessEndError(Exception):
    """Raised in place of ending the process."""


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Return a function that runs the command in this process and returns its exit code and message."""

    def end(code, message=None):
        raise ProcessEndError(code, message)

    monkeypatch.setattr(run, "end_process", end)
    monkeypatch.setattr(run.preemption, "watch_gcp_preemption", lambda ask: None)
    monkeypatch.setattr(app.StopNotice, "install_signal_handlers", lambda notice: None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def call(*words):
        try:
            return app.main([*words, *Job("specs/counter.yaml", tmp_path / "run", COUNTER).arguments]), None
        except ProcessEndError as ended:
            return ended.args

    return call


@pytest.mark.parametrize("place", ["setup", "prepare", "init", "run", "save_or_stop", "make_save_contents", "result"])
def test_sys_exit_in_a_job_is_1_and_one_line(place, command, monkeypatch):
    monkeypatch.setattr(ExitingCounter, "place", place)
    code, line = command()
    assert code == 1
    assert line.startswith("the job called sys.exit(0), which does not end a job")


@pytest.mark.parametrize("code", [None, 75, 76, "good bye"])
def test_the_code_passed_to_sys_exit_is_ignored(code, command, monkeypatch):
    monkeypatch.setattr(ExitingCounter, "place", "run")
    monkeypatch.setattr(ExitingCounter, "code", code)
    assert command()[0] == 1


@pytest.mark.parametrize("words", [(), ("plan",)])
def test_sys_exit_before_the_job_has_begun_is_1_and_one_line(words, command, monkeypatch, capsys):
    monkeypatch.setattr(job.RestoreableJob, "__init__", lambda *_: sys.exit(0))
    assert command(*words)[0] == 1
    assert capsys.readouterr().err.startswith("the job called sys.exit(0), which does not end a job")


def test_help_exits_with_0(capsys):
    assert app.main(["--help"]) == 0
    assert "Usage" in capsys.readouterr().out
