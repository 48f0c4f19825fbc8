"""Supervisor of a job: restarts by exit code, until the job is done.

75 (preempted) is not the job's fault and does not count. 76 (retryable) counts, and is retried with exponential
backoff; both start over when something is committed. Everything else ends the job. A job that fails again and again
without a newer checkpoint is in a crash loop, which retries cannot fix.

A supervisor may run a single host of the job, which waits for the others at each start. An attempt that ends before the
job has claimed its directory then does not count towards a crash loop, because a host is missing or the directory
cannot be reached. A host that fails when the job is already done is not started again, because the other hosts would
not join.

The supervisor reads a job's progress from `progress.json` in the job's directory.

While an attempt runs, a supervisor keeps a standby for each of its processes: a process that has imported what the job
needs and waits for its command line (`runner.cli.run`). A restart uses it, and does not wait for interpreter and
imports.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from runner.attempts.layout import DamagedRecordError
from runner.attempts.progress_file import read_progress_file
from runner.console import say
from runner.errors import EXIT_DONE, EXIT_FAILED, EXIT_INVALID, EXIT_PREEMPTED, EXIT_RETRYABLE, RunnerError
from runner.history.reader import open_text_stores, read_history
from runner.history.records import History
from runner.process import STANDBY_BYTES, STANDBY_VARIABLE, STOP_SIGNALS, read_free_memory_bytes
from runner.spec import Document, load_document, validate_spec
from runner.storage import Store, open_store, parse_number

FIRST_PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 60.0
CRASH_LOOP_ATTEMPTS = 5
_POLL_SECONDS = 0.1
_MIN_SHOWN_SECONDS = 0.05
# Signals with an external cause: those that arrived before the process had installed its handlers, or that cannot be
# handled; and SIGABRT, by which JAX ends a process that has lost its coordinator.
_EXTERNAL_DEATHS = {-number for number in (*STOP_SIGNALS, signal.SIGQUIT, signal.SIGKILL, signal.SIGABRT)}


def combine_exit_codes(codes: Sequence[int]) -> int:
    """Return the exit code of a job from those of its processes; a negative code means death by a signal.

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


def _open_job_store(document: Document) -> Store:
    """Open the directory of a job. Raises `InvalidError` if the spec is wrong."""
    return open_store(validate_spec(document).directory)


class JobProgress(NamedTuple):
    """Progress of a job, as its directory shows it."""

    newest_step: int | None = None  # step of the last commit; None if it is not known
    # Number of the newest attempt, after those of the jobs that tokenise its text; 0 if there is none, None if the
    # directory cannot be read.
    newest_attempt: int | None = None
    is_done: bool = False  # True if the newest attempt has reached the end of this spec
    # When the job, and those that tokenise its text, have last committed a save, in Unix seconds. It may be a save of a
    # step to which the run has gone back.
    commits: frozenset[float] = frozenset()
    takes_part: bool = True  # False if the newest attempt is one of an elastic job without this host


def read_progress(spec: str, overrides: Sequence[str]) -> JobProgress:
    """Return the progress of a job. An error is not reported here, since the job itself reports it.

    Attempts and commits of the jobs that tokenise its text first are counted too.
    """
    try:
        document = load_document(spec, list(overrides))
        store, digest = _open_job_store(document), document.compute_digest()
        own = _read_store_progress(store, digest)
        texts = [_read_store_progress(text, digest) for text in open_text_stores(store)]
    except (RunnerError, OSError):
        return JobProgress()
    return own._replace(
        newest_attempt=sum(each.newest_attempt or 0 for each in (own, *texts)),
        commits=own.commits.union(*(each.commits for each in texts)),
        takes_part=own.takes_part if own.newest_attempt else all(each.takes_part for each in texts),
    )


