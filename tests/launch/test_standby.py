"""Standbys of `launch local` and `launch.worker`: taken by a restart, silent while they wait, and never left behind."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import local, supervisor
from launch.supervisor import ProcessStarter
from runner.process import STANDBY_VARIABLE, bind_to_parent, read_free_memory_bytes, start_process
from tests.support import leftover
from tests.support.job_process import DEADLINE_SECONDS, Job, make_uninterrupted_counter_run
from tests.support.leftover import list_children
from tests.support.simulated_devices import environment

ROOT = Path(__file__).parents[2]
STEPS = ("config.total_steps=2000", "config.width=16")
SLOW = """\
name: counter
job: experiments.counter:Counter
directory: runs/counter
checkpoint: {every_steps: 5}
config: {step_seconds: 0.1}
"""
SOAK = pytest.mark.soak


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


class Supervised:
    """A counter under a supervisor that starts standbys after a second."""

    def __init__(self, directory, engine="local", num_processes=1, **variables):
        # Pace and saves are in the spec, which each attempt reads, so that the last one can be told to hurry.
        self.spec, self.num_processes = directory / "spec.yaml", num_processes
        self.spec.write_text(SLOW)
        self.job = Job(str(self.spec), directory / "run", STEPS)
        self.log = directory / "log"
        command = [sys.executable, "-m", engine, *self.job.arguments, "--standby-seconds", "1"]
        if engine == "local":
            command[2:3] = ["launch", "local"]
            command += ["--processes", str(num_processes), "--devices-per-process", "1"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                bind_to_parent(command),
                cwd=ROOT,
                env=environment(1) | variables,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def await_standbys(self, attempt):
        """Wait until an attempt has committed a step and its standbys wait; return its processes and the standbys."""
        num_children = 2 * self.num_processes
        wait_until(lambda: any(row["attempt"] == attempt for row in self.job.events("commit")), self.process)
        wait_until(lambda: len(list_children(self.process.pid)) == num_children, self.process)
        children = list_children(self.process.pid)
        for standby in children[self.num_processes :]:
            wait_until(lambda pid=standby: is_waiting(pid), self.process)
        return children[: self.num_processes], children[self.num_processes :]

    def await_main(self, attempt):
        """Wait for an attempt; return its process 0."""
        claim = self.job.directory / "attempts" / str(attempt)
        wait_until(claim.exists, self.process)
        return json.loads(claim.read_bytes())["pid"]

    def restart(self, trainer):
        """Kill the trainer; the next attempt runs without pauses to its end."""
        self.spec.write_text(
            SLOW.replace("every_steps: 5", "every_steps: 1000").replace("step_seconds: 0.1", "step_seconds: 0")
        )
        os.kill(trainer, signal.SIGKILL)

    def finish(self):
        """Wait for the end, whose result must be that of an undisturbed run, and return the output."""
        assert self.process.wait(DEADLINE_SECONDS) == 0, self.log.read_text()
        assert self.job.result() == make_uninterrupted_counter_run(STEPS).result()
        return self.log.read_text()


def list_open_files():
    """Return the open files of this process, without those of objects that earlier tests have left."""
    gc.collect()
    return set(os.listdir("/proc/self/fd"))


# A restart.


@pytest.mark.parametrize(
    ("engine", "num_processes", "num_killed"),
    [
        ("local", 1, 0),
        pytest.param("local", 1, 1, marks=SOAK),
        pytest.param("local", 2, 0, marks=SOAK),
        pytest.param("local", 2, 1, marks=SOAK),
        pytest.param("launch.worker", 1, 0, marks=SOAK),
        pytest.param("launch.worker", 1, 1, marks=SOAK),
    ],
)
def test_a_restart_takes_the_standbys_that_live(engine, num_processes, num_killed, tmp_path):
    run = Supervised(tmp_path, engine, num_processes)
    trainers, standbys = run.await_standbys(1)
    for pid in standbys[:num_killed]:
        os.kill(pid, signal.SIGKILL)
    run.restart(trainers[-1])
    main, restarted = run.await_main(2), list_children(run.process.pid)[:num_processes]
    assert main in (standbys[num_killed:] or restarted)
    assert sorted(set(restarted) & set(standbys)) == sorted(standbys[num_killed:])
    output = run.finish()
    # Lines of a taken standby have the prefix of its process.
    assert engine != "local" or output.count("[0] restored step") == 1


@SOAK
@pytest.mark.parametrize("num_processes", [1, 2])
def test_every_restart_takes_standbys(num_processes, tmp_path):
    run = Supervised(tmp_path, num_processes=num_processes)
    for attempt in (1, 2, 3):
        trainers, standbys = run.await_standbys(attempt)
        (run.restart if attempt == 3 else lambda pid: os.kill(pid, signal.SIGKILL))(trainers[-1])
        assert run.await_main(attempt + 1) == standbys[0]
        assert list_children(run.process.pid)[:num_processes] == standbys
    run.finish()


@SOAK
@pytest.mark.parametrize("is_changed", [True, False])
def test_a_standby_begins_again_if_its_modules_have_changed(is_changed, tmp_path):
    module = tmp_path / "sitecustomize.py"
    module.write_text("import sys\nif 'runner' in sys.orig_argv: print('begun', flush=True)\n")
    # With huge pages each process would begin twice.
    run = Supervised(tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}", GLIBC_TUNABLES="glibc.malloc.hugetlb=0")
    (trainer,), (standby,) = run.await_standbys(1)
    if is_changed:
        os.utime(module, (1, 1))
    run.restart(trainer)
    assert run.await_main(2) == standby
    assert run.finish().count("[0] begun\n") == 2 + is_changed


# Starts of standbys.

PROGRAM = """if True:
    import sys
    from launch import app, local, supervisor
    local.runner_arguments = lambda spec, overrides: ["-c", "import sys, time; time.sleep(4); sys.exit({code})"]
    supervisor.read_free_memory_bytes = lambda: {free}
    sys.exit(app.main(["local", "none.yaml", "--processes", "2", "--standby-seconds", "{seconds}"]))
