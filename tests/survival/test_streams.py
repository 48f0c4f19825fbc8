"""No loss of standard input, output or error changes a run, a command or its exit code."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.job_process import ROOT, Job
from tests.support.lost_streams import INPUT_LOSSES, STREAM_LOSSES, STREAMS, start_with_lost_streams
from tests.support.simulated_devices import environment

SPEC = "specs/counter.yaml"
OPTIONS = ("job=tests.support.faulty_jobs:PrintingCounter", "config.width=64", "checkpoint.every_steps=10")
ENDS = {
    "finish": (0, ("config.total_steps=60", "config.step_seconds=0.01")),
    "stop": (75, ("config.total_steps=100000", "config.step_seconds=0.01")),
    "bug": (1, ("job=tests.support.faulty_jobs:FailingCounter", "config.total_steps=60", "config.step_seconds=0.05")),
    "invalid": (2, ("unknown=1",)),
}
_DAILY = {("all", "closed", "finish"), ("all", "terminal closes", "stop")}
CASES = [
    pytest.param(streams, way, end, marks=() if (streams, way, end) in _DAILY else pytest.mark.soak)
    for streams in STREAMS
    for way in STREAM_LOSSES
    for end in ENDS
    if streams != "input" or way in INPUT_LOSSES
]


def _end(job: Job, module: str, arguments: list[str], streams: str, way: str, end: str) -> int:
    """The exit code of a command that loses its streams once it has committed something."""
    command = [sys.executable, "-m", module, *arguments]
    variables = environment(1) | {"PYTHONPATH": str(ROOT)}
    with start_with_lost_streams(command, way, STREAMS[streams], variables, job.directory.parent) as bereft:
        while job.newest() < 10 and bereft.process.poll() is None:
            time.sleep(0.01)
        bereft.lose_streams()
        if end == "stop" and way != "terminal closes":  # whose closing sends SIGHUP
            bereft.process.send_signal(signal.SIGTERM)
        return bereft.process.wait(600)


def _expected_code(way: str, end: str) -> int:
    # A terminal that closes sends SIGHUP, which stops a run before its end and before its bug.
    return 75 if way == "terminal closes" and end in ("finish", "bug") else ENDS[end][0]


@pytest.mark.daily(1)
@pytest.mark.parametrize(("streams", "way", "end"), CASES)
def test_a_lost_stream_changes_no_run(streams: str, way: str, end: str, tmp_path: Path) -> None:
    code, options = ENDS[end]
    job = Job(SPEC, tmp_path / "run", (*OPTIONS, *options))
    code = _expected_code(way, end)
    assert _end(job, "runner", job.arguments, streams, way, end) == code
    if code == 0:
        assert job.result()["step"] == 60
    if code == 75:
        (stopped,) = job.events("preempt")
        assert (stopped["saved"], stopped["step"]) == (True, job.newest())
    # No file of the run has got a line that was printed.
    for path in job.directory.rglob("*"):
        assert not path.is_file() or "\u2713".encode() not in path.read_bytes(), path


# Of the ways that a launched run ends, one for each loss, so that each end has a quarter of them.
LAUNCHED = [
    (*loss, list(ENDS)[number % len(ENDS)])
    for number, loss in enumerate(dict.fromkeys((case.values[0], case.values[1]) for case in CASES))
]


@pytest.mark.soak
@pytest.mark.parametrize(("streams", "way", "end"), LAUNCHED)
def test_a_lost_stream_changes_no_launched_run(streams: str, way: str, end: str, tmp_path: Path) -> None:
    _, options = ENDS[end]
    job = Job(SPEC, tmp_path / "run", (*OPTIONS, *options))
    arguments = ["local", *job.arguments, "--max-restarts", "0"]
    assert _end(job, "launch", arguments, streams, way, end) == _expected_code(way, end)


@pytest.mark.soak
def test_a_closed_terminal_stops_a_run_with_a_progress_bar(tmp_path: Path) -> None:
    options = ("config.train.total_steps=100000", "config.train.global_batch_examples=2", "checkpoint.every_steps=10")
    job = Job("specs/gpt_nano.yaml", tmp_path / "run", (*options, "config.data.sequence_length=16"))
    assert _end(job, "runner", job.arguments, "all", "terminal closes", "stop") == 75
    assert job.events("preempt")[0]["step"] == job.newest()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A run to look at."""
    directory = tmp_path_factory.mktemp("finished") / "run"
    job = Job(SPEC, directory, ("config.width=64", "config.total_steps=20", "config.step_seconds=0"))
    job.finish()
    return job


