"""Watchdog: ends a job that is stalled because a process crashed, hangs or is frozen, and reports stragglers.

The training thread reports its phase and its last completed step (`clock.Progress`). The watchdog's thread only reads
and publishes them, so its heartbeat never hides that the training thread hangs.

1. Each second every process publishes a heartbeat through the job's key-value store: the phase and step of its training
   thread, when the phase began, and whether it is overdue. It also reads the diagnosis, if there is one. In a job
   of more than 1,024 processes the period is longer (`Periods`), so that the work of process 0 does not grow.
2. Process 0 reads all heartbeats. A process whose heartbeat stays the same for `LOST_SECONDS` is frozen or
   disconnected. A crashed process is noticed at once by its peer socket (`agreement.Liveness`).
3. If a process is lost or overdue, process 0 writes the diagnosis: a line that names it and its phase. While a process
   waits for its data, a long step of the others causes no diagnosis.
4. On a diagnosis every process calls `on_diagnosis` and ends with exit code 76. At most 8 processes, first those that
   are overdue, record the diagnosis and the stacks of their threads, so that the record does not grow with the job.
   A process that cannot reach process 0 any more decides alone. If process 0 is frozen, calls to it do not return, so
   the other processes watch the time since their last exchange on a second thread.
5. An attempt that is fenced ends on every process with the message and the exit code of that: process 0 sends them
   before it ends, and each process that ends for another reason asks the directory first.
6. A failure on one process alone (in a hook or an evaluator) is published in the same way, before any deadline, and
   every process prints it. If the failure ends the job, the diagnosis has exit code 1 and follows soon.

A straggler is a process that is alive but completes its steps late:

1. From time to time process 0 begins a round: it publishes a step that is about two seconds ahead.
2. Every process reports when its training thread has completed that step, under the number of the round.
3. Process 0 records when each report arrives, by its own clock. A collective makes all devices wait for the slowest,
   but it does not delay the report of a fast host.
4. A process that is later than the others in two consecutive rounds is reported.
"""

import collections
import contextlib
import math
import socket
import statistics
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import jax

from runner.console import warn
from runner.distributed import key_value
from runner.distributed.agreement import Hosts, format_processes
from runner.distributed.clock import DATA, STEP, Clock, Progress
from runner.distributed.preemption import end_process
from runner.errors import EXIT_FAILED, EXIT_RETRYABLE, FencedError, PeerLostError, RunnerError, format_error
from runner.nvidia import FAULT, classify_gpu_error
from runner.spec import Deadlines

# Times of a job of at most `_MAX_BEATS_PER_SECOND` processes; `Periods` has those of larger ones.
# A heartbeat is sent and read once a second, so a frozen process is noticed at most three seconds later: within the
# 30 s of .github/docs/processes.md.
LOST_SECONDS = 27.0
_SUSPECTED_LOST_SECONDS = 5.0  # instead of LOST_SECONDS once a collective has failed on any process
_UNREACHABLE_SECONDS = 5.0  # of the coordinator
_POLL_SECONDS = 1.0
_ARRIVAL_POLL_SECONDS = 0.02
_MAX_BEATS_PER_SECOND = 1024  # that process 0 reads; with two more calls of each process it takes half a CPU core
_MAX_ARRIVALS_PER_SECOND = 20_000  # that process 0 reads while it waits for arrivals
_CALLBACK_SECONDS = 5.0  # for a callback
_DELIVERY_SECONDS = 3.0  # in which every process reads the diagnosis
_DIAGNOSIS_SECONDS = 30.0  # in which a failed collective is traced to a lost peer
_MAX_REPORT_BEATS = 60  # between two calls of `on_progress`; the first ones follow sooner
_MAX_RECORDERS = 8  # processes that record a diagnosis
_MAX_NAMED = 8  # processes of one kind that a diagnosis describes one by one
# Time from a failure that ends the job to the end of the processes that do not notice it by themselves.
LOCAL_FAILURE_SECONDS = 10.0
# The other processes normally reach the same point within this time; after it the failure counts as local.
_COMMON_FAILURE_SECONDS = 2.0
_ROUND_SECONDS = 10.0
_LEAD_SECONDS = 2.5
# A process straggles if it is later than the median by more than both of these.
_STRAGGLING_SECONDS = 0.1
_STRAGGLING_STEPS = 0.1


