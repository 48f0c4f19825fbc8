"""Wall-time accounting of one process, and the progress of its training thread. Does no I/O.

Every second of a run belongs to exactly one `TimeCategory`. The clock of a process counts the categories in
`COUNTED_CATEGORIES`; the others depend on several attempts and are computed by `runner.history`.

The training thread alone writes `Progress`: its phase and its last completed step. Any thread may read it.
"""

import collections
import contextlib
import enum
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from runner.errors import EXIT_DONE
from runner.process import read_age_seconds

if TYPE_CHECKING:  # a command line starts its clock before it knows whether it needs specs, which take 0.3 s to import
    from runner.spec import Deadlines


class TimeCategory(enum.Enum):
    """Use of a second of wall time, in the order of an attempt's life. The value is its name in files."""

    meaning: str  # one sentence for the documentation
    index: int  # position in `COUNTED_CATEGORIES`, or -1 if the category is not counted by a clock

    def __new__(cls, key: str, meaning: str) -> "TimeCategory":
        """Create a member whose value is `key` alone."""
        member = object.__new__(cls)
        member._value_, member.meaning, member.index = key, meaning, -1
        return member

    GAP = "gap", "No process of the job is alive: queued, waiting for a machine, or between two attempts."
    PROCESS_START = "process_start", "From the creation of the process to its rendezvous: Python, imports, the spec."
    DISTRIBUTED_INIT = "distributed_init", "Rendezvous of all processes of the job."
    SET_UP = "set_up", "Devices, mesh and data are checked, and the directory is claimed."
    COMPILE = "compile", "The train step is traced and compiled, or loaded from a cache."
    RESTORE = "restore", "A checkpoint is read and verified, or the state is initialized."
    DATA_WAIT = "data_wait", "The training thread waits for a batch."
    STEPS = "steps", "Steps of the final trajectory: the training loop without the categories above and below."
    LOST_STEPS = "lost_steps", "Steps that a later attempt repeated, because no save contained them."
    EVALUATION = "evaluation", "Evaluators and hooks run."
    SAVE_STALL = "save_stall", "Training is blocked by a save. The background part of a save is not counted."
    SHUTDOWN = "shutdown", "From the last step, or the failure, to the end of the process."
    UNATTRIBUTED = "unattributed", "Nothing is recorded about this time."


_CATEGORIES_ACROSS_ATTEMPTS = (TimeCategory.GAP, TimeCategory.LOST_STEPS, TimeCategory.UNATTRIBUTED)
COUNTED_CATEGORIES: tuple[TimeCategory, ...] = tuple(
    category for category in TimeCategory if category not in _CATEGORIES_ACROSS_ATTEMPTS
)
for _index, _category in enumerate(COUNTED_CATEGORIES):
    _category.index = _index


_CLOCK_JUMP_SECONDS = 5.0  # smaller differences from the wall clock are those of a clock that is slewed


class ClockReading(NamedTuple):
    """State of a clock at one moment."""

    # Unix seconds of the reading: the wall clock at process start plus the elapsed monotonic time, and the time for
    # which the machine was suspended.
    time: float
    step: int
    since: float  # start of the current phase, or completion of the last step; measured like `time`
    category: TimeCategory
    # Seconds by category, as in `COUNTED_CATEGORIES`; they sum to the age of the process at `time`, less the time for
    # which the machine was suspended.
    seconds: tuple[float, ...]
    code: int | None  # the exit code of the job, or None while it is running


class ClockStore(Protocol):
    """Persistent storage for clock readings. Its methods may neither raise nor wait for a network."""

    def put(self, reading: ClockReading) -> None:
        """Store a reading. The training thread calls this at each step and each phase."""

    def put_heartbeat(self, reading: ClockReading) -> None:
        """Store a reading from a background thread, about once a second and at the end of the job."""


