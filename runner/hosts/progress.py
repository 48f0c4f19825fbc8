"""The phase and the last completed step of the training thread, which alone writes them. Any thread reads them."""

import collections
import contextlib
import threading
import time
from collections.abc import Iterator
from typing import TypeVar

from runner.spec import Deadlines

_USUAL_STEPS = 64
_STEPS_FACTOR = 20
_LEAST_STEP_SECONDS = 60.0
STEP, DATA = "step", "the wait for data"

Batch = TypeVar("Batch")


class Progress:
    """The progress of this process.

    Attributes:
        phase: STEP in the loop, else what is done before, between and after steps.
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
        if self.phase == STEP:
            self._gaps_seconds.append(now - self.since_seconds)
        self.since_seconds, self.phase, self.step = now, STEP, step
        if self.awaited_step is not None and step >= self.awaited_step:
            self.awaited_step = None
            self.has_arrived.set()

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Report a phase other than a step, with its own deadline, then again the one before. Training thread only."""
        before = self.phase
        self._enter(phase, time.monotonic())
        try:
            yield
        finally:
            self._enter(before, time.monotonic())

    def take(self, batches: Iterator[Batch]) -> Batch:
        """The next of `batches`. Reports that this host waits for it, which is no part of a step's time.

        A bucket may be down for minutes: what reads it has deadlines of its own. Training thread only.
        """
        step_since_seconds, began_seconds = self.since_seconds, time.monotonic()
        self._enter(DATA, began_seconds)
        try:
            return next(batches)
        finally:
            self._enter(STEP, step_since_seconds + time.monotonic() - began_seconds)

    def _enter(self, phase: str, since_seconds: float) -> None:
        """The time first: another thread must not see a step that is as old as the phase before it."""
        self.since_seconds, self.phase = since_seconds, phase

    def gaps(self) -> list[float]:
        """Seconds that each of the last steps took. Any thread."""
        return list(self._gaps_seconds)

    def deadline_seconds(self, deadlines: Deadlines) -> float:
        """How long the present phase, or step, may take. Any thread."""
        return self.step_deadline_seconds(deadlines) if self.phase == STEP else deadlines.phase_seconds

    def step_deadline_seconds(self, deadlines: Deadlines) -> float:
        """How long a step may take. Any thread."""
        gaps_seconds = self.gaps()
        if not gaps_seconds:
            return deadlines.phase_seconds
        if deadlines.step_seconds is not None:
            return deadlines.step_seconds
        return max(_LEAST_STEP_SECONDS, _STEPS_FACTOR * max(gaps_seconds))
