"""The job as N processes on this machine: a pod in miniature, on faked CPU devices where asked for.

Every process gets the same command that a pod's hosts get. Their output is joined line by line with a prefix each. A
signal to this process is forwarded to every one of them, and its death is one (`runner.process`). All are started again
together after 75 and 76, and this process ends with the job's exit code.
"""

import argparse
import io
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import IO

from launch import supervisor as summary
from launch.options import add_grace_seconds, grace_seconds, natural, positive, runner_arguments
from launch.supervisor import Supervisor, history_of, job_code, newest_step
from runner.console import say
from runner.errors import EXIT_DONE, RunnerError
from runner.process import list_stop_signals, make_environment, start_processes
from runner.spec import CheckpointConfig, load_document, validate_spec

HELP = "run the job as several processes on this machine"
LINGER_SECONDS = 30.0  # what the others get to end by themselves, once one has not ended well


def _copy_lines(stream: IO[bytes], prefix: str) -> None:
    for line in io.TextIOWrapper(stream, errors="replace"):
        say(f"{prefix}{line.rstrip().removeprefix(prefix)}")  # a runner of several says its number itself


class LocalProcesses:
    """The processes of one attempt, and the signals that they are to hear."""

    def __init__(self, command: Sequence[str], num_processes: int, environment: dict[str, str], grace_seconds: float):
        self._command = command
        self._num_processes = num_processes
        self._environment = environment
        self._grace_seconds = grace_seconds
        self._processes: list[subprocess.Popen[bytes]] = []
        self._have_started = False
        self._postponed: list[int] = []
        self.is_stopping = False

    def show_stacks(self, number: int, frame: FrameType | None) -> None:
        """Handler of SIGQUIT, on which each prints the stacks of its threads and goes on."""
        if self._have_started:
            self._signal_all(number)

    def forward(self, number: int, frame: FrameType | None) -> None:
        """Handler of what asks for a stop: pass it on; who has not ended after the grace period is killed."""
        if not self.is_stopping:
            killer = threading.Timer(self._grace_seconds, self._signal_all, [signal.SIGKILL])
            killer.daemon = True
            killer.start()
        self.is_stopping = True
        if self._have_started:
            self._signal_all(number)
        else:  # each is to hear of it once: a second signal would cut its last save short
            self._postponed.append(number)

    def _signal_all(self, number: int) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def run(self) -> int:
        """Start all, wait for all; the job's exit code."""
        self._processes = start_processes(self._command, self._num_processes, self._environment, subprocess.PIPE)
        readers = [
            threading.Thread(target=_copy_lines, args=(process.stdout, f"[{process_id}] "), daemon=True)
            for process_id, process in enumerate(self._processes)
        ]
        for reader in readers:
            reader.start()
        self._have_started = True
        while self._postponed:
            self._signal_all(self._postponed.pop(0))
        codes = _wait(self._processes)
        self._have_started = False
        for reader in readers:
            reader.join(timeout=5)
        return job_code(codes)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this engine."""
    parser.add_argument("--processes", type=positive, default=1, metavar="N")
    parser.add_argument("--devices-per-process", type=positive, metavar="M", help="fake M CPU devices in each process")
    parser.add_argument("--max-restarts", type=natural, default=100, metavar="N", help="after 76; default 100")
    add_grace_seconds(parser, "from a signal to kill -9")


def run(parsed: argparse.Namespace) -> int:
    """Run the job as several processes, all again after 75 and 76, and return its exit code."""
    command = [sys.executable, *runner_arguments(parsed.spec, parsed.set)]
    environment = make_environment(parsed.devices_per_process) | {"PYTHONUNBUFFERED": "1"}
    try:
        checkpoint = validate_spec(load_document(parsed.spec, parsed.set)).checkpoint
    except RunnerError:  # the job says what is wrong with it
        checkpoint = CheckpointConfig()
    processes = LocalProcesses(command, parsed.processes, environment, grace_seconds(parsed, checkpoint))
    for number in list_stop_signals():
        signal.signal(number, processes.forward)
    signal.signal(signal.SIGQUIT, processes.show_stacks)

    supervisor = Supervisor(
        processes.run, lambda: newest_step(parsed.spec, parsed.set), lambda: processes.is_stopping, parsed.max_restarts
    )
    code, attempts = supervisor.run()
    history = history_of(parsed.spec, parsed.set) if len(attempts) > 1 else None
    for line in [] if history is None else summary.lines(history):
        say(line)
    return code


def _wait(processes: Sequence["subprocess.Popen[bytes]"]) -> list[int]:
    """Wait for all; once one has not ended well, the others get a while to end too before they are killed."""
    ended = threading.Semaphore(0)
    lost = threading.Event()

    def wait_for(process: "subprocess.Popen[bytes]") -> None:
        if process.wait() != EXIT_DONE:
            lost.set()
        ended.release()

    for process in processes:
        threading.Thread(target=wait_for, args=(process,), daemon=True).start()
    left = len(processes)
    while left:
        if ended.acquire(timeout=LINGER_SECONDS if lost.is_set() else 1.0):
            left -= 1
        elif lost.is_set():
            for process in processes:
                if process.poll() is None:
                    process.kill()
    return [process.wait() for process in processes]