class Clock:
    """Seconds by category of this process. Its training thread switches the category; any thread may read it."""

    def __init__(self, age: float = 0.0, category: TimeCategory = TimeCategory.SET_UP) -> None:
        now = time.monotonic()
        self.began = time.time() - age
        # Added to a monotonic time this gives Unix seconds, so that a step of the wall clock cannot distort a category.
        self._origin_seconds = self.began - (now - age)
        self._seconds = [0.0] * len(COUNTED_CATEGORIES)
        self._category, self._since_seconds = category, now - age
        self._step, self._moved_seconds = 0, now - age
        self._code: int | None = None
        # A save records the time until its step, not until the moment of the save.
        self._seconds_at_step: tuple[float, ...] = tuple(self._seconds)
        self._lock = threading.Lock()
        self._store: ClockStore | None = None

    @classmethod
    def since_process_start(cls) -> "Clock":
        """Return a clock that includes the time since the process was created."""
        return cls(read_age_seconds(), TimeCategory.PROCESS_START)

    @property
    def age_seconds(self) -> float:
        """Monotonic time since `began`."""
        return time.monotonic() + self._origin_seconds - self.began

    def attach_store(self, store: ClockStore | None) -> None:
        """Send each further reading to `store`, or to nothing if it is None."""
        self._store = store
        if store is not None:
            store.put(self.read())

    def enter(self, category: TimeCategory, is_stored: bool = True) -> None:
        """Count time in `category` from now on. Training thread only.

        If not `is_stored`, the store learns of it with the next reading.
        """
        with self._lock:
            now = self._switch_category(category)
            reading = self._make_reading(now)
        if is_stored:
            self._put(reading)

    def record_step(self, step: int) -> None:
        """Record that `step` is completed, or that the loop starts after it. Training thread only."""
        with self._lock:
            now = self._switch_category(TimeCategory.STEPS)
            self._step = step
            reading = self._make_reading(now)
            self._seconds_at_step = reading.seconds
        self._put(reading)

    def _switch_category(self, category: TimeCategory) -> float:
        """Count the time until now in the previous category, switch to `category`, and return the monotonic time."""
        now = time.monotonic()
        self._seconds[self._category.index] += now - self._since_seconds
        self._category, self._since_seconds, self._moved_seconds = category, now, now
        return now

    def _make_reading(self, now: float) -> ClockReading:
        origin = self._origin_seconds
        moved = self._moved_seconds + origin
        return ClockReading(now + origin, self._step, moved, self._category, tuple(self._seconds), self._code)

    def _put(self, reading: ClockReading) -> None:
        # Outside the lock: a slow disk must not block the thread that sends heartbeats.
        store = self._store
        if store is not None:
            store.put(reading)

    def send_heartbeat(self) -> bool:
        """Store a reading as a heartbeat, and return False if no more are needed. Any thread.

        The wall clock of a machine goes on while it is suspended, unlike the monotonic one. Times of readings follow a
        wall clock that jumps ahead, or readers would take the process for stalled; no category counts the jump. They do
        not follow one that is set back, because the newest of the stored readings is the one with the latest time.
        """
        with self._lock:
            jump_seconds = time.time() - (time.monotonic() + self._origin_seconds)
            if jump_seconds > _CLOCK_JUMP_SECONDS:
                self._origin_seconds += jump_seconds
        store, reading = self._store, self.read()
        if store is None or reading.code is not None:
            return False
        store.put_heartbeat(reading)
        return True

    def end(self, code: int) -> None:
        """Record the exit code of the job; later time counts as shutdown. Any thread, may be called again."""
        with self._lock:
            now = self._switch_category(TimeCategory.SHUTDOWN)
            self._code = code
            store, reading = self._store, self._make_reading(now)
        if store is not None:
            store.put_heartbeat(reading)

    def begin_next_job(self) -> None:
        """End the job with 0, and count the time of another job of this process from now on, without a store."""
        self.end(EXIT_DONE)
        new = Clock()
        # In place, since others hold this clock: the command, which ends it, and the notice of a stop.
        with self._lock:
            self.began, self._origin_seconds = new.began, new._origin_seconds
            self._seconds, self._seconds_at_step = new._seconds, new._seconds_at_step
            self._category, self._since_seconds = new._category, new._since_seconds
            self._step, self._moved_seconds = 0, new._moved_seconds
            self._code = self._store = None

    def read(self) -> ClockReading:
        """Return the reading at this moment. Any thread."""
        with self._lock:
            now = time.monotonic()
            self._seconds[self._category.index] += now - self._since_seconds
            self._since_seconds = now
            return self._make_reading(now)

    def read_step_seconds(self) -> dict[str, float]:
        """Return the nonzero seconds by category name at the completion of the last step, for the event ledger."""
        counted = zip(COUNTED_CATEGORIES, self._seconds_at_step, strict=True)
        return {category.value: round(seconds, 4) for category, seconds in counted if seconds >= 0.0001}


_RECENT_STEPS = 64
# A step is overdue after 20 times the longest recent step, but never before a minute.
STEP_DEADLINE_FACTOR = 20
MIN_STEP_DEADLINE_SECONDS = 60.0

Item = TypeVar("Item")


class Phase(NamedTuple):
    """Activity of a training thread: its name in messages, and the category in which its time is counted."""

    name: str
    category: TimeCategory


