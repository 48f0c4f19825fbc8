"""The ledger `events.jsonl`, and the fence: which attempt a directory belongs to.

An attempt is one start of the job, on all its hosts. Each attempt claims the next number by creating
`attempts/<number>`, which can succeed only once. Whoever finds a higher number than its own is fenced: it ends and
writes nothing more, so two attempts never share a directory.
"""

import os
import socket
import time
from pathlib import Path
from typing import Any

from runner.errors import FencedError
from runner.storage import append_line, encode_json, publish_new, read_lines
from runner.terminal import warn


class Fence:
    """The single-writer rule of one directory. Main host only, except `attempt`."""

    def __init__(self, directory: Path, attempt: int | None = None):
        self._attempts = directory / "attempts"
        self.attempt = attempt

    def newest(self) -> int:
        """The highest attempt that has claimed the directory, 0 if none has."""
        if not self._attempts.exists():
            return 0
        return max((int(name) for name in os.listdir(self._attempts) if name.isdecimal()), default=0)

    def claim(self) -> int:
        """Take the next attempt number, fencing every earlier attempt."""
        record = encode_json({"time": time.time(), "host": socket.gethostname(), "pid": os.getpid()})
        while True:
            number = self.newest() + 1
            try:
                publish_new(self._attempts / str(number), record)
            except FileExistsError:
                continue
            self.attempt = number
            return number

    def check(self) -> None:
        """Raise `FencedError` if a newer attempt owns the directory."""
        newest = self.newest()
        if newest != self.attempt:
            raise FencedError(f"attempt {newest} has taken over {self._attempts.parent}; attempt {self.attempt} stops")


class Ledger:
    """Append-only record of what happened, readable while the job runs. Any host may append."""

    def __init__(self, directory: Path, attempt: int, process: int):
        self.path = directory / "events.jsonl"
        self._attempt = attempt
        self._process = process

    def append(self, event: str, step: int | None, **details: Any) -> None:
        """Record one event at `step` completed steps. A disk that is full costs the record, not the run."""
        row = {"time": time.time(), "attempt": self._attempt, "process": self._process, "event": event, "step": step}
        try:
            append_line(self.path, row | details)
        except OSError as error:
            warn(f"the ledger cannot be written ({error}): {event} at step {step} {details}")

    def events(self) -> list[dict[str, Any]]:
        """Everything recorded so far, by every attempt."""
        return read_lines(self.path)
