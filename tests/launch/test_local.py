"""One job as several local processes: their output, the signals that they hear, and the code that the job ends with."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.__main__ import main
from tests.support.harness import DEADLINE_SECONDS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("arguments", [[], ["local"], ["nowhere", "x.yaml"], ["local", "x.yaml", "--processes", "0"]])
def test_a_bad_command_line_is_refused_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage" in capsys.readouterr().err


def launch(*arguments):
    command = [sys.executable, "-m", "launch", "local", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_the_invalid_code_of_a_job_comes_through_with_a_prefix_on_every_line():
    process = launch("specs/none.yaml", "--processes", "2")
    output, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 2
    lines = output.splitlines()
    assert sorted(line[:4] for line in lines) == ["[0] ", "[1] "]
    assert all("specs/none.yaml" in line for line in lines)


def test_a_signal_reaches_every_process_and_the_job_ends_with_75(tmp_path):
    settings = [f"directory={tmp_path}/run", "config.total_steps=100000", "config.step_seconds=0.05"]
    options = [word for setting in settings for word in ("--set", setting)]
    process = launch("specs/counter.yaml", "--processes", "2", "--devices-per-process", "1", *options)
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not list(tmp_path.glob("run/checkpoints/*/manifest.json")) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 75, output
    assert "[0] " in output
    assert "[1] " in output
