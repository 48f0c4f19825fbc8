"""The worker of one host, for engines that do not restart processes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import worker
from runner.process import STANDBY_VARIABLE
from tests.support.job_process import DEADLINE_SECONDS, Job
from tests.support.leftover import list_children
from tests.support.tiny_jobs import environment

ROOT = Path(__file__).parents[2]
SPEC = """\
name: tiny_run
job: experiments.counter:Counter
directory: runs/tiny
"""


def test_the_worker_restarts_its_process_by_exit_code(tmp_path, monkeypatch):
    program = f"""if True:
        import pathlib, sys
        path = pathlib.Path({str(tmp_path / "n")!r})
        path.write_text(path.read_text() + "x" if path.exists() else "x")
        sys.exit({{1: 75, 2: 76}}.get(len(path.read_text()), 0))
    """
    monkeypatch.setattr(worker, "runner_arguments", lambda spec, overrides: ["-c", program])
    monkeypatch.setattr("launch.supervisor.FIRST_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(worker.signal, "signal", lambda number, handler: None)
    (tmp_path / "s.yaml").write_text(SPEC.replace("runs/tiny", str(tmp_path / "run")))
    assert worker.main([str(tmp_path / "s.yaml"), "--max-restarts", "1"]) == 0
    assert (tmp_path / "n").read_text() == "xxx"


@pytest.mark.parametrize("what", ["pipe", "process"])
def test_a_standby_process_that_cannot_be_started_is_left_out(what, monkeypatch, capsys):
    def fail(*arguments, **options):
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(*((os, "pipe") if what == "pipe" else (subprocess, "Popen")), fail)
    standby, open_files = worker.Standby(), os.listdir("/proc/self/fd")
    standby.start()
    standby.start()
    assert standby.take(["spec.yaml"]) is None
    assert capsys.readouterr().out == "launch: no standby process: Resource temporarily unavailable\n"
    assert os.listdir("/proc/self/fd") == open_files


# A signal to the process group reaches the job without its worker, one to the first process of a container does not.
@pytest.mark.parametrize("words", [[], ["--forward-signals"]], ids=["group", "first_process"])
@pytest.mark.parametrize("code", [75, 76])  # 76: its peers ended before it could save
def test_a_signal_reaches_the_job_once(tmp_path, code, words):
    job = f"""if True:
        import pathlib, signal, sys, time
        heard = []
        signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
        pathlib.Path({str(tmp_path / "begun")!r}).touch()
        while not heard: time.sleep(0.01)
        time.sleep(0.3)
        print("heard", len(heard), flush=True)
        sys.exit(int(sys.argv[1]))
    """
    program = "import sys; from launch import worker; worker.runner_arguments = lambda *_: ['-c', *sys.argv[1:]]; "
    program += f"sys.exit(worker.main(['none.yaml', *{words}]))"
    command = [sys.executable, "-c", program, job, str(code)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not (tmp_path / "begun").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        (os.kill if words else os.killpg)(process.pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=DEADLINE_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 75
    assert output.splitlines() == ["heard 1"]


# A standby process.


def wait_until(happens, process):
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not happens():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_waiting(pid):
    """Return True if a process sleeps, and has used no processor time for a second."""
    readings = []
    for _ in range(6):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        readings.append((state, fields[10:12]))
        time.sleep(0.2)
    return all(reading == ("S", readings[0][1]) for reading in readings)


@pytest.mark.soak
def test_a_restart_takes_the_standby_process(tmp_path):
    options = ("config.total_steps=200", "config.step_seconds=0.1", "config.width=16", "checkpoint.every_steps=5")
    job = Job("specs/counter.yaml", tmp_path / "run", options)
    command = [sys.executable, "-m", "launch.worker", *job.arguments, "--standby-seconds", "1"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment(1), stdout=log, stderr=log)
    for attempt in (1, 2, 3):
        wait_until(lambda: any(row["attempt"] == attempt for row in job.events("commit")), process)  # noqa: B023
        wait_until(lambda: len(list_children(process.pid)) == 2, process)
        trainer, standby = list_children(process.pid)
        wait_until(lambda: is_waiting(standby), process)  # noqa: B023
        if attempt < 3:
            os.kill(trainer, signal.SIGKILL)
            wait_until(lambda: trainer not in list_children(process.pid), process)  # noqa: B023
            assert list_children(process.pid)[0] == standby
    assert process.wait(DEADLINE_SECONDS) == 0, (tmp_path / "log").read_text()
    assert job.num_attempts() == 3
    whole = Job("specs/counter.yaml", tmp_path / "whole", (*options, "config.step_seconds=0"))
    whole.finish()
    assert job.outcome() == whole.outcome()


def start_standby(tmp_path):
    """Start a process that waits for its command line, with a module of its own; return it with its pipe."""
    (tmp_path / "sitecustomize.py").write_text("print('begun', flush=True)\n")
    receiver, pipe = os.pipe()
    os.set_inheritable(receiver, True)
    # With huge pages the process would begin twice.
    variables = environment(1) | {STANDBY_VARIABLE: str(receiver), "GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}
    variables["PYTHONPATH"] = f"{tmp_path}:{ROOT}"
    process = subprocess.Popen(
        [sys.executable, "-m", "runner"], env=variables, close_fds=False, stdout=subprocess.PIPE, text=True
    )
    os.close(receiver)
    wait_until(lambda: is_waiting(process.pid), process)
    return process, pipe


@pytest.mark.parametrize("is_changed", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_a_standby_begins_again_if_its_modules_have_changed(tmp_path, is_changed):
    process, pipe = start_standby(tmp_path)
    if is_changed:
        os.utime(tmp_path / "sitecustomize.py", (1, 1))
    with os.fdopen(pipe, "wb") as file:
        file.write(json.dumps(["schema"]).encode() + b"\n")
    output, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 0
    assert output.startswith("begun\nbegun\n{" if is_changed else "begun\n{")


@pytest.mark.soak
def test_a_standby_ends_with_its_supervisor(tmp_path):
    process, pipe = start_standby(tmp_path)
    os.close(pipe)
    assert process.communicate(timeout=DEADLINE_SECONDS)[0] == "begun\n"
    assert process.returncode == 0


def test_a_standby_touches_no_device():
    program = "import runner.trainer, runner.cli.run; from jax._src import xla_bridge; "
    program += "print(xla_bridge.backends_are_initialized())"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout == "False\n", result.stderr


@pytest.mark.parametrize(("free", "words"), [(2**30 - 1, "1.00 GiB of memory is free, needs 1 GiB"), (None, "unknown")])
def test_a_standby_that_lacks_memory_is_refused_once(free, words, monkeypatch, capsys):
    monkeypatch.setattr(worker, "read_free_memory_bytes", lambda: free)
    standby = worker.Standby()
    standby.start()
    standby.start()
    assert standby.take(["specs/counter.yaml"]) is None
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("launch: no standby process: ")
    assert words in line


def test_the_free_memory_is_that_of_the_machine_or_less():
    assert 0 < worker.read_free_memory_bytes() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
