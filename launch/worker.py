"""The part of one host in a job, restarted by exit code: `python -m launch.worker SPEC`, on every host of the job.

For engines that provide machines or containers and restart nothing in them, so that a restart costs no new machine. The
runner finds the other hosts by itself, or by the options that give it its place.

Signals. Whoever stops a machine sends the signal to all its processes at once, as systemd does at shutdown. So the job
gets it directly, and this process only learns that the end of the job is final. If it forwarded the signal, the job
would get it twice, and a second signal cuts its last save short. In a container only the first process gets the signal,
which is this one: with `--forward-signals` it sends it on.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from launch.options import LaunchArguments, MaxRestarts, runner_arguments
from launch.supervisor import Supervisor, combine_exit_codes, find_newest_attempt, find_newest_step, is_job_done
from runner.command_line import CommandLine, Coordinator, NumProcesses, ProcessId, validate_placement
from runner.console import protect_streams, warn
from runner.errors import EXIT_PREEMPTED, EXIT_RETRYABLE, InvalidError
from runner.process import bind_to_parent, list_stop_signals


@dataclass(frozen=True, kw_only=True)
class WorkerArguments(LaunchArguments):
    """Arguments of `python -m launch.worker`."""

    max_restarts: MaxRestarts = 100
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
        if self.coordinator is None:
            return []
        job = ["--coordinator", self.coordinator, "--num-processes", str(self.num_processes)]
        return [*job, "--process-id", str(self.process_id)]


_POLL_SECONDS = 0.05
_COMMAND = "SPEC"
_COMMANDS = CommandLine("launch.worker", "launch-worker", "Run one host's part of a job.", "", default=_COMMAND)
_COMMANDS.add(
    _COMMAND,
    WorkerArguments,
    "Run one host's part of a job, and restart it",
    "those of the job: 0 done, 1 failed, 2 invalid, 75 preempted, 76 retryable after all restarts.",
)


def main(words: Sequence[str]) -> int:
    """Run this host's part of the job to its end, restart it after 75 and 76, and return its exit code."""
    try:
        arguments = _COMMANDS.parse([_COMMAND, *words])
    except InvalidError as error:
        warn(str(error))
        return error.exit_code
    assert isinstance(arguments, WorkerArguments)
    command = [sys.executable, *runner_arguments(arguments.spec, arguments.overrides), *arguments.placement]
    signals: list[int] = []
    for number in list_stop_signals():
        # The handler only notes the signal, so that the job gets each of them once: forwarded below, or its own.
        signal.signal(number, lambda number, frame: signals.append(number))

    def start() -> int:
        # The job inherits open files: a lock that the engine's script holds lasts until the job itself has ended.
        process = subprocess.Popen(bind_to_parent(command), close_fds=False)
        num_forwarded = 0
        while arguments.forward_signals and process.poll() is None:
            for number in signals[num_forwarded:]:
                process.send_signal(number)
                num_forwarded += 1
            time.sleep(_POLL_SECONDS)
        return combine_exit_codes([process.wait()])

    spec, overrides = arguments.spec, arguments.overrides
    supervisor = Supervisor(
        start,
        lambda: find_newest_step(spec, overrides),
        lambda: bool(signals),
        arguments.max_restarts,
        lambda: find_newest_attempt(spec, overrides),
        lambda: is_job_done(spec, overrides),
    )
    code, _ = supervisor.run()
    # A host that is shut down while its job waits for a peer, or for its restart, is not a failure of the job.
    return EXIT_PREEMPTED if signals and code == EXIT_RETRYABLE else code


if __name__ == "__main__":
    protect_streams()
    sys.exit(main(sys.argv[1:]))
