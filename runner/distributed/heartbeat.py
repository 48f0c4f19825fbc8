"""Heartbeats of every process, the diagnosis of a stalled job, and the detection of stragglers.

A straggler is a process that is alive but completes its steps late:

1. From time to time process 0 begins a round: it publishes a step that is about two seconds ahead.
2. Every process reports when its training thread has completed that step, under the number of the round.
3. Process 0 records when each report arrives, by its own clock. A collective makes all devices wait for the slowest,
   but it does not delay the report of a fast host.
4. A process that is later than the others in two consecutive rounds is reported.
"""

import collections
import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from runner.distributed import key_value
from runner.distributed.agreement import Hosts
from runner.distributed.clock import STEP, Progress
from runner.errors import EXIT_FAILED

# Time from a failure that ends the job to the end of the processes that do not notice it by themselves.
LOCAL_FAILURE_SECONDS = 10.0
# The other processes normally reach the same point within this time; after it the failure counts as local.
_COMMON_FAILURE_SECONDS = 2.0


@dataclass(frozen=True)
class Heartbeat:
    """Report of one process, sent every second.

    Attributes:
        number: grows by one each second. A process whose number stays the same is frozen or disconnected.
        host: name of its machine.
        phase: phase of its training thread.
        step: last completed step of its training thread.
        seconds: time since that thread entered the phase, or completed the step.
        is_overdue: True if that is longer than the deadline of the phase or step.
        suspects_peer: True if a collective has failed there.
        failure: message of a failure there alone, while it waits for the others; empty if there is none.
        is_end: True if that failure ends the job.
        waits_for: call of a user's code that has not returned yet; empty if there is none.
    """

    number: int
    host: str
    phase: str
    step: int
    seconds: float
    is_overdue: bool
    suspects_peer: bool
    failure: str = ""
    is_end: bool = False
    waits_for: str = ""


class Diagnosis(NamedTuple):
    """Message from process 0 to every process: a line, and the exit code to end with, or None for a warning."""

    line: str
    code: int | None


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

    Args:
        beats: the heartbeats of all processes.
        seconds_since_data: time since a process was last seen waiting for data.
        step_deadline_seconds: longest permitted duration of a step.
    """
    is_data_ready = seconds_since_data > step_deadline_seconds
    return any(beat.is_overdue and (is_data_ready or beat.phase != STEP.name) for beat in beats)


def find_unresponsive(
    quiet_seconds: Mapping[int, float], limit_seconds: float, departures: Mapping[int, int], crashed: Collection[int]
) -> dict[int, str]:
    """Return the processes that are gone or frozen, each with a description.

    Args:
        quiet_seconds: by process, the time since its last new heartbeat.
        limit_seconds: a process that is quiet for longer is unresponsive.
        departures: exit codes of the processes that exited cleanly. The others get the same time to follow them.
        crashed: processes that disconnected without leaving.
    """
    silent = {process: seconds for process, seconds in quiet_seconds.items() if seconds > limit_seconds}
    found = {process: f"has not responded for {seconds:.0f} s" for process, seconds in silent.items()}
    found |= {
        process: f"has exited with code {code}, see its own output"
        for process, code in departures.items()
        if process in silent
    }
    return found | dict.fromkeys(crashed, "has died")


def format_diagnosis(beats: dict[int, Heartbeat], unresponsive: dict[int, str]) -> str:
    """Return one line on a stalled job: unresponsive processes, then overdue ones, then the phases of the others."""
    parts = []
    for process, description in sorted(unresponsive.items()):
        beat = beats.get(process)
        last_seen = "" if beat is None else f", last seen {_format_phase(beat)}"
        parts.append(f"{_format_processes([process], beat)} {description}{last_seen}")
    groups: dict[tuple[bool, str], list[int]] = collections.defaultdict(list)
    for process, beat in sorted(beats.items()):
        if process not in unresponsive:
            groups[not beat.is_overdue, _format_phase(beat)].append(process)
    for (is_in_time, phase), processes in sorted(groups.items()):
        beat = beats[processes[0]]
        is_single = len(processes) == 1
        name, verb = _format_processes(processes, beat if is_single else None), "is" if is_single else "are"
        parts.append(f"{name} {verb} {phase} for {beat.seconds:.0f} s{'' if is_in_time else ', past the deadline'}")
    waits = [(process, beat.waits_for) for process, beat in sorted(beats.items()) if beat.waits_for]
    parts += [f"on process {process} {text}" if len(beats) > 1 else text for process, text in waits]
    parts += [beat.failure for _, beat in sorted(beats.items()) if beat.failure]
    return "the job cannot continue: " + "; ".join(parts)


def _format_processes(processes: list[int], beat: Heartbeat | None = None) -> str:
    host = f" ({beat.host})" if beat is not None else ""
    return f"process{'es' * (len(processes) > 1)} {', '.join(map(str, processes))}{host}"


def _format_phase(beat: Heartbeat) -> str:
    """Return the phase and the step; inside the loop, the step in progress is the one after the last completed."""
    return f"in step {beat.step + 1}" if beat.phase == STEP.name else f"in {beat.phase} at step {beat.step}"


_ROUND_SECONDS = 10.0
_LEAD_SECONDS = 2.5
# A process straggles if it is later than the median by more than both of these.
_STRAGGLING_SECONDS = 0.1
_STRAGGLING_STEPS = 0.1


@dataclass(frozen=True)
class StragglerReport:
    """Change in the set of straggling processes.

    Attributes:
        step: the step at which arrivals were measured.
        processes: the processes that straggled in two consecutive rounds; empty if all are on time again.
        after_seconds: arrival of every process at `step`, after the first one.
    """

    step: int
    processes: list[int]
    after_seconds: list[float]


class StragglerDetector:
    """Rounds in which every process reports its arrival at one step. Used by the watchdog's thread, on every process.

    No method waits for another process. Each may raise `PeerLostError`.
    """

    def __init__(self, hosts: Hosts, progress: Progress):
        self._hosts, self._progress = hosts, progress
        self._number = 0
        self._step = 0
        self._next_round_seconds = time.monotonic() + _ROUND_SECONDS
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
        self._next_round_seconds = time.monotonic() + _ROUND_SECONDS
        # Every process must read the step before it reaches it, and reads once a second.
        num_steps_ahead = 1 + int(_LEAD_SECONDS / max(statistics.median(step_seconds), 1e-4))
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
        if len(arrivals_seconds) < num_processes and now - first_seconds < _ROUND_SECONDS:
            return None
        self._arrivals_seconds = None
        after_seconds = [
            round(arrivals_seconds.get(process, now) - first_seconds, 3) for process in range(num_processes)
        ]
        stragglers = find_stragglers(after_seconds, statistics.median(self._progress.get_step_seconds() or [0.0]))
        repeated = [process for process in stragglers if process in self._last_stragglers]
        self._last_stragglers = set(stragglers)
        if repeated == self._reported_stragglers:
            return None
        self._reported_stragglers = repeated
        return StragglerReport(self._step, repeated, after_seconds)


def find_stragglers(after_seconds: Sequence[float], step_seconds: float) -> list[int]:
    """Return the processes whose arrival is significantly later than the median.

    Args:
        after_seconds: arrival of every process, after the first one.
        step_seconds: usual duration of a step.
    """
    limit_seconds = statistics.median_low(after_seconds) + max(_STRAGGLING_SECONDS, _STRAGGLING_STEPS * step_seconds)
    return [process for process, seconds in enumerate(after_seconds) if seconds > limit_seconds]