START = Phase("start-up", TimeCategory.SET_UP)
SET_UP = Phase("set-up", TimeCategory.SET_UP)
COMPILE = Phase("compile", TimeCategory.COMPILE)
RESTORE = Phase("restore", TimeCategory.RESTORE)
STEP = Phase("step", TimeCategory.STEPS)
DATA = Phase("the wait for data", TimeCategory.DATA_WAIT)
EVALUATION = Phase("evaluation", TimeCategory.EVALUATION)
PROFILE = Phase("profile", TimeCategory.STEPS)
SAVE = Phase("save", TimeCategory.SAVE_STALL)
END = Phase("the end", TimeCategory.SHUTDOWN)


class LocalFailure(NamedTuple):
    """Failure on this process alone, while it waits to learn whether the other processes failed too.

    The others may be inside a collective that needs this process and therefore never returns.
    """

    line: str
    is_end: bool  # True if the failure ends the job, whatever the others report


class Progress:
    """Phase and last completed step of the training thread of this process."""

    def __init__(self, clock: Clock | None = None) -> None:
        # The phase is STEP inside the loop. It began, or the last step was completed, at this monotonic time.
        self.phase, self.step, self.since_seconds = START, 0, time.monotonic()
        self.clock = Clock() if clock is None else clock
        self.clock.enter(START.category)
        self._step_seconds: collections.deque[float] = collections.deque(maxlen=_RECENT_STEPS)
        self.awaited_step: int | None = None  # whose completion another thread wants to learn of at once
        self.has_arrived = threading.Event()  # set when the awaited step is completed
        self.failure: LocalFailure | None = None  # on this process alone
        self.describe_wait: Callable[[], str] = str  # what this process waits for in a user's code; empty if nothing

    def report_step(self, step: int) -> None:
        """Report that `step` is completed, or that the loop starts after it. Training thread only."""
        now = time.monotonic()
        if self.phase == STEP:
            self._step_seconds.append(now - self.since_seconds)
        self.since_seconds, self.phase, self.step = now, STEP, step
        self.clock.record_step(step)
        if self.awaited_step is not None and step >= self.awaited_step:
            self.awaited_step = None
            self.has_arrived.set()

    @contextlib.contextmanager
    def report_phase(self, phase: Phase) -> Iterator[None]:
        """Report `phase` inside the context, and the previous phase again after it. Training thread only.

        Each of the two has a deadline of its own, which starts when it is entered.
        """
        previous = self.phase
        self._enter(phase, time.monotonic())
        self.clock.enter(phase.category)
        try:
            yield
        finally:
            self._enter(previous, time.monotonic())
            self.clock.enter(previous.category)

    @contextlib.contextmanager
    def report_wait(self, phase: Phase, failure: LocalFailure | None) -> Iterator[None]:
        """Report the wait for the other processes after each has called user code, such as an evaluator or a hook.

        If the call failed only here, the others may hang in a collective inside it. The watchdog then reports
        `failure` as the reason, and `phase` as the phase of this process. Training thread only.
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

    def take_batch(self, batches: Iterator[Item]) -> Item:
        """Return the next batch, and report the wait for it. Training thread only.

        The wait does not count towards the deadline of the step: storage may be down for minutes, and the reader of
        the data has deadlines of its own.
        """
        step_since_seconds, wait_since_seconds = self.since_seconds, time.monotonic()
        self._enter(DATA, wait_since_seconds)
        self.clock.enter(DATA.category, is_stored=False)
        try:
            return next(batches)
        finally:
            self.clock.enter(STEP.category, is_stored=False)
            self._enter(STEP, step_since_seconds + time.monotonic() - wait_since_seconds)

    def _enter(self, phase: Phase, since_seconds: float) -> None:
        # The time is written first, so that another thread never sees the new phase with the age of the previous one.
        self.since_seconds, self.phase = since_seconds, phase

    def get_step_seconds(self) -> list[float]:
        """Return the durations of the most recent steps. Any thread."""
        return list(self._step_seconds)

    def deadline_seconds(self, deadlines: "Deadlines") -> float:
        """Return the longest permitted duration of the current phase or step. Any thread."""
        return self.step_deadline_seconds(deadlines) if self.phase == STEP else deadlines.phase_seconds

    def step_deadline_seconds(self, deadlines: "Deadlines") -> float:
        """Return the longest permitted duration of a step. Any thread."""
        step_seconds = self.get_step_seconds()
        if not step_seconds:
            return deadlines.phase_seconds
        if deadlines.step_seconds is not None:
            return deadlines.step_seconds
        return max(MIN_STEP_DEADLINE_SECONDS, STEP_DEADLINE_FACTOR * max(step_seconds))
