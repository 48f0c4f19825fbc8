"""Where the time of a process goes: each second of it in one bucket. Does no I/O.

`TimeBucket` is the table of all buckets and what each means; a process's clock counts those of `COUNTED_BUCKETS`, the
others appear when a run is looked at over all its attempts (`runner.history`).

The phase and the last completed step of the training thread, which alone writes them. Any thread reads them.
"""

import collections
import contextlib
import enum
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple, Protocol, TypeVar

from runner.process import read_age_seconds
from runner.spec import Deadlines


class TimeBucket(enum.Enum):
    """What a second of wall time went into; exactly one each. In the order of an attempt's life.

    The value is the name in files, `meaning` what counts, `index` the place in `COUNTED_BUCKETS`, else -1.
    """

    meaning: str
    index: int

    def __new__(cls, key: str, meaning: str) -> "TimeBucket":
        """A member whose value is `key` alone."""
        member = object.__new__(cls)
        member._value_, member.meaning, member.index = key, meaning, -1
        return member

    GAP = "gap", "No process of the job lived: in a queue, waiting for a machine, or between two attempts."
    PROCESS_START = "process_start", "From the process's creation until it joins the others: Python, imports, the spec."
    DISTRIBUTED_INIT = "distributed_init", "Until all processes of the job have found each other."
    SET_UP = "set_up", "Devices, mesh and data are checked, the directory is claimed."
    COMPILE = "compile", "The train step is traced and compiled, or found in a cache."
    RESTORE = "restore", "A checkpoint is read and its bits are checked, or the state is made anew."
    DATA_WAIT = "data_wait", "The training thread waits for a batch."
    STEPS = "steps", "Steps that are part of the final trajectory: the loop, but for what has a bucket of its own."
    LOST_STEPS = "lost_steps", "Steps that a later attempt has done again, since no save had kept them."
    EVALUATION = "evaluation", "The weights are evaluated, or hooks look at them."
    SAVE_STALL = "save_stall", "Training stands still for a save; what a save does in the background costs nothing."
    SHUTDOWN = "shutdown", "From the last step, or the failure, to the end of the process."
    UNATTRIBUTED = "unattributed", "Nothing is known of it."


_OF_ALL_ATTEMPTS = (TimeBucket.GAP, TimeBucket.LOST_STEPS, TimeBucket.UNATTRIBUTED)
COUNTED_BUCKETS: tuple[TimeBucket, ...] = tuple(bucket for bucket in TimeBucket if bucket not in _OF_ALL_ATTEMPTS)
for _index, _bucket in enumerate(COUNTED_BUCKETS):
    _bucket.index = _index


class ClockReading(NamedTuple):
    """What a clock says at one moment.

    Attributes:
        time: of the reading: Unix seconds at the process's start, and what has passed since by a steady clock.
        step: the last one completed.
        since: when the present phase began or the last step was completed, likewise.
        bucket: of the present moment.
        seconds: by bucket, in the order of `COUNTED_BUCKETS`; they sum to `time` less when the process began.
        code: the exit code that the job has come to, None while it lives.
    """

    time: float
    step: int
    since: float
    bucket: TimeBucket
    seconds: tuple[float, ...]
    code: int | None


class ClockStore(Protocol):
    """Keeps readings where they outlive the process. Neither call may raise, or wait for a network."""

    def put(self, reading: ClockReading) -> None:
        """Called by the training thread at each step and phase."""

    def beat(self, reading: ClockReading) -> None:
        """Called each second or so by another thread, and at the end."""


