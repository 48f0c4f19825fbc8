"""What every process reports each second, and the one line that says what is wrong by all reports.

Which hosts come late to a step, though all of them live.

1. From time to time process 0 begins a round: it publishes a step that is about two seconds ahead.
2. Every process reports when its training thread has completed that step, under the number of the round.
3. Process 0 notes when each report comes, by its own clock. Collectives make all devices wait for the slowest, but not
   the report of its host.
4. Who is later than the others in two rounds, one after the other, is named.
"""

import collections
import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from runner.distributed import key_value
from runner.distributed.agreement import Hosts
from runner.distributed.clock import DATA, STEP, Progress
from runner.errors import EXIT_FAILED

ALONE_SECONDS = 10.0  # from a failure that ends the job to the end of those who do not come to hear of it
_AT_ONCE_SECONDS = 2.0  # in which others come, if they come


@dataclass(frozen=True)
class Heartbeat:
    """One report of one process.

    Attributes:
        number: one more each second; a process whose number stays is frozen or cut off.
        host: its machine's name.
        phase, step: of its training thread; `step` is the last one completed.
        seconds: since that thread entered the phase, or completed the step.
        is_overdue: whether that is longer than the phase, or a step, may take.
        suspects_peer: whether a collective has failed there.
        failure: what has failed there alone, while it waits for the others; empty if nothing has.
        is_end: whether the job ends by that.
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


class HealthVerdict(NamedTuple):
    """What every process is told: a line, and the code to end with; without one it is a word on the way."""

    line: str
    code: int | None


def find_failure(beats: Mapping[int, Heartbeat]) -> HealthVerdict | None:
    """What has failed on some hosts alone, so that they wait for the others, who do not come; None if nothing has.

    It is told at once: the others may be in a program over all devices, which they never leave. Where the job ends by
    it, it does after ALONE_SECONDS. Else the deadline of their phase ends it: they may be at something long.
    """
    failed = {process: beat for process, beat in beats.items() if beat.failure and beat.seconds >= _AT_ONCE_SECONDS}
    others = [process for process, beat in beats.items() if not beat.failure]
    if not failed or not others:
        return None
    first, waited = failed[min(failed)], _name(others, None)
    if first.is_end and first.seconds >= ALONE_SECONDS:
        return HealthVerdict(
            f"{first.failure}; {waited} did not come out of it within {first.seconds:.0f} s", EXIT_FAILED
        )
    return HealthVerdict(f"{first.failure}; it waits for {waited} to come out of it", None)


def has_overdue(beats: Collection[Heartbeat], seconds_since_data: float, step_deadline_seconds: float) -> bool:
    """Whether one of them is overdue for no reason that is known.

    A step lasts on every host while one of them waits for its data, and for a step's time after that:
    `seconds_since_data` is how long ago one was last seen at it.
    """
    is_fed = seconds_since_data > step_deadline_seconds
    return any(beat.is_overdue and (is_fed or beat.phase != STEP.name) for beat in beats)


def has_data_wait(beats: Collection[Heartbeat]) -> bool:
    """Whether one of them does."""
    return any(beat.phase == DATA.name for beat in beats)


def find_unresponsive(
    quiet_seconds: Mapping[int, float], limit_seconds: float, left: Mapping[int, int], crashed: Collection[int]
) -> dict[int, str]:
    """Who is not there, and how. `quiet_seconds` is how long each process has published nothing new.

    `left` holds the codes of those that have ended in order. The others are given the same time to follow.
    """
    silent = {process: seconds for process, seconds in quiet_seconds.items() if seconds > limit_seconds}
    found = {process: f"does not answer for {seconds:.0f} s" for process, seconds in silent.items()}
    found |= {process: f"has ended with {code}, and said why" for process, code in left.items() if process in silent}
    return found | dict.fromkeys(crashed, "has died")


def format_diagnosis(beats: dict[int, Heartbeat], silent: dict[int, str]) -> str:
    """One line: who is silent and how, who is overdue in which phase, and in which phases the others are."""
    parts = []
    for process, how in sorted(silent.items()):
        beat = beats.get(process)
        last = "" if beat is None else f", last seen {_where(beat)}"
        parts.append(f"{_name([process], beat)} {how}{last}")
    groups: dict[tuple[bool, str], list[int]] = collections.defaultdict(list)
    for process, beat in sorted(beats.items()):
        if process not in silent:
            groups[not beat.is_overdue, _where(beat)].append(process)
    for (is_in_time, where), processes in sorted(groups.items()):
        beat = beats[processes[0]]
        name, verb = (_name(processes, beat), "is") if len(processes) == 1 else (_name(processes, None), "are")
        late = "" if is_in_time else ", past the deadline"
        parts.append(f"{name} {verb} {where} for {beat.seconds:.0f} s{late}")
    parts += [beat.failure for _, beat in sorted(beats.items()) if beat.failure]
    return "the job does not go on: " + "; ".join(parts)


def _name(processes: list[int], beat: Heartbeat | None) -> str:
    host = f" ({beat.host})" if beat is not None else ""
    return f"process{'es' * (len(processes) > 1)} {', '.join(map(str, processes))}{host}"


def _where(beat: Heartbeat) -> str:
    """The phase, and the step: the one in hand, which is the one after the last completed."""
    return f"in step {beat.step + 1}" if beat.phase == STEP.name else f"in {beat.phase} at step {beat.step}"


_ROUND_SECONDS = 10.0
_AHEAD_SECONDS = 2.5
_LATE_SECONDS = 0.1
_LATE_SHARE_OF_A_STEP = 0.1


@dataclass(frozen=True)
class StragglerReport:
    """Another set of processes than before comes late, twice in a row; none if those that did are in time again.

    `after_seconds` is every process's arrival at `step` after the first.
    """

    step: int
    late: list[int]
    after_seconds: list[float]


class StragglerDetector:
    """The rounds in which every process reports its arrival at one step. Used by the watchdog's thread, on every host.

    Never waits for a host. Each call may raise `PeerLostError`.
    """

    def __init__(self, hosts: Hosts, progress: Progress):
        self._hosts, self._progress = hosts, progress
        self._number = 0
        self._step = 0
        self._next_seconds = time.monotonic() + _ROUND_SECONDS
        self._has_reported = True
        self._arrivals_seconds: dict[int, float] | None = None  # process -> clock of process 0
        self._last_late: set[int] = set()
        self._named: list[int] = []

    @property
    def is_open(self) -> bool:
        """Whether process 0 is listening for arrivals."""
        return self._arrivals_seconds is not None

    def begin_or_join(self) -> None:
        """Begin a round if it is time (process 0), or take the step of one that has begun."""
        if not self._hosts.is_main:
            number, step = self._hosts.store.try_get(key_value.ROUND) or [0, 0]
            if number > self._number:
                self._await(number, step)
            return
        gaps_seconds = self._progress.get_step_seconds()
        if self.is_open or time.monotonic() < self._next_seconds or not gaps_seconds:
            return
        self._next_seconds = time.monotonic() + _ROUND_SECONDS
        num_ahead = 1 + int(_AHEAD_SECONDS / max(statistics.median(gaps_seconds), 1e-4))
        self._arrivals_seconds = {}
        self._await(self._number + 1, self._progress.step + num_ahead)
        self._hosts.store.set(key_value.ROUND, [self._number, self._step])

    def _await(self, number: int, step: int) -> None:
        self._number, self._step, self._has_reported = number, step, False
        self._progress.awaited_step = step

    def advance(self) -> StragglerReport | None:
        """Report the arrival here; on process 0 note the others', and return who is late if others are than before."""
        if not self._has_reported and self._progress.step >= self._step:
            self._has_reported = True
            self._hosts.store.set(key_value.process_key(key_value.ARRIVALS, self._hosts.process_id), self._number)
        if self._arrivals_seconds is None:
            return None
        now, arrivals_seconds = time.monotonic(), self._arrivals_seconds
        for process, number in self._hosts.store.list_values(key_value.ARRIVALS).items():
            if number == self._number:  # else what it reported in an earlier round
                arrivals_seconds.setdefault(process, now)
        first_seconds = min(arrivals_seconds.values(), default=now)
        num_processes = self._hosts.num_processes
        if len(arrivals_seconds) < num_processes and now - first_seconds < _ROUND_SECONDS:
            return None
        self._arrivals_seconds = None
        after_seconds = [
            round(arrivals_seconds.get(process, now) - first_seconds, 3) for process in range(num_processes)
        ]
        late = find_stragglers(after_seconds, statistics.median(self._progress.get_step_seconds() or [0.0]))
        again, self._last_late = [process for process in late if process in self._last_late], set(late)
        if again == self._named:
            return None
        self._named = again
        return StragglerReport(self._step, again, after_seconds)


def find_stragglers(after_seconds: Sequence[float], step_seconds: float) -> list[int]:
    """Which arrivals (seconds after the first) are later than the median by what matters in such a step."""
    limit_seconds = statistics.median_low(after_seconds) + max(_LATE_SECONDS, _LATE_SHARE_OF_A_STEP * step_seconds)
    return [process for process, seconds in enumerate(after_seconds) if seconds > limit_seconds]
