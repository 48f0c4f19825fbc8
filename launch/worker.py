"""Process of a job on one host, restarted by exit code: `python -m launch.worker SPEC`, on every host of the job.

For engines that provide machines or containers, but do not restart processes in them. A restart then needs no new
machine. The runner finds the other hosts by itself, or by the placement options.

Signals. A machine that is stopped sends the signal to all processes at once, as systemd does at shutdown. So the job
gets the signal directly, and this process only notes that the end of the job is final. If it forwarded the signal, the
job would get it twice, and a second signal cuts its last save short. In a container only the first process gets the
signal, which is this one: with `--forward-signals` it sends it on.

Standby. While the job runs, this process keeps another one that waits to replace it (`launch.supervisor`).
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from launch.options import LaunchArguments, runner_arguments
from launch.supervisor import ProcessStarter, Supervisor, combine_exit_codes, read_progress
from runner.command_line import CommandLine, Coordinator, NumProcesses, ProcessId, validate_placement
from runner.console import protect_streams, say, warn
from runner.errors import EXIT_PREEMPTED, EXIT_RETRYABLE, InvalidError
from runner.process import bind_to_parent, format_placement, list_stop_signals


@dataclass(frozen=True, kw_only=True)
class WorkerArguments(LaunchArguments):
    """Arguments of `python -m launch.worker`."""

    forward_signals: Annotated[
        bool,
        typer.Option("--forward-signals", help="Send signals on to the job, where only this process gets them."),
    ] = False
    coordinator: Coordinator = None
    num_processes: NumProcesses = None
    process_id: ProcessId = None

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_placement(self.coordinator, self.num_processes, self.process_id)

    @property
    def placement(self) -> list[str]:
        """Words that give the runner its place in the job; none if it finds that by itself."""
        if self.coordinator is None or self.num_processes is None or self.process_id is None:
            return []
        return format_placement(self.coordinator, self.num_processes, self.process_id)


_POLL_SECONDS = 0.1
_COMMAND = "SPEC"
_COMMANDS = CommandLine("launch.worker", "launch-worker", "Run one host's part of a job.", "", default=_COMMAND)
_COMMANDS.add(
    _COMMAND,
    WorkerArguments,
    "Run one host's part of a job, and restart it",
    "those of the job: 0 done, 1 failed, 2 invalid, 75 preempted, 76 retryable after all restarts.",
)


def main(given: Sequence[str]) -> int:
    """Run this host's part of the job to its end, restart it after 75 and 76, and return its exit code."""
    try:
        arguments = _COMMANDS.parse([_COMMAND, *given])
    except InvalidError as error:
        warn(str(error))
        return error.exit_code
    assert isinstance(arguments, WorkerArguments)
    words = [*runner_arguments(arguments.spec, arguments.overrides), *arguments.placement]
    signals: list[int] = []
    for number in list_stop_signals():
        # The handler only notes the signal, so that the job gets each of them once: forwarded below, or its own.
        signal.signal(number, lambda number, frame: signals.append(number))

    # The job prints its stacks at this signal, which a terminal sends to both.
    signal.signal(signal.SIGQUIT, lambda number, frame: None)

    def spawn(
        command: Sequence[str], variables: Mapping[str, str], inherited: Sequence[int]
    ) -> "subprocess.Popen[bytes]":
        # The job inherits open files: a lock that the engine's script holds lasts until the job itself has ended.
        for descriptor in inherited:
            os.set_inheritable(descriptor, True)
        return subprocess.Popen(bind_to_parent(command), env=variables, stdin=subprocess.DEVNULL, close_fds=False)

    starter = ProcessStarter(1, os.environ, spawn)

    def start() -> int:
        try:
            process = starter.start(words)
        except OSError as error:
            say(f"launch: the job cannot be started: {error}")
            return EXIT_RETRYABLE
        num_forwarded, began_seconds = 0, time.monotonic()
        while process.poll() is None:
            for number in signals[num_forwarded:] if arguments.forward_signals else []:
                process.send_signal(number)
                num_forwarded += 1
            if 0 < arguments.standby_seconds <= time.monotonic() - began_seconds and not signals:
                starter.start_standbys()
            time.sleep(_POLL_SECONDS)
        return combine_exit_codes([process.returncode])

    supervisor = Supervisor(
        start,
        lambda: read_progress(arguments.spec, arguments.overrides),
        lambda: bool(signals),
        arguments.max_restarts,
        has_peers=True,
    )
    code, _ = supervisor.run()
    starter.stop_standbys()
    # If a host is shut down while its job waits for a peer or a restart, the job has not failed.
    return EXIT_PREEMPTED if signals and code == EXIT_RETRYABLE else code


if __name__ == "__main__":
    protect_streams()
    sys.exit(main(sys.argv[1:]))