"""


def run_program(**values):
    """Run a job of two processes that end after 4 s; return its result and the processes that it leaves."""
    before = leftover.find()
    command = [sys.executable, "-c", PROGRAM.format(**({"code": 0, "free": 2**31, "seconds": 1} | values))]
    launcher = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    num_children = 0
    while launcher.poll() is None:
        num_children = max(num_children, len(list_children(launcher.pid)))
        time.sleep(0.1)
    return num_children, launcher.returncode, launcher.stdout.read(), leftover.find() - before


@pytest.mark.soak
@pytest.mark.parametrize("code", [0, pytest.param(1, marks=SOAK), pytest.param(2, marks=SOAK)])
def test_an_ended_job_leaves_no_standby(code):
    assert run_program(code=code) == (4, code, "", set())


@SOAK
def test_no_standby_is_started_with_0_seconds():
    assert run_program(seconds=0) == (2, 0, "", set())


@SOAK
def test_two_standbys_need_twice_the_memory():
    line = "launch: no standby process: 2.00 GiB of memory is free, needs 2 GiB\n"
    assert run_program(free=2**31 - 1) == (2, 0, line, set())


class Recorder(ProcessStarter):
    """A starter of sleeping processes that only counts its standbys."""

    def __init__(self, seconds):
        words = [sys.executable, "-c", f"import time; time.sleep({seconds})"]
        super().__init__(1, os.environ, lambda *_: start_process(words, os.environ, subprocess.PIPE))
        self.num_starts = 0

    def start_standbys(self):
        self.num_starts += 1


@pytest.mark.daily(2)
@pytest.mark.parametrize(
    ("age_seconds", "is_stopping", "expected"), [(1, False, 1), (1, True, 0), (30, False, 0), (0, False, 0)]
)
def test_a_standby_is_started_at_its_time_unless_the_job_stops(age_seconds, is_stopping, expected):
    starter = Recorder(1.6)
    processes = local.LocalProcesses([], starter, 60.0, age_seconds)
    processes.is_stopping = is_stopping
    assert processes.run() == 0
    assert min(starter.num_starts, 1) == expected


def make_starter(num_processes=1):
    return ProcessStarter(
        num_processes, environment(1), lambda command, variables, inherited: start_process(command, variables, -1)
    )


@pytest.mark.parametrize("what", ["pipe", "process"])
def test_a_standby_that_cannot_be_started_is_left_out(what, monkeypatch, capsys):
    def fail(*arguments, **options):
        raise BlockingIOError("Resource temporarily unavailable")

    starter, open_files = make_starter(), list_open_files()
    with monkeypatch.context() as patch:
        patch.setattr(*((os, "pipe") if what == "pipe" else (subprocess, "Popen")), fail)
        starter.start_standbys()
        starter.start_standbys()
    assert capsys.readouterr().out == "launch: no standby process: Resource temporarily unavailable\n"
    assert list_open_files() <= open_files
    assert starter.start(["-c", ""]).communicate() == (b"", None)


def test_a_standby_has_the_environment_of_a_new_process():
    def spawn(command, variables, inherited):
        words = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]
        return start_process(words, variables, subprocess.PIPE, inherited)

    starter = ProcessStarter(1, {"HOME": "/here", "XLA_FLAGS": "--a=1 --b"}, spawn)
    starter.start_standbys()
    environments = []
    for _ in ("standby", "new"):
        process = starter.start(["-m", "runner", "spec.yaml"])
        process.stdout.readline()
        environments.append(set(Path(f"/proc/{process.pid}/environ").read_text().split("\0")))
        process.kill()
    (line,) = environments[0] - environments[1]
    assert line.startswith(STANDBY_VARIABLE)
    assert environments[1] <= environments[0]


def test_all_standbys_end_if_one_cannot_be_started(monkeypatch, capsys):
    started = []

    def spawn(command, variables, inherited):
        if started:
            raise BlockingIOError("Resource temporarily unavailable")
        started.append(start_process(command, variables, subprocess.PIPE, inherited))
        return started[0]

    open_files = list_open_files()
    ProcessStarter(2, environment(1), spawn).start_standbys()
    assert started[0].returncode == -signal.SIGKILL
    assert capsys.readouterr().out == "launch: no standby process: Resource temporarily unavailable\n"
    del started[0]
    assert list_open_files() <= open_files


@pytest.mark.parametrize(
    ("num_processes", "free", "words"),
    [
        (1, 2**30 - 1, "1.00 GiB of memory is free, needs 1 GiB"),
        (3, 2**31, "2.00 GiB of memory is free, needs 3 GiB"),
        (1, None, "unknown"),
    ],
)
def test_standbys_that_lack_memory_are_refused_once(num_processes, free, words, monkeypatch, capsys):
    monkeypatch.setattr(supervisor, "read_free_memory_bytes", lambda: free)
    starter = make_starter(num_processes)
    starter.start_standbys()
    starter.start_standbys()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("launch: no standby process: ")
    assert words in line


def test_the_free_memory_is_that_of_the_machine_or_less():
    assert 0 < read_free_memory_bytes() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.soak
def test_a_standby_touches_no_device():
    program = "import runner.trainer, runner.cli.run; from jax._src import xla_bridge; "
    program += "print(xla_bridge.backends_are_initialized())"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout == "False\n", result.stderr


# Signals and kills while a standby waits.


@pytest.mark.soak
@pytest.mark.parametrize("engine", ["local", pytest.param("launch.worker", marks=SOAK)])
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=SOAK)])
def test_a_stop_ends_waiting_standbys_silently(engine, number, tmp_path):
    run = Supervised(tmp_path, engine)
    (trainer,), (standby,) = run.await_standbys(1)
    # As a terminal does, or systemd: `launch local` has its processes in other groups, and forwards the signal.
    os.killpg(run.process.pid, number)
    assert run.process.wait(DEADLINE_SECONDS) == 75, run.log.read_text()
    assert leftover.is_dead(standby)
    assert leftover.is_dead(trainer)
    output = run.log.read_text()
    assert "Traceback" not in output
    assert "KeyboardInterrupt" not in output
    (saved,) = [row["step"] for row in run.job.events("preempt") if row["saved"]]
    assert saved == run.job.newest()


@SOAK
@pytest.mark.parametrize("engine", ["local", "launch.worker"])
def test_a_standby_outlives_a_request_for_stacks(engine, tmp_path):
    run = Supervised(tmp_path, engine)
    (trainer,), (standby,) = run.await_standbys(1)
    os.killpg(run.process.pid, signal.SIGQUIT)
    wait_until(lambda: "most recent call first" in run.log.read_text(), run.process)
    os.kill(standby, signal.SIGQUIT)
    os.kill(trainer, signal.SIGKILL)
    assert run.await_main(2) == standby
    # A taken one prints its stacks.
    size = run.log.stat().st_size
    os.killpg(run.process.pid, signal.SIGQUIT)
    wait_until(lambda: "most recent call first" in run.log.read_text()[size:], run.process)
    run.restart(standby)
    run.finish()


@pytest.mark.parametrize(
    ("engine", "num_processes"),
    [("local", 1), *(pytest.param(*each, marks=SOAK) for each in (("local", 2), ("launch.worker", 1)))],
)
def test_a_killed_supervisor_leaves_no_standby_and_loses_no_step(engine, num_processes, tmp_path):
    run = Supervised(tmp_path, engine, num_processes)
    trainers, standbys = run.await_standbys(1)
    run.process.kill()
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not all(leftover.is_dead(pid) for pid in (*trainers, *standbys)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    (saved,) = [row["step"] for row in run.job.events("preempt") if row["saved"]]
    assert saved == run.job.newest()


@SOAK
@pytest.mark.parametrize(("line", "code"), [("", 76), ('{"words": ["sch', 76), ("\n", 0)])
def test_a_standby_ends_without_a_command_line(line, code):
    receiver, sender = os.pipe()
    variables = environment(1) | {STANDBY_VARIABLE: str(receiver)}
    process = start_process([sys.executable, "-m", "runner"], variables, subprocess.PIPE, [receiver])
    os.close(receiver)
    os.write(sender, line.encode())
    os.close(sender)
    assert process.communicate(timeout=DEADLINE_SECONDS) == (b"", None)
    assert process.returncode == code


@pytest.mark.soak
def test_a_standby_gets_any_words():
    starter = ProcessStarter(
        1, environment(1), lambda command, variables, inherited: start_process(command, variables, -1, inherited)
    )
    starter.start_standbys()
    process = starter.start(["-m", "runner", "schema", 'it\'s "数"\n'])
    output, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 2
    assert "it's" in output.decode()
    assert json.dumps("数")[1:-1] not in output.decode()