LOOKS = {
    "help": ["--help"],
    "version": ["--version"],
    "status": ["status", "RUN"],
    "status as JSON": ["status", "RUN", "--json"],
    "metrics": ["metrics", "RUN"],
    "checkpoints": ["checkpoints", "RUN"],
    "deep checkpoints": ["checkpoints", "RUN", "--deep"],
    "schema": ["schema"],
    "schema of a spec": ["schema", SPEC],
    "plan": ["plan", SPEC],
    "plan as JSON": ["plan", SPEC, "--json"],
    "refused plan": ["plan", SPEC, "--set", "unknown=1"],
    "no such run": ["status", "nowhere"],
}
_DAILY_LOOKS = {"status"}
# The reader is gone, or there was none: the command has done its work. A full disk has taken a part of its product.
LOSSES = {"closed": None, "no reader": None, "full disk": 76, "ascii": None}


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=() if way in ("closed", "full disk") else pytest.mark.soak) for way in LOSSES]
)
@pytest.mark.parametrize(
    "name", [name if name in _DAILY_LOOKS else pytest.param(name, marks=pytest.mark.soak) for name in LOOKS]
)
def test_a_command_without_a_reader_ends_as_ever(name: str, way: str, finished: Job, tmp_path: Path) -> None:
    words = [str(finished.directory) if word == "RUN" else word for word in LOOKS[name]]
    command = [sys.executable, "-m", "runner", *words]
    variables = environment(1) | {"PYTHONPATH": str(ROOT)}
    usual = subprocess.run(command, env=variables, cwd=tmp_path if name == "no such run" else ROOT, capture_output=True)
    with start_with_lost_streams(command, way, STREAMS["output"], variables, tmp_path) as bereft:
        code = bereft.process.wait(600)
    errors = (tmp_path / "error").read_text()
    assert "Traceback" not in errors
    if way == "full disk" and usual.stdout:
        assert code == 76
        assert re.search("^standard output: No space left", errors, re.MULTILINE)
    else:
        assert code == usual.returncode, errors


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["--help"], marks=pytest.mark.soak),
        pytest.param(["local", "--help"], marks=pytest.mark.soak),
        ["slurm", SPEC, "--dry-run"],
    ],
)
def test_an_engine_without_a_reader_ends_as_ever(words: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "launch", *words]
    variables = environment(1) | {"PYTHONPATH": str(ROOT)}
    for way, expected in LOSSES.items():
        with start_with_lost_streams(command, way, STREAMS["output"], variables, tmp_path) as bereft:
            assert bereft.process.wait(600) == (expected or 0), way
        assert "Traceback" not in (tmp_path / "error").read_text()


@pytest.mark.soak
def test_a_command_that_follows_ends_with_its_reader(tmp_path: Path) -> None:
    job = Job(SPEC, tmp_path / "run", ("config.width=64", "config.total_steps=100000", "checkpoint.every_steps=10"))
    attempt = job.start()
    attempt.wait_until(lambda: job.newest() >= 10, "step 10")
    for words in (["status", str(job.directory), "--watch"], ["status", str(job.directory), "--watch", "--json"]):
        command = [sys.executable, "-m", "runner", *words]
        variables = environment(1) | {"PYTHONPATH": str(ROOT)}
        with start_with_lost_streams(command, "no reader", STREAMS["output"], variables, tmp_path) as bereft:
            assert bereft.process.wait(60) == 0
    attempt.process.send_signal(signal.SIGTERM)
    attempt.expect(75)