@dataclass(frozen=True)
class Periods:
    """Times of the exchange with process 0, see the constants of the same names.

    A large job uses longer periods, so that the work of process 0 does not grow with the number of processes. A frozen
    process is noticed within 30 s in a job of up to 5,000 processes.
    """

    poll_seconds: float
    arrival_poll_seconds: float
    lost_seconds: float
    suspected_lost_seconds: float
    unreachable_seconds: float
    delivery_seconds: float
    round_seconds: float
    lead_seconds: float
    straggling_seconds: float

    @classmethod
    def choose(cls, num_processes: int) -> "Periods":
        """Return the times of a job of so many processes."""
        stretch = max(num_processes / _MAX_BEATS_PER_SECOND, 1.0)
        poll_seconds, added_seconds = stretch * _POLL_SECONDS, (stretch - 1) * _POLL_SECONDS
        arrival_poll_seconds = max(_ARRIVAL_POLL_SECONDS, num_processes / _MAX_ARRIVALS_PER_SECOND)
        return cls(
            poll_seconds,
            arrival_poll_seconds,
            lost_seconds=max(LOST_SECONDS - 3 * added_seconds, min(LOST_SECONDS, 3 * poll_seconds)),
            suspected_lost_seconds=_SUSPECTED_LOST_SECONDS + 2 * added_seconds,
            unreachable_seconds=_UNREACHABLE_SECONDS + 2 * added_seconds,
            delivery_seconds=_DELIVERY_SECONDS + added_seconds,
            round_seconds=stretch * _ROUND_SECONDS,
            lead_seconds=stretch * _LEAD_SECONDS,
            straggling_seconds=max(_STRAGGLING_SECONDS, 2 * arrival_poll_seconds),
        )


# Heartbeats and their diagnosis.


@dataclass(frozen=True)
class Heartbeat:
    """Report of one process, sent every second."""

    number: int  # grows by one each second. A process whose number stays the same is frozen or disconnected.
    host: str  # name of its machine
    phase: str  # phase of its training thread
    step: int  # last completed step of its training thread
    seconds: float  # time since that thread entered the phase, or completed the step
    is_overdue: bool  # True if that is longer than the deadline of the phase or step
    suspects_peer: bool  # True if a collective has failed there
    failure: str = ""  # message of a failure there alone, while it waits for the others; empty if there is none
    is_end: bool = False  # True if that failure ends the job
    waits_for: str = ""  # call of a user's code that has not returned yet; empty if there is none


class Diagnosis(NamedTuple):
    """Message from process 0 to every process.

    `code` is the exit code to end with, or None for a warning. `recorders` are the processes that record the line. The
    causes are `lost`, processes that have died or do not respond, or else `late`, those for which the others wait.
    """

    line: str
    code: int | None
    recorders: Sequence[int] = ()
    lost: Sequence[int] = ()
    late: Sequence[int] = ()


Ending = tuple[str, int]  # line and exit code with which a process ends


def find_failure(beats: Mapping[int, Heartbeat]) -> Diagnosis | None:
    """Return the diagnosis of a failure of some processes alone, or None if there is none.

    Those processes wait for the others, which may be inside a collective that never returns, so the failure is
    announced without waiting for a deadline. If the failure ends the job, the processes end after
    `LOCAL_FAILURE_SECONDS`. Otherwise the wait lasts until the deadline of its phase, because the others may be doing
    slow work.
    """
    failed = {
        process: beat for process, beat in beats.items() if beat.failure and beat.seconds >= _COMMON_FAILURE_SECONDS
    }
    others = [process for process, beat in beats.items() if not beat.failure]
    if not failed or not others:
        return None
    first, others_name = failed[min(failed)], _format_processes(others)
    if first.is_end and first.seconds >= LOCAL_FAILURE_SECONDS:
        return Diagnosis(
            f"{first.failure}; {others_name} did not finish the same call within {first.seconds:.0f} s", EXIT_FAILED
        )
    return Diagnosis(f"{first.failure}; waiting for {others_name} to finish the same call", None)


