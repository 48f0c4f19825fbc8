"""The phase and the last completed step of the training thread, which alone writes them. Any thread reads them."""

import collections
import contextlib
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple, TypeVar

from runner.hosts.clock import Bucket, Clock
from runner.spec import Deadlines

_USUAL_STEPS = 64
_STEPS_FACTOR = 20
_LEAST_STEP_SECONDS = 60.0

Batch = TypeVar("Batch")


class Phase(NamedTuple):
    """What a training thread is at: its name in lines for people, and where its time is counted."""

    name: str
    bucket: Bucket


START = Phase("start-up", Bucket.SET_UP)
SET_UP = Phase("set-up", Bucket.SET_UP)
COMPILE = Phase("compile", Bucket.COMPILE)
RESTORE = Phase("restore", Bucket.RESTORE)
STEP = Phase("step", Bucket.STEPS)
DATA = Phase("the wait for data", Bucket.DATA_WAIT)
EVALUATION = Phase("evaluation", Bucket.EVALUATION)
PROFILE = Phase("profile", Bucket.STEPS)
SAVE = Phase("save", Bucket.SAVE_STALL)
END = Phase("the end", Bucket.SHUTDOWN)


class Failure(NamedTuple):
    """What has failed on this host alone, while it waits for the others to say whether it has there too.

    They may be in a program over all devices, where they wait for this host for ever. With `is_end` the job ends by
    it, whatever they say.
    """

    line: str
    is_end: bool


class Progress:
    """The progress of this process.

    Attributes:
        phase: STEP in the loop, else what is done before, between and after steps.
        clock: counts the time of each phase.
        step: the last one completed.
        since_seconds: when the phase began, or the step was completed.
        awaited_step: set by another thread, which wants to hear of this step at once; None = of none.
        has_arrived: set when the awaited step is completed.
        failure: None while nothing has failed here.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.phase, self.step, self.since_seconds = START, 0, time.monotonic()
        self.clock = Clock() if clock is None else clock
        self.clock.enter(START.bucket)
        self._gaps_seconds: collections.deque[float] = collections.deque(maxlen=_USUAL_STEPS)
        self.awaited_step: int | None = None
        self.has_arrived = threading.Event()
        self.failure: Failure | None = None

    def arrive(self, step: int) -> None:
        """Report `step` as the last completed, or the one that the loop begins after. Training thread only."""
        now = time.monotonic()
        if self.phase == STEP:
            self._gaps_seconds.append(now - self.since_seconds)
        self.since_seconds, self.phase, self.step = now, STEP, step
        self.clock.arrive(step)
        if self.awaited_step is not None and step >= self.awaited_step:
            self.awaited_step = None
            self.has_arrived.set()

    @contextlib.contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Report a phase other than a step, with its own deadline, then again the one before. Training thread only."""
        before = self.phase
        self._enter(phase, time.monotonic())
        self.clock.enter(phase.bucket)
        try:
            yield
        finally:
            self._enter(before, time.monotonic())
            self.clock.enter(before.bucket)

    @contextlib.contextmanager
    def awaiting(self, phase: Phase, failure: Failure | None) -> Iterator[None]:
        """Report the wait for the others after what every host has tried alone, and how it has failed here, if it has.

        Training thread only.
        """
        if failure is None:
            yield
            return
        with self.during(phase):
            self.failure = failure
            try:
                yield
            finally:
                self.failure = None

    def take(self, batches: Iterator[Batch]) -> Batch:
        """The next of `batches`. Reports that this host waits for it, which is no part of a step's time.

        A bucket may be down for minutes: what reads it has deadlines of its own. Training thread only.
        """
        step_since_seconds, began_seconds = self.since_seconds, time.monotonic()
        self._enter(DATA, began_seconds)
        self.clock.enter(DATA.bucket, is_kept=False)
        try:
            return next(batches)
        finally:
            self.clock.enter(STEP.bucket, is_kept=False)
            self._enter(STEP, step_since_seconds + time.monotonic() - began_seconds)

    def _enter(self, phase: Phase, since_seconds: float) -> None:
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