class Clock:
    """Seconds by bucket of this process. One a process; its training thread moves it, any thread reads it."""

    def __init__(self, age: float = 0.0, bucket: TimeBucket = TimeBucket.SET_UP) -> None:
        now = time.monotonic()
        self.began = time.time() - age
        self._origin_seconds = self.began - (now - age)  # from the steady clock to Unix time
        self._seconds = [0.0] * len(COUNTED_BUCKETS)
        self._bucket, self._since_seconds = bucket, now - age
        self._step, self._moved_seconds = 0, now - age
        self._code: int | None = None
        self._at_step: tuple[float, ...] = tuple(self._seconds)
        self._lock = threading.Lock()
        self._keeper: ClockStore | None = None

    @classmethod
    def since_process_start(cls) -> "Clock":
        """A clock that has run since the process was created."""
        return cls(read_age_seconds(), TimeBucket.PROCESS_START)

    def keep(self, keeper: ClockStore | None) -> None:
        """From now on give each reading to `keeper`; None: to nobody."""
        self._keeper = keeper
        self._put(self.read())

    def enter(self, bucket: TimeBucket, is_kept: bool = True) -> None:
        """From now on time goes into `bucket`. Training thread only; with `is_kept` False the keeper hears it later."""
        with self._lock:
            now = self._count(bucket)
            reading = self._reading(now) if is_kept and self._keeper is not None else None
        self._put(reading)

    def record_step(self, step: int) -> None:
        """`step` is completed, or the one that the loop begins after. Training thread only."""
        with self._lock:
            now = self._count(TimeBucket.STEPS)
            self._step = step
            reading = self._reading(now)
            self._at_step = reading.seconds
        self._put(reading)

    def _count(self, bucket: TimeBucket) -> float:
        """What has passed until now belongs to the bucket that was; the present time."""
        now = time.monotonic()
        self._seconds[self._bucket.index] += now - self._since_seconds
        self._bucket, self._since_seconds, self._moved_seconds = bucket, now, now
        return now

    def _reading(self, now: float) -> ClockReading:
        """What has been counted until `now`, when it was counted last."""
        origin = self._origin_seconds
        moved = self._moved_seconds + origin
        return ClockReading(now + origin, self._step, moved, self._bucket, tuple(self._seconds), self._code)

    def _put(self, reading: ClockReading | None) -> None:
        keeper = self._keeper
        if keeper is not None and reading is not None:
            keeper.put(reading)

    def beat(self) -> bool:
        """Tell the keeper that this process lives; whether that is to be told again. Any thread."""
        keeper, reading = self._keeper, self.read()
        if keeper is None or reading.code is not None:
            return False
        keeper.beat(reading)
        return True

    def end(self, code: int) -> None:
        """The job has come to this exit code; what comes now is its shutdown. Any thread, once or again."""
        with self._lock:
            now = self._count(TimeBucket.SHUTDOWN)
            self._code = code
            keeper, reading = self._keeper, self._reading(now)
        if keeper is not None:
            keeper.beat(reading)

    def read(self) -> ClockReading:
        """What has been counted until now. Any thread."""
        with self._lock:
            now = time.monotonic()
            self._seconds[self._bucket.index] += now - self._since_seconds
            self._since_seconds = now
            return self._reading(now)

    def read_step_seconds(self) -> dict[str, float]:
        """Seconds by bucket's name when the last step was completed, for the ledger; those that are not 0."""
        counted = zip(COUNTED_BUCKETS, self._at_step, strict=True)
        return {bucket.value: round(seconds, 4) for bucket, seconds in counted if seconds >= 0.0001}


_USUAL_STEPS = 64
_STEPS_FACTOR = 20
_LEAST_STEP_SECONDS = 60.0

Batch = TypeVar("Batch")


class Phase(NamedTuple):
    """What a training thread is at: its name in lines for people, and where its time is counted."""

    name: str
    bucket: TimeBucket


START = Phase("start-up", TimeBucket.SET_UP)
SET_UP = Phase("set-up", TimeBucket.SET_UP)
COMPILE = Phase("compile", TimeBucket.COMPILE)
RESTORE = Phase("restore", TimeBucket.RESTORE)
STEP = Phase("step", TimeBucket.STEPS)
DATA = Phase("the wait for data", TimeBucket.DATA_WAIT)
EVALUATION = Phase("evaluation", TimeBucket.EVALUATION)
PROFILE = Phase("profile", TimeBucket.STEPS)
SAVE = Phase("save", TimeBucket.SAVE_STALL)
END = Phase("the end", TimeBucket.SHUTDOWN)


class LocalFailure(NamedTuple):
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
        self.failure: LocalFailure | None = None

    def report_step(self, step: int) -> None:
        """Report `step` as the last completed, or the one that the loop begins after. Training thread only."""
        now = time.monotonic()
        if self.phase == STEP:
            self._gaps_seconds.append(now - self.since_seconds)
        self.since_seconds, self.phase, self.step = now, STEP, step
        self.clock.record_step(step)
        if self.awaited_step is not None and step >= self.awaited_step:
            self.awaited_step = None
            self.has_arrived.set()

    @contextlib.contextmanager
    def report_phase(self, phase: Phase) -> Iterator[None]:
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
    def report_wait(self, phase: Phase, failure: LocalFailure | None) -> Iterator[None]:
        """Report the wait for the others after what every host has tried alone, and how it has failed here, if it has.

        Training thread only.
        """
        if failure is None:
            yield
            return
        with self.report_phase(phase):
            self.failure = failure
            try:
                yield
            finally:
                self.failure = None

    def take_batch(self, batches: Iterator[Batch]) -> Batch:
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

    def get_step_seconds(self) -> list[float]:
        """Seconds that each of the last steps took. Any thread."""
        return list(self._gaps_seconds)

    def deadline_seconds(self, deadlines: "Deadlines") -> float:
        """How long the present phase, or step, may take. Any thread."""
        return self.step_deadline_seconds(deadlines) if self.phase == STEP else deadlines.phase_seconds

    def step_deadline_seconds(self, deadlines: "Deadlines") -> float:
        """How long a step may take. Any thread."""
        gaps_seconds = self.get_step_seconds()
        if not gaps_seconds:
            return deadlines.phase_seconds
        if deadlines.step_seconds is not None:
            return deadlines.step_seconds
        return max(_LEAST_STEP_SECONDS, _STEPS_FACTOR * max(gaps_seconds))