def _read_store_progress(store: Store, digest: str) -> JobProgress:
    """Return the progress that one directory shows, with two requests to a bucket: every host has a supervisor.

    `digest` is that of the spec with which a run is done.

    Raises:
        OSError: the directory cannot be read.
        RunnerError: as for `OSError`, with a reason.
    """
    claims = [number for number in map(parse_number, store.list_names("attempts")) if number is not None]
    try:
        record = read_progress_file(store)
    except DamagedRecordError:  # the next start writes it again
        record = None
    if record is None:
        return JobProgress(None, max(claims, default=0))
    # A claim without a record is of an attempt that has ended before its start.
    newest = max([record["attempt"], *claims])
    is_newest, hosts, committed = record["attempt"] == newest, record["hosts"], record["committed"]
    return JobProgress(
        record["step"],
        newest,
        is_newest and record["done"] == digest,
        frozenset([] if committed is None else [committed]),
        not is_newest or hosts is None or socket.gethostname() in hosts,
    )


def find_history(spec: str, overrides: Sequence[str]) -> History | None:
    """Return the history of a job, or None if it has none or the directory cannot be read."""
    try:
        return read_history(_open_job_store(load_document(spec, list(overrides))))
    except (RunnerError, OSError):
        return None


def format_summary(history: History) -> list[str]:
    """Return two lines about the attempts of a job and where their time went."""
    attempts = history.attempts
    states = ", ".join(f"{count} {state}" for state, count in Counter(each.state.value for each in attempts).items())
    times = [
        f"{category.value.replace('_', ' ')} {value:.1f} s"
        for category, value in history.seconds.items()
        if value >= _MIN_SHOWN_SECONDS
    ]
    return [
        f"launch: {len(attempts)} attempt{'s' * (len(attempts) != 1)} ({states}) in {history.wall_seconds:.1f} s, "
        f"{history.lost_steps} step{'s' * (history.lost_steps != 1)} repeated, goodput {history.goodput:.1%}",
        f"launch: {', '.join(times)}",
    ]


@dataclass
class ProcessStarter:
    """Starts the processes of a job on this machine, and keeps a standby for each of them.

    A standby has the environment and the open files of the process that it replaces, because one function starts both.
    Standbys end with the thread that has started them, and when `stop_standbys` is called.
    """

    num_processes: int  # number of processes on this machine
    variables: Mapping[str, str]  # environment of all of them
    # Function that starts a command with an environment and lets it inherit file descriptors.
    spawn: "Callable[[Sequence[str], Mapping[str, str], Sequence[int]], subprocess.Popen[bytes]]"
    # Each with the pipe to it.
    _standbys: "list[tuple[subprocess.Popen[bytes], int]]" = field(default_factory=list, init=False)
    _is_refused: bool = field(default=False, init=False)

    def start(self, words: Sequence[str]) -> "subprocess.Popen[bytes]":
        """Return a process that runs `python WORDS`, which are `-m runner` and its arguments.

        The process is a standby if one waits, else a new one.

        Raises:
            OSError: no process can be started.
        """
        while self._standbys:
            process, sender = self._standbys.pop(0)
            try:
                with os.fdopen(sender, "wb") as pipe:
                    pipe.write(json.dumps({"words": words[2:], "variables": {}}).encode() + b"\n")
            # The standby was killed, for example by the kernel because memory ran out.
            except BrokenPipeError:
                process.communicate()
                continue
            return process
        return self.spawn([sys.executable, *words], self.variables, ())

    def start_standbys(self) -> None:
        """Start the standbys, unless they exist, failed to start before, or would take memory that the job may need."""
        if self._standbys or self._is_refused:
            return
        free_bytes, needed_bytes = read_free_memory_bytes(), self.num_processes * STANDBY_BYTES
        if free_bytes is None or free_bytes < needed_bytes:
            free = "an unknown amount" if free_bytes is None else f"{free_bytes / 2**30:.2f} GiB"
            self._refuse(f"{free} of memory is free, needs {needed_bytes / 2**30:.0f} GiB")
            return
        try:
            for _ in range(self.num_processes):
                receiver, sender = os.pipe()
                try:
                    variables = {**self.variables, STANDBY_VARIABLE: str(receiver)}
                    process = self.spawn([sys.executable, "-m", "runner"], variables, [receiver])
                except OSError:
                    os.close(sender)
                    raise
                finally:
                    os.close(receiver)
                self._standbys.append((process, sender))
        # A limit on processes or open files, or no memory: the job continues without standbys.
        except OSError as error:
            self._refuse(str(error))

    def stop_standbys(self) -> None:
        """End all standbys, and wait for them."""
        while self._standbys:
            process, sender = self._standbys.pop()
            os.close(sender)
            process.kill()
            process.communicate()

    def _refuse(self, reason: str) -> None:
        say(f"launch: no standby process: {reason}")
        self._is_refused = True
        self.stop_standbys()


