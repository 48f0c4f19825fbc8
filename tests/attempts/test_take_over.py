"""A second start in the directory of an attempt that runs: it names that attempt, and asks on a terminal."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.attempts.clock_file import decode_clock_file
from runner.attempts.take_over import describe_running_attempt
from runner.errors import EXIT_DONE, EXIT_FAILED, EXIT_INVALID, EXIT_PREEMPTED
from runner.storage import LocalStore
from tests.support.job_process import Attempt, Job
from tests.support.simulated_devices import environment

ROOT = Path(__file__).parents[2]
QUESTION = "take over? [y/N]"
# A program with a terminal of its own, to which it copies its standard input, and from which its standard output.
IN_A_TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"


def make_job(directory: Path, total_steps: int = 2000) -> Job:
    steps = ("config.step_seconds=0.01", f"config.total_steps={total_steps}", "checkpoint.every_steps=50")
    return Job("specs/counter.yaml", directory, steps)


@contextlib.contextmanager
def first_attempt(job: Job) -> Iterator[Attempt]:
    """Start the job, wait for its first steps, and kill it at the end."""
    attempt = job.start()
    try:
        attempt.wait_until(job.committed, "its first checkpoint")
        yield attempt
    finally:
        if attempt.process.poll() is None:
            attempt.kill_tree()


def start_in_terminal(job: Job, *options: str, module: tuple[str, ...] = ("runner",)) -> "subprocess.Popen[str]":
    words = [sys.executable, "-m", *module, *job.arguments, *options]
    return subprocess.Popen(
        [sys.executable, "-c", IN_A_TERMINAL, *words],
        cwd=ROOT,
        env=environment(1),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def answer(process: "subprocess.Popen[str]", text: str) -> tuple[int, str]:
    """Wait for the question, answer it, and return the exit code and the output."""
    assert process.stdin is not None
    assert process.stdout is not None
    shown = ""
    while QUESTION not in shown:
        got = os.read(process.stdout.fileno(), 1 << 16).decode()
        assert got, f"ended without a question: {shown}"
        shown += got
    process.stdin.write(text)
    process.stdin.flush()
    for _ in range(4 if text == "\x03" else 0):
        # Python loses a signal that comes right before it begins to read; a person would press Ctrl-C again.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)
            break
        process.stdin.write(text)
        process.stdin.flush()
    rest, _ = process.communicate(timeout=120)
    return process.returncode, shown + rest


@pytest.mark.parametrize(
    ("text", "code"),
    [("n\n", EXIT_INVALID), ("\n", EXIT_INVALID), ("\x04", EXIT_INVALID), ("\x03", EXIT_PREEMPTED), ("y\n", EXIT_DONE)],
    ids=["no", "empty line", "end of input", "interrupt", "yes"],
)
def test_a_second_start_on_a_terminal_asks(tmp_path: Path, text: str, code: int) -> None:
    job = make_job(tmp_path / "run")
    with first_attempt(job) as first:
        second = start_in_terminal(make_job(tmp_path / "run", 1000) if code == EXIT_DONE else job)
        found, output = answer(second, text)
        assert (found, f"(process id {first.process.pid})" in output) == (code, True), output
        assert "attempt 1 on host" in output
        if code == EXIT_DONE:
            assert first.process.wait(timeout=60) == EXIT_FAILED
            assert "takes over" in output
        else:
            assert job.num_attempts() == 1
            assert first.process.poll() is None
        assert ("--take-over" in output) == (code == EXIT_INVALID)


@pytest.mark.parametrize(("text", "code"), [("n\n", EXIT_INVALID), ("\x03", EXIT_PREEMPTED)], ids=["no", "interrupt"])
def test_launch_local_asks_too(tmp_path: Path, text: str, code: int) -> None:
    job = make_job(tmp_path / "run")
    with first_attempt(job) as first:
        found, output = answer(start_in_terminal(job, module=("launch", "local")), text)
        assert (found, "Traceback" in output, job.num_attempts()) == (code, False, 1), output
        assert first.process.poll() is None


@pytest.mark.parametrize("case", ["--take-over", "no terminal"])
def test_a_second_start_without_a_question_names_the_attempt(tmp_path: Path, case: str) -> None:
    job = make_job(tmp_path / "run")
    with first_attempt(job) as first:
        shorter = make_job(tmp_path / "run", 1000)
        if case == "--take-over":
            process = start_in_terminal(shorter, case)
            output, _ = process.communicate(timeout=120)
            code = process.returncode
        else:
            second = shorter.start()
            code, output = second.wait(), second.output
        assert code == EXIT_DONE, output
        assert QUESTION not in output
        assert f"from attempt 1 on host {os.uname().nodename} (process id {first.process.pid}), last sign" in output
        assert first.process.wait(timeout=60) == EXIT_FAILED


@pytest.mark.parametrize("end", ["killed", "done", "preempted"])
def test_an_attempt_that_has_ended_is_not_asked_about(tmp_path: Path, end: str) -> None:
    job = make_job(tmp_path / "run", 100 if end == "done" else 2000)
    if end == "done":
        assert job.start().wait() == EXIT_DONE
    else:
        with first_attempt(job) as first:
            if end == "preempted":
                first.process.send_signal(signal.SIGTERM)
                assert first.wait() == EXIT_PREEMPTED
    assert describe_running_attempt(LocalStore(job.directory)) is None
    process = start_in_terminal(make_job(tmp_path / "run", 100 if end == "done" else 300))
    output, _ = process.communicate(timeout=120)
    assert (process.returncode, QUESTION in output, "takes over" in output) == (EXIT_DONE, False, False), output


@pytest.mark.parametrize(("age_seconds", "is_named"), [(1.0, True), (25.0, True), (40.0, False), (-25.0, True)])
def test_an_attempt_of_another_host_runs_if_its_last_sign_of_life_is_fresh(
    tmp_path: Path, age_seconds: float, is_named: bool
) -> None:
    job = make_job(tmp_path / "run")
    with first_attempt(job):
        pass
    clock = job.directory / "attempts/1.clock"
    content = clock.read_bytes()
    machine = json.loads(content[:1024])["machine"]
    clock.write_bytes(content.replace(machine.encode(), b"x" * len(machine), 1))
    now = decode_clock_file(clock.read_bytes()).reading.time + age_seconds
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: now)
        assert (describe_running_attempt(LocalStore(job.directory)) is not None) == is_named
