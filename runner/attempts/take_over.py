"""Take-over of a directory from an attempt that still runs: the line and the question of a start.

The claim of an attempt fences every earlier one. That is what a scheduler needs, which starts a job again when its host
is lost. A person who starts a spec for a second time by mistake would end a healthy run, and lose up to one save
interval. So a start names an attempt that runs, and on a terminal it asks first.
"""

import contextlib
import os
import sys
import time

from runner.attempts.clock_file import SILENT_SECONDS, decode_clock_file, get_clock_file_name
from runner.attempts.fence import Fence
from runner.console import escape_unprintable, format_duration, warn
from runner.errors import InvalidError
from runner.storage import Store


def describe_running_attempt(store: Store) -> str | None:
    """Return the number, place, last sign of life and step of the newest attempt if it seems to run, else None.

    On this machine its process is looked up. Elsewhere a heartbeat in the last half minute counts, so an attempt whose
    host was lost just now still seems to run. Raises `OSError`.
    """
    number = Fence(store).find_newest()
    try:
        clock = decode_clock_file(store.read(get_clock_file_name(number)))
    except (FileNotFoundError, ValueError):  # There is none, or it is damaged.
        return None
    if clock.has_ended or (clock.is_process_alive and clock.pid == os.getpid()):  # the latter: a former job of this one
        return None
    age_seconds = time.time() - clock.reading.time
    if not clock.is_process_alive and abs(age_seconds) >= SILENT_SECONDS:
        return None
    return (
        f"attempt {number} on host {escape_unprintable(clock.host)} (process id {clock.pid}), last sign of life "
        f"{format_duration(max(age_seconds, 0.0))} ago, in step {clock.reading.step}"
    )


def confirm_take_over(store: Store) -> None:
    """Ask on a terminal whether to take over from an attempt that runs. Returns at once if there is nobody to ask.

    Raises `InvalidError` if the answer is not yes.
    """
    with contextlib.suppress(OSError):  # A store that does not answer is reported by the job itself.
        if not _has_terminal() or (other := describe_running_attempt(store)) is None:
            return
        warn(f"{store.url} is in use by {other}. A second start takes the directory over: that attempt stops.")
        # On standard error, like the lines of `warn`: standard output may be a pipe.
        sys.stderr.write("take over? [y/N] ")
        sys.stderr.flush()
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise InvalidError("not taken over; to do it without a question, add --take-over")


def _has_terminal() -> bool:
    """Return True if this process may read from a terminal: a background job that reads is stopped by the kernel."""
    try:
        return sys.stderr.isatty() and os.tcgetpgrp(0) == os.getpgrp()
    except (OSError, AttributeError):
        return False