def has_overdue(beats: Collection[Heartbeat], seconds_since_data: float, step_deadline_seconds: float) -> bool:
    """Return True if a process is overdue for another reason than a wait for data.

    While one process waits for data, and for the duration of a step after that, every process is late.
    """
    is_data_ready = seconds_since_data > step_deadline_seconds
    return any(beat.is_overdue and (is_data_ready or beat.phase != STEP.name) for beat in beats)


def find_unresponsive(
    quiet_seconds: Mapping[int, float], limit_seconds: float, departures: Mapping[int, int], crashed: Collection[int]
) -> dict[int, str]:
    """Return the processes that are gone or frozen, each with a description.

    These are processes without a new heartbeat for `limit_seconds`, and those that disconnected without leaving.
    Processes that exited cleanly left their exit codes; the others get the same time to follow them.
    """
    silent = {process: seconds for process, seconds in quiet_seconds.items() if seconds > limit_seconds}
    found = {process: f"has not responded for {seconds:.0f} s" for process, seconds in silent.items()}
    found |= {
        process: f"has exited with code {code}, see its own output"
        for process, code in departures.items()
        if process in silent
    }
    return found | dict.fromkeys(crashed, "has died")


def find_late(beats: Mapping[int, Heartbeat], unresponsive: Collection[int]) -> list[int]:
    """Return the overdue processes for which others wait; none if a process is unresponsive, or all are equally far.

    A hang of one process makes the others overdue too, which wait for it inside of a later step.
    """
    if unresponsive or not beats:
        return []
    places = {process: (beat.step, beat.phase == STEP.name) for process, beat in beats.items()}
    return [
        process for process in sorted(beats) if beats[process].is_overdue and places[process] < max(places.values())
    ]


def choose_recorders(beats: Mapping[int, Heartbeat], unresponsive: Collection[int]) -> list[int]:
    """Return the processes that record a diagnosis: up to `_MAX_RECORDERS`, first those that may be its cause."""
    living = [process for process in sorted(beats) if process not in unresponsive]
    living.sort(key=lambda process: not (beats[process].is_overdue or beats[process].failure))
    return sorted(living[:_MAX_RECORDERS])


def format_diagnosis(beats: dict[int, Heartbeat], unresponsive: dict[int, str]) -> str:
    """Return one line on a stalled job: unresponsive processes, then overdue ones, then the phases of the others."""
    parts = []
    lost = sorted(unresponsive)
    for process in lost[:_MAX_NAMED]:
        beat = beats.get(process)
        last_seen = "" if beat is None else f", last seen {_format_phase(beat)}"
        parts.append(f"{_format_processes([process], beat)} {unresponsive[process]}{last_seen}")
    if lost[_MAX_NAMED:]:
        parts.append(f"{_format_processes(lost[_MAX_NAMED:])} did not respond either")
    groups: dict[tuple[bool, str], list[int]] = collections.defaultdict(list)
    for process, beat in sorted(beats.items()):
        if process not in unresponsive:
            groups[not beat.is_overdue, _format_phase(beat)].append(process)
    for (is_in_time, phase), processes in sorted(groups.items()):
        beat = beats[processes[0]]
        is_single = len(processes) == 1
        name, verb = _format_processes(processes, beat if is_single else None), "is" if is_single else "are"
        parts.append(f"{name} {verb} {phase} for {beat.seconds:.0f} s{'' if is_in_time else ', past the deadline'}")
    waits = [(process, beat.waits_for) for process, beat in sorted(beats.items()) if beat.waits_for][:_MAX_NAMED]
    parts += [f"on process {process} {text}" if len(beats) > 1 else text for process, text in waits]
    parts += [beat.failure for _, beat in sorted(beats.items()) if beat.failure][:_MAX_NAMED]
    return "the job cannot continue: " + "; ".join(parts)


def _format_processes(processes: Sequence[int], beat: Heartbeat | None = None) -> str:
    return format_processes(processes) + (f" ({beat.host})" if beat is not None else "")


def _format_phase(beat: Heartbeat) -> str:
    """Return the phase and the step; inside the loop, the step in progress is the one after the last completed."""
    return f"in step {beat.step + 1}" if beat.phase == STEP.name else f"in {beat.phase} at step {beat.step}"


# Stragglers.


