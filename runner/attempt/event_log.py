"""The ledger `events.jsonl`: what happened to a run, by all hosts of all attempts."""

import time
from collections.abc import Callable
from typing import Any

from runner.storage import JsonObject, Log
from runner.terminal import warn


class EventLog:
    """Append-only record of what happened, readable while the job runs. Any host may append.

    `on_append` is told each event, step and details too.
    """

    def __init__(
        self,
        log: Log,
        attempt: int,
        process: int,
        on_append: Callable[[str, int | None, JsonObject], None] = lambda event, step, details: None,
    ):
        self._log, self._on_append = log, on_append
        self._attempt = attempt
        self._process = process

    def append(self, event: str, step: int | None, **details: Any) -> None:
        """Record one event at `step` completed steps. A disk that is full costs the record, not the run."""
        row = {"time": time.time(), "attempt": self._attempt, "process": self._process, "event": event, "step": step}
        try:
            self._log.append(row | details)
        except OSError as error:
            warn(f"the ledger cannot be written ({error}): {event} at step {step} {details}")
        self._on_append(event, step, details)
