"""Engine `local`: N processes of the job on this machine, on request with simulated CPU devices.

Every process gets the same command as a host of a pod. Their output is merged line by line, with a prefix for each
process; an error with which all of them end is printed once. A signal to this process is forwarded to all of them, and
its death ends them (`runner.process`). After 75 and 76 all are started again together, each in a standby if one waits,
and this process ends with the job's exit code. Idle standbys get no signals. Lines that a standby prints are shown once
it is a process of the job.
"""

import contextlib
import io
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Annotated

import typer

from launch.options import GraceSeconds, LaunchArguments, find_grace_seconds, runner_arguments
from launch.supervisor import (
    ProcessStarter,
    Supervisor,
    combine_exit_codes,
    find_history,
    format_summary,
    read_progress,
)
from runner.attempts.take_over import confirm_take_over
from runner.command_line import TakeOver
from runner.console import say
from runner.errors import EXIT_DONE, EXIT_INVALID, RunnerError
from runner.process import list_stop_signals, make_environment, make_placements, start_process
from runner.spec import CheckpointConfig, load_document, validate_spec
from runner.storage import open_store

_KNOWN_LINES_MAX = 256
LINGER_SECONDS = 30.0  # time for the other processes to end once one has failed
_READ_DEADLINE_SECONDS = 5.0  # for the last lines of a process that has ended


@dataclass(frozen=True, kw_only=True)
class LocalArguments(LaunchArguments):
    """Arguments of `launch local`."""

    processes: Annotated[int, typer.Option(min=1, metavar="N", help="Number of processes.")] = 1
    devices_per_process: Annotated[
        int | None, typer.Option(min=1, metavar="M", help="Fake M CPU devices in each process.")
    ] = None
    grace_seconds: GraceSeconds = None
    is_take_over: TakeOver = False


class MergedOutput:
    """Lines of several processes, each with a prefix."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._printed: dict[str, int] = {}  # process that has printed a line; the newest `_KNOWN_LINES_MAX`

    def copy_lines(self, process: "subprocess.Popen[bytes]", process_id: int) -> None:
        """Print all lines of a process, without last lines that another process has printed too.

        A mistake in the spec or in its data ends every process with the same lines.
        """
        assert process.stdout is not None, "the output of all processes is piped"
        prefix, repeated = f"[{process_id}] ", list[str]()
        for line in io.TextIOWrapper(process.stdout, errors="replace"):
            # A runner of several processes prints the prefix itself.
            text = line.rstrip().removeprefix(prefix)
            # An indented line is part of a stack, which is useful only as a whole.
            if text and not text[0].isspace() and not self._is_first(text, process_id):
                repeated.append(text)
                continue
            for each in (*repeated, text):
                say(f"{prefix}{each}")
            repeated.clear()
        # The end of a preempted or failed process is always printed.
        for each in repeated if process.wait() not in (EXIT_DONE, EXIT_INVALID) else ():
            say(f"{prefix}{each}")

    def _is_first(self, text: str, process_id: int) -> bool:
        """Return False if another process has printed a line lately, and note it otherwise."""
        with self._lock:
            if self._printed.setdefault(text, process_id) != process_id:
                return False
            if len(self._printed) > _KNOWN_LINES_MAX:
                del self._printed[next(iter(self._printed))]
            return True


class LocalProcesses:
    """The processes of one attempt, and the signals to forward to them."""

    def __init__(self, words: Sequence[str], starter: ProcessStarter, grace_seconds: float, standby_seconds: float):
        """Create the object; call `run` for each attempt.

        `words` follow `python` in the command, without placement options. Standbys are started at the age
        `standby_seconds` of an attempt; 0 for never.
        """
        self._words = words
        self._starter = starter
        self._grace_seconds = grace_seconds
        self._standby_seconds = standby_seconds
        self._processes: list[subprocess.Popen[bytes]] = []
        self._have_started = False
        self._postponed: list[int] = []
        self.is_stopping = False

    def forward_quit(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGQUIT, on which each process prints the stacks of its threads and continues."""
        if self._have_started:
            self._signal_all(number)

    def forward_stop(self, number: int, frame: FrameType | None) -> None:
        """Handle a request to stop: forward it, and kill the processes that are alive after the grace period."""
        if not self.is_stopping:
            # The grace period runs from the first request; a repeated one must not extend it.
            killer = threading.Timer(self._grace_seconds, self._signal_all, [signal.SIGKILL])
            killer.daemon = True
            killer.start()
        self.is_stopping = True
        if self._have_started:
            self._signal_all(number)
        else:
            # Every process must get the signal once: a second one would cut its last save short.
            self._postponed.append(number)

    def _signal_all(self, number: int) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def run(self) -> int:
        """Start all processes, wait for all, and return the job's exit code."""
        began_seconds = time.monotonic()
        placements = make_placements(self._starter.num_processes)
        self._processes = [self._starter.start([*self._words, *placement]) for placement in placements]
        output = MergedOutput()
        readers = [
            threading.Thread(target=output.copy_lines, args=(process, process_id), daemon=True)
            for process_id, process in enumerate(self._processes)
        ]
        for reader in readers:
            reader.start()
        self._have_started = True
        # A signal that came while the processes were being started is delivered now.
        while self._postponed:
            self._signal_all(self._postponed.pop(0))

        def keep_standbys() -> None:
            # Once a stop is requested, the job will not be started again.
            if 0 < self._standby_seconds <= time.monotonic() - began_seconds and not self.is_stopping:
                self._starter.start_standbys()

        codes = _wait_for_all(self._processes, keep_standbys)
        self._have_started = False
        for reader in readers:
            reader.join(timeout=_READ_DEADLINE_SECONDS)
        return combine_exit_codes(codes)


