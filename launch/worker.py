"""The part of one host in a job, restarted by exit code: `python -m launch.worker SPEC`, on every host of the job.

For engines that provide machines and restart nothing. The runner finds the other hosts by itself.

Whoever stops the machine or the job sends the signal to all processes of the host at once, as systemd does at shutdown.
So the job gets it directly, and this process only learns that the end of the job is final. If it forwarded the signal,
the job would get it twice, and a second signal cuts its last save short.
"""

import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from launch.options import LaunchArguments, MaxRestarts, runner_arguments
from launch.supervisor import Supervisor, combine_exit_codes, find_newest_step
from runner.command_line import CommandLine
from runner.console import protect_streams, warn
from runner.errors import EXIT_PREEMPTED, EXIT_RETRYABLE, InvalidError
from runner.process import bind_to_parent, list_stop_signals


@dataclass(frozen=True, kw_only=True)
class WorkerArguments(LaunchArguments):
    """Arguments of `python -m launch.worker`."""

    max_restarts: MaxRestarts = 100


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
    command = [sys.executable, *runner_arguments(arguments.spec, arguments.overrides)]
    signals: list[int] = []
    for number in list_stop_signals():
        # The handler only notes the signal: the job has got its own, and the supervisor looks here before it restarts.
        signal.signal(number, lambda number, frame: signals.append(number))

    def start() -> int:
        # The job inherits open files: a lock that the engine's script holds lasts until the job itself has ended.
        return combine_exit_codes([subprocess.run(bind_to_parent(command), close_fds=False, check=False).returncode])

    supervisor = Supervisor(
        start,
        lambda: find_newest_step(arguments.spec, arguments.overrides),
        lambda: bool(signals),
        arguments.max_restarts,
    )
    code, _ = supervisor.run()
    # A host that is shut down while its job waits for a peer, or for its restart, is not a failure of the job.
    return EXIT_PREEMPTED if signals and code == EXIT_RETRYABLE else code


if __name__ == "__main__":
    protect_streams()
    sys.exit(main(sys.argv[1:]))