@dataclass(frozen=True)
class StragglerReport:
    """Change in the set of straggling processes."""

    step: int  # the step at which arrivals were measured
    processes: list[int]  # the processes that straggled in two consecutive rounds; empty if all are on time again
    after_seconds: list[float]  # arrival of every process at `step`, after the first one


class StragglerDetector:
    """Rounds in which every process reports its arrival at one step. Used by the watchdog's thread, on every process.

    No method waits for another process. Each may raise `PeerLostError`.
    """

    def __init__(self, hosts: Hosts, progress: Progress):
        self._hosts, self._progress, self._periods = hosts, progress, Periods.choose(hosts.num_processes)
        self._number = 0
        self._step = 0
        self._next_round_seconds = time.monotonic() + self._periods.round_seconds
        self._has_reported = True
        self._arrivals_seconds: dict[int, float] | None = None  # by process, on the clock of process 0
        self._last_stragglers: set[int] = set()
        self._reported_stragglers: list[int] = []

    @property
    def is_open(self) -> bool:
        """True on process 0 while it waits for arrivals."""
        return self._arrivals_seconds is not None

    def update_round(self) -> None:
        """Begin a round if one is due (process 0), or take the step of the round that process 0 began."""
        if not self._hosts.is_main:
            number, step = self._hosts.store.try_get(key_value.ROUND) or [0, 0]
            if number > self._number:
                self._join_round(number, step)
            return
        step_seconds = self._progress.get_step_seconds()
        if self.is_open or time.monotonic() < self._next_round_seconds or not step_seconds:
            return
        self._next_round_seconds = time.monotonic() + self._periods.round_seconds
        # Every process must read the step before it reaches it, and reads once in `poll_seconds`.
        num_steps_ahead = 1 + int(self._periods.lead_seconds / max(statistics.median(step_seconds), 1e-4))
        self._arrivals_seconds = {}
        # The processes may have run another job before; rounds of that job must be ignored.
        earlier, _ = self._hosts.store.try_get(key_value.ROUND) or [0, 0]
        self._join_round(max(earlier, self._number) + 1, self._progress.step + num_steps_ahead)
        self._hosts.store.set(key_value.ROUND, [self._number, self._step])

    def _join_round(self, number: int, step: int) -> None:
        self._number, self._step, self._has_reported = number, step, False
        self._progress.awaited_step = step

    def exchange_arrivals(self) -> StragglerReport | None:
        """Report the arrival of this process; on process 0, return a report if the set of stragglers has changed."""
        if not self._has_reported and self._progress.step >= self._step:
            self._has_reported = True
            self._hosts.store.set(key_value.process_key(key_value.ARRIVALS, self._hosts.process_id), self._number)
        if self._arrivals_seconds is None:
            return None
        now, arrivals_seconds = time.monotonic(), self._arrivals_seconds
        for process, number in self._hosts.store.list_values(key_value.ARRIVALS).items():
            if number == self._number:  # Otherwise this is its report in an earlier round.
                arrivals_seconds.setdefault(process, now)
        first_seconds = min(arrivals_seconds.values(), default=now)
        num_processes = self._hosts.num_processes
        if len(arrivals_seconds) < num_processes and now - first_seconds < self._periods.round_seconds:
            return None
        self._arrivals_seconds = None
        after_seconds = [
            round(arrivals_seconds.get(process, now) - first_seconds, 3) for process in range(num_processes)
        ]
        step_seconds = statistics.median(self._progress.get_step_seconds() or [0.0])
        stragglers = find_stragglers(after_seconds, step_seconds, self._periods.straggling_seconds)
        repeated = [process for process in stragglers if process in self._last_stragglers]
        self._last_stragglers = set(stragglers)
        if repeated == self._reported_stragglers:
            return None
        self._reported_stragglers = repeated
        return StragglerReport(self._step, repeated, after_seconds)


def find_stragglers(
    after_seconds: Sequence[float], step_seconds: float, straggling_seconds: float = _STRAGGLING_SECONDS
) -> list[int]:
    """Return the processes whose arrival, after that of the first one, is significantly later than the median."""
    limit_seconds = statistics.median_low(after_seconds) + max(straggling_seconds, _STRAGGLING_STEPS * step_seconds)
    return [process for process, seconds in enumerate(after_seconds) if seconds > limit_seconds]


# The thread.


