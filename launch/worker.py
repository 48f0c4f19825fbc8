"""One host's part of a job, started again by exit code: `python -m launch.worker SPEC`, on every host of the job.

For engines that hand out machines and restart nothing. The runner finds the other hosts by itself. A signal is for
whoever stops the machine or the job to send to all processes here at once, as systemd does at shutdown: the job hears
it directly, and this process, which forwards nothing, only learns that what ends now is not to be started again. (Were
it forwarded too, the job would hear it twice, and a second signal cuts its last save short.)
"""

import argparse
import signal
import subprocess
import sys
from collections.abc import Sequence

from launch.options import natural, runner_arguments
from launch.supervisor import Supervisor, job_code, newest_step
from runner.errors import EXIT_PREEMPTED, EXIT_RETRYABLE
from runner.process import bind_to_parent, list_stop_signals


def main(arguments: Sequence[str]) -> int:
    """Run this host's part to its end, again after 75 and 76; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m launch.worker", description=__doc__)
    parser.add_argument("spec", metavar="SPEC")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="passed on to the runner")
    parser.add_argument("--max-restarts", type=natural, default=100, metavar="N", help="after 76; default 100")
    parsed = parser.parse_args(arguments)
    command = [sys.executable, *runner_arguments(parsed.spec, parsed.set)]
    signals: list[int] = []
    for number in list_stop_signals():
        signal.signal(number, lambda number, frame: signals.append(number))

    def start() -> int:
        # What holds a lock through an open file, as the engine's script does, holds it until the job itself is gone.
        return job_code([subprocess.run(bind_to_parent(command), close_fds=False, check=False).returncode])

    code, _ = Supervisor(
        start, lambda: newest_step(parsed.spec, parsed.set), lambda: bool(signals), parsed.max_restarts
    ).run()
    # A host that is shut down while its job waits for a peer, or to be started again, is no failure of the job.
    return EXIT_PREEMPTED if signals and code == EXIT_RETRYABLE else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
