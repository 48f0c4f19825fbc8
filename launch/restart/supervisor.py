"""Run a job again until it is done: what every engine does with the exit codes.

75 (preempted) is not the job's fault and does not count; 76 (retryable) counts, and is tried again after a pause that
doubles until something is committed. Everything else is the end. A job that fails again and again without a newer
checkpoint is in a crash loop, which no further try mends.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from runner.errors import EXIT_FAILED, EXIT_PREEMPTED, EXIT_RETRYABLE
from runner.terminal import say

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0
CRASH_LOOP_ATTEMPTS = 5
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Attempt:
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

    def run(self) -> tuple[int, list[Attempt]]:
        """The exit code of the whole, and all attempts."""
        attempts: list[Attempt] = []
        num_restarts = num_stuck = 0
        newest = self.newest_step()
        while True:
            began = time.time()
            code = self.start()
            attempts.append(Attempt(began, time.time(), code, self.newest_step()))
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