class Watchdog:
    """Watchdog of one process, and on process 0 of the job: a context that returns the `Progress` to report to."""

    def __init__(
        self,
        hosts: Hosts,
        deadlines: Deadlines,
        clock: Clock,
        on_diagnosis: Callable[[Diagnosis, bool], Ending | None],
        on_straggler: Callable[[StragglerReport], None],
        on_progress: Callable[[int], None],
        *,
        ends_process: bool = True,
    ):
        """Create the watchdog. The callbacks run on other threads, because the directory may hang, and may be left out.

        `on_diagnosis` receives the diagnosis on every process, before it ends, and whether this process is to record
        it; it may return another line and exit code to end with. On process 0, `on_straggler` receives a change
        in the set of stragglers, and `on_progress` the last completed step, from time to time, if it has changed. If it
        may not end the process, which then is alone, the watchdog prints the diagnosis and ends.
        """
        self.progress = Progress(clock)
        self._hosts, self._deadlines = hosts, deadlines
        self._on_diagnosis, self._on_straggler, self._on_progress = on_diagnosis, on_straggler, on_progress
        self._ends_process = ends_process
        self._reported_step, self._next_report_beat = 0, 1
        self._is_over = threading.Event()
        self._ending = threading.Lock()  # taken once: only one thread ends this process
        self._reporting = threading.Lock()  # over the two below
        self._reporter: threading.Thread | None = None  # thread of the newest callback that is not a diagnosis
        self._is_silent = False
        self._suspects_peer = False  # a collective has failed here
        self._has_waited = False  # whether this process has waited for the cause of an error
        self._last_warning = ""
        self._num_beats = 0
        self._last_beats: dict[int, tuple[int, float]] = {}  # process -> (number of its last beat, time it was seen)
        self._reached_seconds = self._polled_seconds = time.monotonic()
        self._data_seconds = -math.inf  # when a process was last seen waiting for its data
        self._periods = Periods.choose(hosts.num_processes)
        self._stragglers = StragglerDetector(hosts, self.progress)

    def __enter__(self) -> Progress:
        self._hosts.liveness.set_abort_callback(self._decide_alone)
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()
        if not self._hosts.is_main:
            threading.Thread(target=self.watch_coordinator, name="coordinator", daemon=True).start()
        return self.progress

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._wait_for_diagnosis(error)
        self._is_over.set()
        is_fenced = isinstance(error, FencedError) or (error and isinstance(error.__cause__, FencedError))
        if is_fenced and isinstance(error, RunnerError) and self._hosts.is_main and self._hosts.num_processes > 1:
            # Only process 0 may know it. The others would blame the loss of process 0, and advise a start that fences
            # the newer attempt.
            with contextlib.suppress(PeerLostError):
                self._hosts.store.set(key_value.DIAGNOSIS, [str(error), error.exit_code, True])
        self.progress.has_arrived.set()
        self._hosts.liveness.set_abort_callback(None)

    @contextlib.contextmanager
    def explain_errors(self) -> Iterator[None]:
        """Let an error leave the context only if no lost peer has caused it."""
        try:
            yield
        except BaseException as error:
            self._wait_for_diagnosis(error)
            raise

    def _wait_for_diagnosis(self, error: BaseException) -> None:
        """Wait once for the watchdog, which ends this process and names the peer if a lost one is the cause."""
        # JAX raises a failed collective as one of several types.
        is_suspect = isinstance(error, (jax.errors.JaxRuntimeError, PeerLostError)) or "Gloo" in str(error)
        is_explained = (isinstance(error, RunnerError) and not is_suspect) or classify_gpu_error(error) == FAULT
        if self._hosts.num_processes == 1 or is_explained or self._has_waited:
            return
        self._has_waited = True
        warn(f"{format_error(error)}; waiting for a report of a lost peer")
        self._suspects_peer = is_suspect
        time.sleep(_DIAGNOSIS_SECONDS if is_suspect else 3 * self._periods.poll_seconds)

    def stop_reports(self) -> None:
        """Call nothing but `on_diagnosis` from now on, so that the record of the end is the last one."""
        with self._reporting:
            self._is_silent, reporter = True, self._reporter
        if reporter is not None:
            reporter.join(_CALLBACK_SECONDS)

    def _run(self) -> None:
        next_seconds = time.monotonic()
        while not self._is_over.is_set():
            # `has_arrived` wakes this thread early, so that the arrival at a step is reported at once.
            left_seconds = max(next_seconds - time.monotonic(), 0.0)
            poll_seconds = self._periods.arrival_poll_seconds if self._stragglers.is_open else 60.0
            self.progress.has_arrived.wait(min(left_seconds, poll_seconds))
            self.progress.has_arrived.clear()
            is_due = time.monotonic() >= next_seconds
            if is_due:
                next_seconds = time.monotonic() + self._periods.poll_seconds
            try:
                if is_due and not self._is_over.is_set():
                    self._poll()
                if self._hosts.num_processes > 1:
                    report = self._stragglers.exchange_arrivals()
                    if report is not None:
                        self._report(self._on_straggler, report)
            except PeerLostError:
                unreached_seconds = time.monotonic() - self._reached_seconds
                if unreached_seconds > self._periods.unreachable_seconds and not self._is_over.is_set():
                    self._decide_alone()

    def watch_coordinator(self) -> None:
        """End this process if it has exchanged nothing with process 0 for `lost_seconds`. On the other processes."""
        self._reached_seconds = checked_seconds = time.monotonic()
        while not self._is_over.wait(_POLL_SECONDS):
            now, previous, checked_seconds = time.monotonic(), checked_seconds, time.monotonic()
            if now - previous > self._periods.unreachable_seconds:
                # This process itself was stopped, see `_poll`.
                self._reached_seconds = now
            if now - self._reached_seconds > self._periods.lost_seconds:
                self._decide_alone()

    def _poll(self) -> None:
        """Do the work of one period: check this process, exchange heartbeats and the diagnosis."""
        now, previous = time.monotonic(), self._polled_seconds
        self._polled_seconds = now
        if now - previous > self._periods.unreachable_seconds:
            # This process itself was stopped for a while (SIGSTOP, a suspended VM): neither its phase nor the
            # heartbeats of the others may be judged by the time that passed.
            self._last_beats.clear()
            self.progress.since_seconds = now
        beat = self._make_beat()
        is_report_due = self._num_beats >= self._next_report_beat and beat.step != self._reported_step
        if self._hosts.is_main and is_report_due:
            self._reported_step = beat.step
            self._next_report_beat = self._num_beats + min(self._num_beats, _MAX_REPORT_BEATS)
            self._report(self._on_progress, beat.step)
        if self._hosts.num_processes > 1:
            self._exchange_beats(beat)
            self._stragglers.update_round()
        elif beat.is_overdue:
            self._end(Diagnosis(format_diagnosis({0: beat}, {}), EXIT_RETRYABLE), is_recorder=True)

    def _report(self, callback: Callable[[Any], None], argument: Any) -> None:
        """Call a function that writes to the directory on a thread, unless the previous call is still running."""
        with self._reporting:
            if not self._is_silent and (self._reporter is None or not self._reporter.is_alive()):
                self._reporter = threading.Thread(target=callback, args=(argument,), name="incident", daemon=True)
                self._reporter.start()

    def _make_beat(self) -> Heartbeat:
        progress = self.progress
        self._num_beats += 1
        failure, seconds = progress.failure, time.monotonic() - progress.since_seconds
        return Heartbeat(
            number=self._num_beats,
            host=socket.gethostname(),
            phase=progress.phase.name,
            step=progress.step,
            seconds=round(seconds, 1),
            is_overdue=seconds > progress.deadline_seconds(self._deadlines),
            suspects_peer=self._suspects_peer,
            failure="" if failure is None else failure.line,
            is_end=failure is not None and failure.is_end,
            waits_for=progress.describe_wait(),
        )

    def _exchange_beats(self, beat: Heartbeat) -> None:
        """Publish the heartbeat and follow the diagnosis, which process 0 computes from all heartbeats."""
        hosts, store = self._hosts, self._hosts.store
        store.set(key_value.process_key(key_value.HEARTBEATS, hosts.process_id), asdict(beat))
        fields = store.try_get(key_value.DIAGNOSIS)
        # The attempt is fenced if process 0 ends because it may not write any more, so that no process may.
        *message, is_fenced = fields or [False]
        diagnosis = Diagnosis(*message) if message else None
        crashed = hosts.liveness.find_crashed()
        # All calls above have reached the coordinator.
        self._reached_seconds = time.monotonic()
        is_open = diagnosis is None or diagnosis.code is None
        if is_open and 0 in crashed:
            self._decide_alone()
        if is_open and hosts.is_main:
            values = store.list_values(key_value.HEARTBEATS)
            found = self._diagnose({process: Heartbeat(**value) for process, value in values.items()}, crashed)
            if found is not None and found != diagnosis:
                store.set(key_value.DIAGNOSIS, [*found, False])
                diagnosis = found
        # Process 0 ends by its own error if it is fenced.
        if diagnosis is None or (is_fenced and hosts.is_main):
            return
        if diagnosis.code is not None:
            self._end(diagnosis, hosts.process_id in diagnosis.recorders, is_fenced)
        elif diagnosis.line != self._last_warning:
            self._last_warning = diagnosis.line
            warn(diagnosis.line)

    def _diagnose(self, beats: dict[int, Heartbeat], crashed: list[int]) -> Diagnosis | None:
        """Return the diagnosis of the job, or None if it is healthy. Process 0 only."""
        now = time.monotonic()
        for process in range(self._hosts.num_processes):
            number = beats[process].number if process in beats else 0
            if process not in self._last_beats or self._last_beats[process][0] != number:
                self._last_beats[process] = (number, now)
        is_suspected = any(beat.suspects_peer for beat in beats.values())
        limit_seconds = self._periods.suspected_lost_seconds if is_suspected else self._periods.lost_seconds
        quiet_seconds = {process: now - seen_seconds for process, (_, seen_seconds) in self._last_beats.items()}
        departures = self._hosts.liveness.read_departures()
        unresponsive = find_unresponsive(quiet_seconds, limit_seconds, departures, crashed)
        # The wait for data may end just before the steps of the others become overdue, so it is remembered.
        if any(beat.phase == DATA.name for beat in beats.values()):
            self._data_seconds = now
        step_deadline_seconds = self.progress.step_deadline_seconds(self._deadlines)
        if unresponsive or has_overdue(beats.values(), now - self._data_seconds, step_deadline_seconds):
            found: Diagnosis | None = Diagnosis(
                format_diagnosis(beats, unresponsive),
                EXIT_RETRYABLE,
                lost=sorted(unresponsive),
                late=find_late(beats, unresponsive),
            )
        else:
            found = find_failure(beats)
        return None if found is None else found._replace(recorders=choose_recorders(beats, unresponsive))

    def _decide_alone(self) -> None:
        """End this process with its own diagnosis, because process 0 cannot be reached."""
        quiet_seconds = time.monotonic() - self._reached_seconds
        is_dead = 0 in self._hosts.liveness.find_disconnected()
        description = "has died" if is_dead else f"has not responded for {quiet_seconds:.0f} s"
        unresponsive = {} if self._hosts.is_main else {0: description}
        line = format_diagnosis({self._hosts.process_id: self._make_beat()}, unresponsive)
        diagnosis = Diagnosis(line, EXIT_RETRYABLE, lost=sorted(unresponsive))
        self._end(diagnosis, is_recorder=self._hosts.process_id <= _MAX_RECORDERS)

    def _end(self, diagnosis: Diagnosis, is_recorder: bool, is_fenced: bool = False) -> None:
        line, code = diagnosis.line, diagnosis.code
        assert code is not None, "it is no warning"
        if not self._ends_process:
            self._is_over.set()
            warn(line)
            return
        self._ending.acquire()
        if not is_fenced:  # else nothing may be recorded
            endings: list[Ending] = []

            def call_back() -> None:
                ending = self._on_diagnosis(diagnosis, is_recorder)
                endings.extend([] if ending is None else [ending])

            # On a thread of its own with a deadline, because the directory may hang.
            callback = threading.Thread(target=call_back, daemon=True)
            callback.start()
            callback.join(_CALLBACK_SECONDS)
            line, code = (*endings, (line, code))[0]
        if self._hosts.is_main and self._hosts.num_processes > 1:
            time.sleep(self._periods.delivery_seconds)  # The store ends with process 0, and the diagnosis with it.
        end_process(code, f"{line}; run the same command again" if code == EXIT_RETRYABLE else line)
