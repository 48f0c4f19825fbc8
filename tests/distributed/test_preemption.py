"""Preemption: a signal to any process becomes one agreed tick on all of them."""

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from runner.distributed.preemption import StopNotice
from runner.errors import EXIT_PREEMPTED
from runner.process import STOP_SIGNALS

ROOT = Path(__file__).parents[2]


class FakePeers:
    """Processes as threads with a shared board, on which every host waits for all others."""

    def __init__(self, board, process):
        self._board, self._process = board, process

    def announce_stop(self):
        self._board.asked.set()

    def await_stop(self):
        self._board.asked.wait()

    def agree_on_tick(self, tick):
        self._board.ticks[self._process] = tick
        self._board.barrier.wait(timeout=600)
        return max(self._board.ticks)

    def leave(self, code):
        raise AssertionError("only an idle job leaves here")


class Board:
    def __init__(self, num_processes):
        self.asked = threading.Event()
        self.ticks = [0] * num_processes
        self.barrier = threading.Barrier(num_processes)


def find_stop_ticks(ticks):
    """Let hosts that have polled `ticks` times agree on a stop, and return the tick at which each one stops."""
    board = Board(len(ticks))
    notices = [StopNotice() for _ in ticks]
    for notice, tick in zip(notices, ticks, strict=True):
        assert not any(notice.poll() for _ in range(tick))
    for process, notice in enumerate(notices):
        notice.join_peers(FakePeers(board, process))
    notices[-1]._announce_stop()
    for thread in threading.enumerate():
        if thread.name == "stop":
            thread.join(timeout=600)
    heard = []
    for notice, tick in zip(notices, ticks, strict=True):
        heard.append(next(number for number in range(tick + 1, max(ticks) + 10) if notice.poll()))
        assert notice.poll(), "a stop persists"
    return heard


@pytest.mark.parametrize("ticks", [[1], [5, 5], [5, 6], [6, 5], [0, 1], [3, 9, 4, 1], [100, 0, 0]])
def test_processes_stop_at_the_tick_after_the_largest(ticks):
    assert find_stop_ticks(ticks) == [max(ticks) + 1] * len(ticks)


@pytest.mark.parametrize("jobs", [[0, 0], [0, 1], [1, 1]])
def test_a_job_after_another_is_idle_until_its_first_poll(jobs, monkeypatch):
    """Some of the processes may have begun the second job, others not yet; all end alike, at once or at a poll."""
    board, ended = Board(2), []
    notices = [StopNotice(), StopNotice()]
    monkeypatch.setattr(FakePeers, "leave", lambda self, code: None)
    monkeypatch.setattr(StopNotice, "_end", lambda self, code, message: ended.append(code))
    for process, (notice, job) in enumerate(zip(notices, jobs, strict=True)):
        assert not any(notice.poll() for _ in range(5 + job))  # the last poll comes before the second job
        if job:
            notice.begin_next_job()
        notice.join_peers(FakePeers(board, process))
    notices[0]._announce_stop()
    for thread in threading.enumerate():
        if thread.name == "stop":
            thread.join(timeout=600)
    is_idle = 1 in jobs
    assert ended == ([EXIT_PREEMPTED] * 2 if is_idle else [])
    if not is_idle:
        assert [notice.poll() for notice in notices] == [True, True]


def test_nothing_stops_without_a_signal():
    notice = StopNotice()
    assert not any(notice.poll() for _ in range(100))


# The effect of each signal on a runner. A new signal of the system must be added to one of the sets.
STOPPING_SIGNALS = {"SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"}
STACK_SIGNALS = {"SIGQUIT"}
UNCATCHABLE_SIGNALS = {"SIGKILL", "SIGSTOP"}
HARMLESS_SIGNALS = {"SIGCHLD", "SIGCONT", "SIGPIPE", "SIGTSTP", "SIGTTIN", "SIGTTOU", "SIGURG", "SIGWINCH", "SIGXFSZ"}
FAULT_SIGNALS = {"SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGSTKFLT", "SIGSYS", "SIGTRAP"}
UNUSED_SIGNALS = {"SIGALRM", "SIGPOLL", "SIGPROF", "SIGPWR", "SIGVTALRM", "SIGXCPU"}  # not sent by schedulers

