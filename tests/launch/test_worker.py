"""The worker of one host, for engines that do not restart processes."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import worker
from tests.support.job_process import DEADLINE_SECONDS

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


# A signal to the process group reaches the job without its worker, one to the first process of a container does not.
@pytest.mark.daily(2)
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
