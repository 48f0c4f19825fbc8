"""Preemption: one signal on any host becomes one agreed tick on all."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from runner.hosts.preemption import StopNotice

ROOT = Path(__file__).parents[2]


class FakePeers:
    """Some processes as threads: a shared board, and every host waits until all have answered."""

    def __init__(self, board, process):
        self._board, self._process = board, process

    def announce_stop(self):
        self._board.asked.set()

    def await_stop(self):
        self._board.asked.wait()

    def exchange_ticks(self, tick):
        self._board.ticks[self._process] = tick
        self._board.barrier.wait(timeout=600)
        return self._board.ticks

    def leave(self, code):
        raise AssertionError("only an idle job leaves here")


class Board:
    def __init__(self, num_processes):
        self.asked = threading.Event()
        self.ticks = [0] * num_processes
        self.barrier = threading.Barrier(num_processes)


def stop_ticks(ticks):
    """Let hosts that have polled `ticks` times agree on a stop; the tick at which each then hears it."""
    board = Board(len(ticks))
    notices = [StopNotice() for _ in ticks]
    for notice, tick in zip(notices, ticks, strict=True):
        assert not any(notice.poll() for _ in range(tick))
    for process, notice in enumerate(notices):
        notice.join(FakePeers(board, process))
    notices[-1]._ask_to_stop()
    for thread in threading.enumerate():
        if thread.name == "stop":
            thread.join(timeout=600)
    heard = []
    for notice, tick in zip(notices, ticks, strict=True):
        heard.append(next(number for number in range(tick + 1, max(ticks) + 10) if notice.poll()))
        assert notice.poll(), "a stop stays"
    return heard


@pytest.mark.parametrize("ticks", [[1], [5, 5], [5, 6], [6, 5], [0, 1], [3, 9, 4, 1], [100, 0, 0]])
def test_hosts_at_any_ticks_agree_on_the_tick_after_the_largest(ticks):
    assert stop_ticks(ticks) == [max(ticks) + 1] * len(ticks)


def test_nothing_stops_without_a_signal():
    notice = StopNotice()
    assert not any(notice.poll() for _ in range(100))


IDLE = """
import os, signal, sys, time
from runner.hosts.preemption import StopNotice
notice = StopNotice()
notice.listen()
notice.on_idle_exit = lambda: print("recorded", flush=True)
os.kill(os.getpid(), getattr(signal, sys.argv[1]))
time.sleep(60)
"""

BUSY = """
import os, signal, sys, time
from runner.hosts.preemption import StopNotice
notice = StopNotice()
notice.listen()
polls = [notice.poll() for _ in range(3)]
os.kill(os.getpid(), getattr(signal, sys.argv[1]))
while not notice.poll():
    polls.append(False)
    time.sleep(0.001)
print("stopped", any(polls), notice.poll(), flush=True)
if sys.argv[2:]:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
"""


def run(program, *arguments):
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=600
    )


@pytest.mark.parametrize("signal", ["SIGTERM", "SIGINT"])
def test_a_process_that_has_not_begun_ends_at_once_with_75(signal):
    result = run(IDLE, signal)
    assert result.returncode == 75
    assert result.stdout == "recorded\n"
    assert result.stderr.splitlines() == [
        f"{signal}: stopping at the next step",
        "stopped before the first step: nothing to save",
    ]


@pytest.mark.parametrize("signal", ["SIGTERM", "SIGINT"])
def test_a_process_at_work_hears_it_at_a_later_tick(signal):
    result = run(BUSY, signal)
    assert result.returncode == 0
    assert result.stdout == "stopped False True\n"


def test_a_second_signal_ends_the_process_at_once_with_75():
    result = run(BUSY, "SIGTERM", "again")
    assert result.returncode == 75
    assert "again: leaving at once; the last commit is intact" in result.stderr
