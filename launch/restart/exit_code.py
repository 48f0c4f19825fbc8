"""The exit code of a job, from those of its processes."""

from collections.abc import Sequence

from runner.errors import EXIT_DONE, EXIT_FAILED, EXIT_INVALID, EXIT_PREEMPTED, EXIT_RETRYABLE


def job_code(codes: Sequence[int]) -> int:
    """The job's exit code from those of its processes; a negative one is death by a signal.

    The most telling wins: what a person must see before what a retry mends, and that before success.
    """
    known = [code if code in (0, 1, 2, 75) else EXIT_RETRYABLE if code in (-9, -6, -15, 76) else 1 for code in codes]
    for code in (EXIT_FAILED, EXIT_INVALID, EXIT_RETRYABLE, EXIT_PREEMPTED):
        if code in known:
            return code
    return EXIT_DONE
