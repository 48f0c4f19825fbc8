"""The phase and the last completed step of the training thread, which alone writes them. Any thread reads them."""

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
    """The progress of this process.

    Attributes:
        phase: "step" in the loop, else what is done before, between and after steps.
        step: the last one completed.
        since_seconds: when the phase began, or the step was completed.
        awaited_step: set by another thread, which wants to hear of this step at once; None = of none.
        has_arrived: set when the awaited step is completed.
    """

    def __init__(self) -> None:
        self.phase, self.step, self.since_seconds = "start-up", 0, time.monotonic()
        self._gaps_seconds: collections.deque[float] = collections.deque(maxlen=_USUAL_STEPS)
        self.awaited_step: int | None = None
        self.has_arrived = threading.Event()

    def arrive(self, step: int) -> None:
        """Report `step` as the last completed, or the one that the loop begins after. Training thread only."""
        now = time.monotonic()
        if self.phase == "step":
            self._gaps_seconds.append(now - self.since_seconds)
        self.phase, self.step, self.since_seconds = "step", step, now
        if self.awaited_step is not None and step >= self.awaited_step:
            self.awaited_step = None
            self.has_arrived.set()

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Report a phase other than a step, with its own deadline, then again the one before. Training thread only."""
        before = self.phase
        self.phase, self.since_seconds = phase, time.monotonic()
        try:
            yield
        finally:
            self.phase, self.since_seconds = before, time.monotonic()

    def gaps(self) -> list[float]:
        """Seconds that each of the last steps took. Any thread."""
        return list(self._gaps_seconds)

    def deadline_seconds(self, deadlines: Deadlines) -> float:
        """How long the present phase, or step, may take. Any thread."""
        gaps_seconds = self.gaps()
        if self.phase != "step" or not gaps_seconds:
            return deadlines.phase_seconds
        if deadlines.step_seconds is not None:
            return deadlines.step_seconds
        return max(_LEAST_STEP_SECONDS, _STEPS_FACTOR * max(gaps_seconds))
