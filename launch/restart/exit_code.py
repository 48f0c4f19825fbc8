"""The exit code of a job, from those of its processes."""

import signal
from collections.abc import Sequence

from runner.errors import EXIT_DONE, EXIT_FAILED, EXIT_INVALID, EXIT_PREEMPTED, EXIT_RETRYABLE
from runner.process import STOP_SIGNALS

# Deaths that come from outside: by those who stop a process before it has learnt to listen, or kill it; and SIGABRT, by
# which JAX ends a process that has lost its coordinator.
_FROM_OUTSIDE = {-number for number in (*STOP_SIGNALS, signal.SIGQUIT, signal.SIGKILL, signal.SIGABRT)}


def job_code(codes: Sequence[int]) -> int:
    """The job's exit code from those of its processes; a negative one is death by a signal.

    The most telling wins: what a person must see before what a retry mends, and that before success.
    """
    known = [
        code if code in (0, 1, 2, 75, 76) else EXIT_RETRYABLE if code in _FROM_OUTSIDE else EXIT_FAILED
        for code in codes
    ]
    for code in (EXIT_FAILED, EXIT_INVALID, EXIT_RETRYABLE, EXIT_PREEMPTED):
        if code in known:
            return code
    return EXIT_DONE
