"""Supervisor of a job: restarts by exit code, until the job is done.

75 (preempted) is not the job's fault and does not count. 76 (retryable) counts, and is retried with exponential backoff
that starts over when something is committed. Everything else ends the job. A job that fails again and again without a
newer checkpoint is in a crash loop, which retries cannot fix.

A supervisor may have one host of the job, which waits for the others at each start. An attempt that ends before the job
has claimed its directory is then no part of a crash loop: a host is missing, or the directory cannot be reached. And a
host that dies in the last moment of the job is not started again, because the others would not come.

The supervisor reads a job's progress from the job's directory.
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
from runner.storage import JsonObject, Store, iterate_log, open_store, parse_number

FIRST_PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 60.0
CRASH_LOOP_ATTEMPTS = 5
_POLL_SECONDS = 0.1
_MIN_SHOWN_SECONDS = 0.05
# Deaths with an external cause: a signal that came before the process had installed its handlers, or that cannot be
# handled; and SIGABRT, by which JAX ends a process that has lost its coordinator.
_EXTERNAL_DEATHS = {-number for number in (*STOP_SIGNALS, signal.SIGQUIT, signal.SIGKILL, signal.SIGABRT)}


def combine_exit_codes(codes: Sequence[int]) -> int:
    """Return the exit code of a job from those of its processes; a negative one is death by a signal.

    Codes that need a person take precedence over codes that a restart fixes, and both over success.
    """
    known = [
        code if code in (0, 1, 2, 75, 76) else EXIT_RETRYABLE if code in _EXTERNAL_DEATHS else EXIT_FAILED
        for code in codes
    ]
    for code in (EXIT_FAILED, EXIT_INVALID, EXIT_RETRYABLE, EXIT_PREEMPTED):
        if code in known:
            return code
    return EXIT_DONE


def open_job_store(spec: str, overrides: Sequence[str]) -> Store:
    """Open the directory of a job. Raises `InvalidError` if the spec is wrong."""
    return open_store(validate_spec(load_document(spec, list(overrides))).directory)


def find_newest_step(spec: str, overrides: Sequence[str]) -> int | None:
    """Return the newest committed step, or None if there is none or the directory cannot be read.

    An error is not reported here, since the job itself reports it.
    """
    # The ledger is one file to read, where listing checkpoints costs a request for each in a bucket.
    commits = [row for row in _read_events(spec, overrides) if row["event"] == "commit"]
    return max((row["step"] for row in commits if type(row.get("step")) is int), default=None)


def is_job_done(spec: str, overrides: Sequence[str]) -> bool:
    """Return True if the newest attempt of a job has reached its end; False too if the directory cannot be read."""
    rows = _read_events(spec, overrides)
    newest = max((row["attempt"] for row in rows), default=None)
    return any(row["event"] == "done" and row["attempt"] == newest for row in rows)


def _read_events(spec: str, overrides: Sequence[str]) -> list[JsonObject]:
    """Return the events of a job that name their attempt; none if the directory cannot be read."""
    try:
        rows = iterate_log(open_job_store(spec, overrides), "events")
        return [row for row in rows if type(row.get("attempt")) is int and isinstance(row.get("event"), str)]
    except (RunnerError, OSError):
        return []


def find_newest_attempt(spec: str, overrides: Sequence[str]) -> int | None:
    """Return the number of the newest attempt, or None if the directory cannot be read. Errors are not reported."""
    try:
        numbers = map(parse_number, open_job_store(spec, overrides).list_names("attempts"))
        return max((number for number in numbers if number is not None), default=0)
    except (RunnerError, OSError):
        return None


def find_history(spec: str, overrides: Sequence[str]) -> History | None:
    """Return the history of a job, or None if it has none or the directory cannot be read."""
    try:
        return read_history(open_job_store(spec, overrides))
    except (RunnerError, OSError):
        return None


def format_summary(history: History) -> list[str]:
    """Return two lines about the attempts of a job and where their time went."""
    attempts = history.attempts
    states = ", ".join(f"{count} {state}" for state, count in Counter(each.state.value for each in attempts).items())
    times = [
        f"{bucket.value.replace('_', ' ')} {value:.1f} s"
        for bucket, value in history.seconds.items()
        if value >= _MIN_SHOWN_SECONDS
    ]
    return [
        f"launch: {len(attempts)} attempt{'s' * (len(attempts) != 1)} ({states}) in {history.wall_seconds:.1f} s, "
        f"{history.lost_steps} step{'s' * (history.lost_steps != 1)} repeated, goodput {history.goodput:.1%}",
        f"launch: {', '.join(times)}",
    ]


@dataclass(frozen=True)
class LaunchAttempt:
    """One start of all processes of a job.

    Attributes:
        began: time of the start, in Unix seconds like the times of the event ledger.
        ended: time when the last process had ended.
        code: exit code of the job.
        newest_step: newest step that was committed at the end.
    """

    began: float
    ended: float
    code: int
    newest_step: int | None


@dataclass
class Supervisor:
    """Restarts of one job.

    Attributes:
        start: function that runs all processes of the job to their end and returns the job's exit code.
        find_newest_step: function that returns the newest committed step, None if it is not known.
        is_stopping: function that returns True once the user has asked for the end, so that 75 is final.
        max_restarts: number of restarts after 76.
        find_newest_attempt: function that returns the newest attempt that has claimed the directory, for one host of
            several; None if attempts that claim nothing count as crashes too.
        is_done: function that returns True if the job has reached its end, whatever became of the process.
    """

    start: Callable[[], int]
    find_newest_step: Callable[[], int | None]
    is_stopping: Callable[[], bool]
    max_restarts: int
    find_newest_attempt: Callable[[], int | None] | None = None
    is_done: Callable[[], bool] = lambda: False

    def run(self) -> tuple[int, list[LaunchAttempt]]:
        """Run the job until it is done, and return its exit code and all attempts."""
        attempts: list[LaunchAttempt] = []
        num_restarts = num_stuck = num_crashes = 0
        # A job that resumes has commits and attempts of earlier launches, which are no progress of this one.
        newest = self.find_newest_step()
        claimed = None if self.find_newest_attempt is None else self.find_newest_attempt()
        while True:
            began = time.time()
            code = self.start()
            attempts.append(LaunchAttempt(began, time.time(), code, self.find_newest_step()))
            # A job that was asked to stop ends with 75 too, and must not be started again.
            if code not in (EXIT_PREEMPTED, EXIT_RETRYABLE) or self.is_stopping():
                return code, attempts
            if self.is_done():
                return EXIT_DONE, attempts
            previous, newest = newest, attempts[-1].newest_step
            if code == EXIT_PREEMPTED:
                # Neither counted nor delayed: the job has saved, and did nothing wrong.
                say("launch: preempted; starting again")
                continue
            # A new commit shows that the job makes progress, which resets crash loop and backoff.
            num_stuck = 1 if newest != previous else num_stuck + 1
            num_crashes = 0 if newest != previous else num_crashes
            before, claimed = claimed, None if self.find_newest_attempt is None else self.find_newest_attempt()
            num_crashes += self.find_newest_attempt is None or before != claimed
            if num_crashes >= CRASH_LOOP_ATTEMPTS:
                where = "before any step was committed" if newest is None else f"and step {newest} is still the newest"
                say(f"launch: crash loop: {num_crashes} attempts in a row ended with {code} {where}; giving up")
                return EXIT_FAILED, attempts
            if num_restarts == self.max_restarts:
                say(f"launch: ended with {code} after {num_restarts} restarts; --max-restarts allows no more")
                return code, attempts
            num_restarts += 1
            pause_seconds = min(FIRST_PAUSE_SECONDS * 2 ** (num_stuck - 1), MAX_PAUSE_SECONDS)
            say(f"launch: ended with {code}; restart {num_restarts} of {self.max_restarts} in {pause_seconds:.0f} s")
            if not self._pause(pause_seconds):
                return code, attempts

    def _pause(self, seconds: float) -> bool:
        """Sleep in short pieces, so that a signal ends the pause, and return True if the job may continue."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.is_stopping():
            time.sleep(_POLL_SECONDS)
        return not self.is_stopping()