def run(arguments: LocalArguments) -> int:
    """Run the job as several processes, restart all after 75 and 76, and return its exit code."""
    spec, overrides = arguments.spec, arguments.overrides
    words = runner_arguments(spec, overrides)
    # Lines must arrive when they are printed: a pipe makes Python buffer them otherwise.
    environment = make_environment(arguments.devices_per_process) | {"PYTHONUNBUFFERED": "1"}
    checkpoint, store = CheckpointConfig(), None
    with contextlib.suppress(RunnerError):  # reported by the job itself
        document = load_document(spec, overrides)
        valid = validate_spec(document)
        checkpoint, store = valid.checkpoint, open_store(valid.directory)
    if store is not None and not arguments.is_take_over:
        confirm_take_over(store)
    grace_seconds = find_grace_seconds(arguments.grace_seconds, checkpoint)
    starter = ProcessStarter(
        arguments.processes,
        environment,
        lambda command, variables, inherited: start_process(command, variables, subprocess.PIPE, inherited),
    )
    processes = LocalProcesses(words, starter, grace_seconds, arguments.standby_seconds)
    for number in list_stop_signals():
        signal.signal(number, processes.forward_stop)
    signal.signal(signal.SIGQUIT, processes.forward_quit)
    supervisor = Supervisor(
        processes.run,
        lambda: read_progress(spec, overrides),
        lambda: processes.is_stopping,
        arguments.max_restarts,
    )
    code, num_attempts = supervisor.run()
    starter.stop_standbys()
    # The last line of a job with a single attempt already contains everything.
    history = find_history(spec, overrides) if num_attempts > 1 else None
    for line in [] if history is None else format_summary(history):
        say(line)
    return code


def _wait_for_all(processes: Sequence["subprocess.Popen[bytes]"], keep_standbys: Callable[[], None]) -> list[int]:
    """Wait for all processes; once one has failed, the others get `LINGER_SECONDS` before they are killed.

    `keep_standbys` is called about once a second while all of them run.
    """
    ended = threading.Semaphore(0)
    has_failed = threading.Event()

    def wait_for(process: "subprocess.Popen[bytes]") -> None:
        if process.wait() != EXIT_DONE:
            has_failed.set()
        ended.release()

    for process in processes:
        threading.Thread(target=wait_for, args=(process,), daemon=True).start()
    num_left = len(processes)
    while num_left:
        # A failure must be noticed while this thread waits, so the wait is short until there is one.
        if ended.acquire(timeout=LINGER_SECONDS if has_failed.is_set() else 1.0):
            num_left -= 1
        elif has_failed.is_set():
            for process in processes:
                if process.poll() is None:
                    process.kill()
        elif num_left == len(processes):
            keep_standbys()
    return [process.wait() for process in processes]