@dataclass
class Supervisor:
    """Restarts of one job."""

    start: Callable[[], int]  # function that runs all processes of the job to their end and returns the job's exit code
    read_progress: Callable[[], JobProgress]  # function that returns the progress of the job
    # Function that returns True once the user has asked the job to stop, so that 75 is final.
    is_stopping: Callable[[], bool]
    max_restarts: int  # number of restarts after 76 without a commit between them
    has_peers: bool = False  # True if this is the supervisor of one host of several

    def run(self) -> tuple[int, int]:
        """Run the job until it is done, and return its exit code and the number of attempts."""
        num_attempts = num_restarts = num_stuck = num_crashes = 0
        # Commits and attempts of earlier launches do not count as progress of this launch.
        progress = self.read_progress()
        seen = progress.commits
        while True:
            num_attempts += 1
            code = self.start()
            before, progress = progress, self.read_progress()
            # A job that was asked to stop ends with 75 too, and must not be started again.
            if code not in (EXIT_PREEMPTED, EXIT_RETRYABLE) or self.is_stopping():
                return code, num_attempts
            if self.has_peers and progress.is_done:
                return EXIT_DONE, num_attempts
            if code == EXIT_PREEMPTED:
                # Neither counted nor delayed, because the job has saved its state.
                say("launch: preempted; starting again")
                continue
            # A new commit shows that the job makes progress, which resets all counts and the backoff.
            newest, has_commits = progress.newest_step, not progress.commits <= seen
            seen |= progress.commits
            has_new_attempt = progress.takes_part and progress.newest_attempt != before.newest_attempt
            has_claimed = not self.has_peers or has_new_attempt
            if has_commits:
                num_restarts = num_stuck = num_crashes = 0
            if has_commits and not has_claimed:
                # An elastic job runs without this host, which may wait for as long as it takes.
                say(f"launch: ended with {code}; the job goes on without this host, which tries to join it again")
                if not self._pause(FIRST_PAUSE_SECONDS):
                    return code, num_attempts
                continue
            num_stuck += 1
            num_crashes += has_claimed
            if num_crashes >= CRASH_LOOP_ATTEMPTS:
                where = "before any step was committed" if newest is None else f"and step {newest} is still the newest"
                say(f"launch: crash loop: {num_crashes} attempts in a row ended with {code} {where}; giving up")
                return EXIT_FAILED, num_attempts
            if num_restarts == self.max_restarts:
                reason = f"after {num_restarts} restarts without a commit; --max-restarts allows no more"
                say(f"launch: ended with {code} {reason}")
                return code, num_attempts
            num_restarts += 1
            pause_seconds = min(FIRST_PAUSE_SECONDS * 2 ** (num_stuck - 1), MAX_PAUSE_SECONDS)
            say(f"launch: ended with {code}; restart {num_restarts} of {self.max_restarts} in {pause_seconds:.0f} s")
            if not self._pause(pause_seconds):
                return code, num_attempts

    def _pause(self, seconds: float) -> bool:
        """Sleep in short pieces, so that a signal ends the pause, and return True if the job may continue."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.is_stopping():
            time.sleep(_POLL_SECONDS)
        return not self.is_stopping()
