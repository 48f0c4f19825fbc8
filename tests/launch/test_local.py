"""`launch local`: output, signals and exit code of a job with several local processes."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import local
from runner.process import STOP_SIGNALS
from tests.support import leftover
from tests.support.job_process import DEADLINE_SECONDS, Job

ROOT = Path(__file__).parents[2]


SOAK = pytest.mark.soak


def start_launcher(*arguments):
    command = [sys.executable, "-m", "launch", "local", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        pytest.param(("specs/none.yaml",), "specs/none.yaml", marks=pytest.mark.soak),
        (("specs/counter.yaml", "--set", "config.total_step=1"), "did you mean config.total_steps"),
        pytest.param(
            ("specs/gpt_nano.yaml", "--set", "config.data.source=/no/*.bin"), "no file", marks=pytest.mark.soak
        ),
    ],
)
def test_an_error_of_all_processes_is_printed_once_and_exits_with_2(words, named, tmp_path):
    process = start_launcher(*words, "--processes", "2", "--set", f"directory={tmp_path}")
    output, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 2
    (line,) = output.splitlines()
    assert re.match(r"\[[0-3]\] ", line)
    assert named in line


PRINTING_PROGRAM = """
import sys
for line in sys.argv[2:]:
    print(line)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("code", "lines", "printed"),
    [
        (2, ["a"], []),
        (0, ["a", "a"], []),
        (2, ["a", "b"], ["a", "b"]),
        (2, ["b", "a"], ["b"]),
        (1, ["a"], ["a"]),
        (75, ["a"], ["a"]),
        (2, ["a", "  in a stack"], ["a", "  in a stack"]),
        (2, ["", "b", "b"], ["", "b", "b"]),
    ],
)
def test_final_lines_that_another_process_printed_are_omitted(code, lines, printed, capsys, monkeypatch):
    monkeypatch.setattr(local, "say", print)
    output = local.MergedOutput()
    for number, (each, ends) in enumerate([(["a", "  in a stack"], 2), (lines, code)]):
        command = [sys.executable, "-c", PRINTING_PROGRAM, str(ends), *each]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            output.copy_lines(process, number)
    assert capsys.readouterr().out.splitlines()[2:] == [f"[1] {line}" for line in printed]


def test_a_signal_reaches_every_process_and_the_job_exits_with_75(tmp_path):
    settings = [f"directory={tmp_path}/run", "config.total_steps=100000", "config.step_seconds=0.05"]
    options = [word for setting in settings for word in ("--set", setting)]
    process = start_launcher("specs/counter.yaml", "--processes", "2", "--devices-per-process", "1", *options)
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not list(tmp_path.glob("run/checkpoints/*/manifest.json")) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 75, output
    assert "[0] " in output
    assert "[1] " in output


# Fake job that sends its parent, the launcher, the given signal and exits with 75 when the launcher forwards it.
# SIGQUIT is forwarded too, but is not a stop request, so a SIGTERM must follow.
SIGNAL_ECHO = """
import os, signal, sys, time
number = signal.Signals[sys.argv[1]]
heard = []
for each in (number, signal.SIGTERM):
    signal.signal(each, lambda number, frame: heard.append(signal.Signals(number).name))
os.kill(os.getppid(), number)
while not heard:
    time.sleep(0.001)
if number == signal.SIGQUIT:
    os.kill(os.getppid(), signal.SIGTERM)
    while "SIGTERM" not in heard:
        time.sleep(0.001)
print(heard[0])
sys.exit(75)
"""


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("SIGINT", "SIGTERM", "SIGQUIT") else pytest.mark.soak)
        for name in sorted(number.name for number in (*STOP_SIGNALS, signal.SIGQUIT))
    ],
)
def test_the_launcher_forwards_signals_to_its_processes(name):
    program = f"""if True:
        import sys
        from launch import app, local
        local.runner_arguments = lambda spec, overrides: ["-c", {SIGNAL_ECHO!r}, {name!r}]
        sys.exit(app.main(["local", "specs/counter.yaml"]))
    """
    words = [sys.executable, "-c", program]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    assert (result.returncode, result.stdout) == (75, f"[0] {name}\n"), result.stderr


def test_a_launcher_under_nohup_and_its_processes_ignore_sighup(tmp_path):
    program = f"""if True:
        import os, signal, sys
        from launch import app, local
        listens = "import signal; print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)"
        local.runner_arguments = lambda spec, overrides: ["-c", listens]
        os.kill(os.getpid(), signal.SIGHUP)
        code = app.main(["local", "specs/counter.yaml", "--set", "directory={tmp_path}"])
        os.kill(os.getpid(), signal.SIGHUP)
        print(code)
    """
    words = ["sh", "-c", 'trap "" HUP; exec "$@"', "nohup", sys.executable, "-c", program]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    assert (result.returncode, result.stdout) == (0, "[0] True\n0\n"), result.stderr


@pytest.mark.soak
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGHUP, 75)])
def test_a_killed_launcher_leaves_no_process_and_loses_no_step(number, code, tmp_path):
    job = Job("specs/counter.yaml", tmp_path / "run", ("config.total_steps=100000", "config.step_seconds=0.05"))
    launcher = job.launch(2)
    launcher.wait_until(lambda: job.newest() > 0, "a commit")
    children = launcher.children()
    assert len(children) == 2
    launcher.process.send_signal(number)
    launcher.expect(code)
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not all(leftover.is_dead(child) for child in children):
        assert time.monotonic() < deadline, launcher.report("has left processes behind")
        time.sleep(0.1)
    (saved,) = [row["step"] for row in job.events("preempt") if row["saved"]]
    assert saved == job.newest()
