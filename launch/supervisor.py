"""Run a job again until it is done: what every engine does with the exit codes.

75 (preempted) is not the job's fault and does not count; 76 (retryable) counts, and is tried again after a pause that
doubles until something is committed. Everything else is the end. A job that fails again and again without a newer
checkpoint is in a crash loop, which no further try mends.

The exit code of a job, from those of its processes.

What the job has written down of itself, read from outside.

Where the time of a job went, in two lines for a person: what `status` says too, under whichever engine.
"""

import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from runner.console import say
from runner.errors import EXIT_DONE, EXIT_FAILED, EXIT_INVALID, EXIT_PREEMPTED, EXIT_RETRYABLE, RunnerError
from runner.history.reader import read_history
from runner.history.records import History
from runner.process import STOP_SIGNALS
from runner.spec import load_document, validate_spec
from runner.storage import Store, iterate_log, open_store

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


def open_directory(spec: str, overrides: Sequence[str]) -> Store:
    """The job's directory. Raises `InvalidError` if the spec is wrong."""
    return open_store(validate_spec(load_document(spec, list(overrides))).directory)


def newest_step(spec: str, overrides: Sequence[str]) -> int | None:
    """The newest step that was committed; None if there is none or it cannot be told: the job itself says why."""
    try:
        rows = iterate_log(open_directory(spec, overrides), "events")
        return max((row["step"] for row in rows if row.get("event") == "commit"), default=None)
    except (RunnerError, OSError):
        return None


def history_of(spec: str, overrides: Sequence[str]) -> History | None:
    """The history of the job; None if it has none or it cannot be read."""
    try:
        return read_history(open_directory(spec, overrides))
    except (RunnerError, OSError):
        return None


def lines(history: History) -> list[str]:
    """For a person."""
    attempts = history.attempts
    ended = ", ".join(f"{count} {state}" for state, count in Counter(each.state.value for each in attempts).items())
    parts = [
        f"{bucket.value.replace('_', ' ')} {value:.1f} s" for bucket, value in history.seconds.items() if value >= 0.05
    ]
    return [
        f"launch: {len(attempts)} attempt{'s' * (len(attempts) != 1)} ({ended}) in {history.wall_seconds:.1f} s, "
        f"{history.lost_steps} step{'s' * (history.lost_steps != 1)} done again, goodput {history.goodput:.1%}",
        f"launch: {', '.join(parts)}",
    ]


FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0
CRASH_LOOP_ATTEMPTS = 5
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class LaunchAttempt:
    """One life of all processes of the job."""

    began: float  # since the epoch, as the ledger's times
    ended: float
    code: int
    newest_step: int | None  # committed when it ended


@dataclass
class Supervisor:
    """Restarts of one job.

    Attributes:
        start: run all processes of the job to their end; the job's exit code.
        newest_step: the newest committed step, None if there is none or it cannot be told.
        is_stopping: whether the user has asked for the end, so that 75 is one.
        max_restarts: how often 76 may be answered by another attempt.
    """

    start: Callable[[], int]
    newest_step: Callable[[], int | None]
    is_stopping: Callable[[], bool]
    max_restarts: int

    def run(self) -> tuple[int, list[LaunchAttempt]]:
        """The exit code of the whole, and all attempts."""
        attempts: list[LaunchAttempt] = []
        num_restarts = num_stuck = 0
        newest = self.newest_step()
        while True:
            began = time.time()
            code = self.start()
            attempts.append(LaunchAttempt(began, time.time(), code, self.newest_step()))
            if code not in (EXIT_PREEMPTED, EXIT_RETRYABLE) or self.is_stopping():
                return code, attempts
            last, newest = newest, attempts[-1].newest_step
            if code == EXIT_PREEMPTED:
                say("launch: preempted; starting again")
                continue
            num_stuck = 1 if newest != last else num_stuck + 1
            if num_stuck >= CRASH_LOOP_ATTEMPTS:
                where = "before any step was committed" if newest is None else f"and step {newest} is still the newest"
                say(f"launch: crash loop: {num_stuck} attempts in a row ended with {code} {where}; not tried again")
                return EXIT_FAILED, attempts
            if num_restarts == self.max_restarts:
                say(f"launch: ended with {code} after {num_restarts} restarts; --max-restarts allows no more")
                return code, attempts
            num_restarts += 1
            pause_seconds = min(FIRST_PAUSE_SECONDS * 2 ** (num_stuck - 1), LONGEST_PAUSE_SECONDS)
            say(f"launch: ended with {code}; restart {num_restarts} of {self.max_restarts} in {pause_seconds:.0f} s")
            if not self._pause(pause_seconds):
                return code, attempts

    def _pause(self, seconds: float) -> bool:
        """Wait, in pieces, so that a signal ends it; whether to go on."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.is_stopping():
            time.sleep(_POLL_SECONDS)
        return not self.is_stopping()
