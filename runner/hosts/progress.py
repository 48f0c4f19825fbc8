"""What the training thread is at: written by that thread alone, at each step and each phase, read by any other."""

import collections
import contextlib
import threading
import time
from collections.abc import Iterator

from runner.spec import Deadlines

_USUAL_STEPS = 64
_STEPS_FACTOR = 20
_LEAST_STEP_SECONDS = 60.0


class Progress:
    """What the training thread is at. Written by that thread alone."""

    def __init__(self) -> None:
        self.doing, self.step, self.since_seconds = "start-up", 0, time.monotonic()
        self._gaps_seconds: collections.deque[float] = collections.deque(maxlen=_USUAL_STEPS)
        self.awaited_step: int | None = None
        self.has_arrived = threading.Event()

    def arrive(self, step: int) -> None:
        """A step is complete, or the first one begins."""
        now = time.monotonic()
        if self.doing == "step":
            self._gaps_seconds.append(now - self.since_seconds)
        self.doing, self.step, self.since_seconds = "step", step, now
        if self.awaited_step is not None and step >= self.awaited_step:
            self.awaited_step = None
            self.has_arrived.set()

    @contextlib.contextmanager
    def during(self, doing: str) -> Iterator[None]:
        """Something other than a step, with its own deadline; afterwards what was before goes on."""
        before = self.doing
        self.doing, self.since_seconds = doing, time.monotonic()
        try:
            yield
        finally:
            self.doing, self.since_seconds = before, time.monotonic()

    def gaps(self) -> list[float]:
        """Seconds between the last arrivals. Any thread."""
        return list(self._gaps_seconds)

    def deadline_seconds(self, deadlines: Deadlines) -> float:
        """How long what the training thread is at may take."""
        gaps_seconds = self.gaps()
        if self.doing != "step" or not gaps_seconds:
            return deadlines.phase_seconds
        if deadlines.step_seconds is not None:
            return deadlines.step_seconds
        return max(_LEAST_STEP_SECONDS, _STEPS_FACTOR * max(gaps_seconds))