PHASES = """
import faulthandler, json, os, signal, sys, time
from runner.distributed.preemption import StopNotice

def start(ignored):
    for name in ignored:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    notice = StopNotice()
    notice.install_signal_handlers()
    notice.on_idle_exit = lambda: print("recorded", flush=True)
    return notice

def send(names):
    for name in names:
        os.kill(os.getpid(), getattr(signal, name))

def idle(notice, names):
    send(names)
    time.sleep(60 if not names[0] == "SIGQUIT" else 0)

def busy(notice, names):
    polls = [notice.poll() for _ in range(3)]
    send(names)
    while names[0] != "SIGQUIT" and not notice.poll():
        time.sleep(0.001)
    print("stopped", any(polls), notice.poll(), flush=True)

def ignoring(notice, names):
    send(names)
    print("deaf", not any(notice.poll() for _ in range(10)), flush=True)

def insisting(notice, names):
    notice.poll()
    send(names)
    time.sleep(60)

def command(notice, names):
    notice.interrupt_command()
    try:
        send(names[:1])
        time.sleep(60)
    except KeyboardInterrupt as interrupt:
        send(names[1:])
        time.sleep(60 if names[1:] else 0)
        print(interrupt, flush=True)

found = []
for phase, *names in json.loads(sys.argv[1]):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writer, 1), os.dup2(writer, 2)
        os.close(reader), os.close(writer)
        faulthandler.dump_traceback_later(100, exit=True)  # a hang ends with the stacks of all threads
        globals()[phase](start(names if phase == "ignoring" else ()), names)
        sys.stdout.flush()
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as output:
        lines = output.read().splitlines()
    found.append([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), lines])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def phase_results():
    """Run one program per case and return exit code and lines by phase and signals."""
    cases = [(phase, name) for phase in ("idle", "busy") for name in sorted(STOPPING_SIGNALS | STACK_SIGNALS)]
    cases += [("ignoring", "SIGHUP"), ("ignoring", "SIGUSR1"), ("ignoring", "SIGUSR2")]
    cases += [("insisting", first, second) for first in ("SIGTERM", "SIGINT") for second in ("SIGTERM", "SIGINT")]
    cases += [("busy", "SIGTERM", "SIGHUP"), ("busy", "SIGHUP", "SIGTERM"), ("busy", "SIGHUP", "SIGHUP", "SIGHUP")]
    cases += [("command", name) for name in sorted(STOPPING_SIGNALS)]
    cases += [("command", "SIGINT", "SIGINT"), ("command", "SIGHUP", "SIGTERM")]
    program = [sys.executable, "-c", PHASES, json.dumps(cases)]
    output = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=600, check=True).stdout
    return dict(zip(cases, json.loads(output), strict=True))


def test_every_signal_of_this_system_is_covered():
    named = [STOPPING_SIGNALS, STACK_SIGNALS, UNCATCHABLE_SIGNALS, HARMLESS_SIGNALS, FAULT_SIGNALS, UNUSED_SIGNALS]
    numbers = sorted(getattr(signal, name) for names in named for name in names if hasattr(signal, name))
    real_time = range(signal.SIGRTMIN, signal.SIGRTMAX + 1) if hasattr(signal, "SIGRTMIN") else ()
    assert numbers == sorted(set(signal.valid_signals()) - set(real_time))
    assert {number.name for number in STOP_SIGNALS} == STOPPING_SIGNALS


@pytest.mark.parametrize("name", sorted(STOPPING_SIGNALS))
def test_a_signal_before_the_first_step_ends_the_process_with_75(name, phase_results):
    assert phase_results["idle", name] == [
        75,
        [f"{name}: stopping at the next step", "recorded", "stopped before the first step: nothing to save"],
    ]


@pytest.mark.parametrize("name", sorted(STOPPING_SIGNALS))
def test_a_signal_during_steps_stops_at_a_later_tick(name, phase_results):
    assert phase_results["busy", name] == [0, [f"{name}: stopping at the next step", "stopped False True"]]


@pytest.mark.parametrize("phase", ["idle", "busy"])
def test_sigquit_prints_the_stacks_and_the_job_continues(phase, phase_results):
    code, lines = phase_results[phase, "SIGQUIT"]
    assert code == 0
    assert any(f"in {phase}" in line for line in lines)
    assert lines[-1] == "stopped False False" or phase == "idle"


@pytest.mark.parametrize("name", ["SIGHUP", "SIGUSR1", "SIGUSR2"])
def test_signals_ignored_by_nohup_stay_ignored(name, phase_results):
    assert phase_results["ignoring", name] == [0, ["deaf True"]]


@pytest.mark.parametrize("first", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("second", ["SIGTERM", "SIGINT"])
def test_a_second_insistent_signal_ends_the_process_with_75(first, second, phase_results):
    code, lines = phase_results["insisting", first, second]
    assert code == 75
    assert lines == [
        f"{first}: stopping at the next step",
        f"{second} again: exiting without another save; the last commit is intact",
    ]


@pytest.mark.parametrize(
    "names", [("SIGTERM", "SIGHUP"), ("SIGHUP", "SIGTERM"), ("SIGHUP", "SIGHUP", "SIGHUP")], ids=str
)
def test_a_closing_terminal_does_not_interrupt_the_last_save(names, phase_results):
    code, lines = phase_results["busy", *names]
    assert code == 0
    assert "at once" not in "".join(lines)


@pytest.mark.parametrize("name", sorted(STOPPING_SIGNALS))
def test_a_signal_interrupts_a_command_that_runs_no_job(name, phase_results):
    assert phase_results["command", name] == [0, [f"{name}: stopped before the end; run the command again"]]


@pytest.mark.parametrize("names", [("SIGINT", "SIGINT"), ("SIGHUP", "SIGTERM")], ids=str)
def test_a_second_signal_ends_a_command_that_cleans_up(names, phase_results):
    line = f"{names[0]}: stopped at once, without cleaning up; run the command again"
    assert phase_results["command", *names] == [75, [line]]
