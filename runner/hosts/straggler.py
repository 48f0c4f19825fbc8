"""Which hosts come late to a step, though all of them live.

1. From time to time process 0 begins a round: it publishes a step that is about two seconds ahead.
2. Every process reports when its training thread has completed that step, under the number of the round.
3. Process 0 notes when each report comes, by its own clock. Collectives make all devices wait for the slowest, but not
   the report of its host.
4. Who is later than the others in two rounds, one after the other, is named.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from runner.hosts import key_value
from runner.hosts.agreement import Hosts
from runner.hosts.progress import Progress

_ROUND_SECONDS = 10.0
_AHEAD_SECONDS = 2.5
_LATE_SECONDS = 0.1
_LATE_SHARE_OF_A_STEP = 0.1


@dataclass(frozen=True)
class Straggling:
    """Another set of processes than before comes late, twice in a row; none if those that did are in time again.

    `after_seconds` is every process's arrival at `step` after the first.
    """

    step: int
    late: list[int]
    after_seconds: list[float]


class Rounds:
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
            number, step = self._hosts.store.peek(key_value.ROUND) or [0, 0]
            if number > self._number:
                self._await(number, step)
            return
        gaps_seconds = self._progress.gaps()
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

    def advance(self) -> Straggling | None:
        """Report the arrival here; on process 0 note the others', and return who is late if others are than before."""
        if not self._has_reported and self._progress.step >= self._step:
            self._has_reported = True
            self._hosts.store.set(key_value.of_process(key_value.ARRIVALS, self._hosts.process_id), self._number)
        if self._arrivals_seconds is None:
            return None
        now, arrivals_seconds = time.monotonic(), self._arrivals_seconds
        for process, number in self._hosts.store.peek_all(key_value.ARRIVALS).items():
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
        late = late_processes(after_seconds, statistics.median(self._progress.gaps() or [0.0]))
        again, self._last_late = [process for process in late if process in self._last_late], set(late)
        if again == self._named:
            return None
        self._named = again
        return Straggling(self._step, again, after_seconds)


def late_processes(after_seconds: Sequence[float], step_seconds: float) -> list[int]:
    """Which arrivals (seconds after the first) are later than the median by what matters in such a step."""
    limit_seconds = statistics.median_low(after_seconds) + max(_LATE_SECONDS, _LATE_SHARE_OF_A_STEP * step_seconds)
    return [process for process, seconds in enumerate(after_seconds) if seconds > limit_seconds]
