"""Which hosts come late to a step, though all of them live.

From time to time process 0 names a step that is about two seconds ahead. Every process says when its training thread
arrives there, and process 0 takes down when it hears of it, by its own clock: collectives make all devices wait for the
slowest, but not the arrival of its host. Who is later than the others in two rounds, one after the other, is named.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from runner.hosts.join import Hosts
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
    """The rounds in which every process tells of its arrival at one step."""

    def __init__(self, hosts: Hosts, progress: Progress):
        self._hosts, self._progress = hosts, progress
        self._number = 0
        self._step = 0
        self._next_seconds = time.monotonic() + _ROUND_SECONDS
        self._is_told = True
        self._arrivals_seconds: dict[int, float] | None = None  # process -> clock of process 0
        self._last_late: set[int] = set()
        self._reported: list[int] = []

    @property
    def is_open(self) -> bool:
        """Whether process 0 is listening for arrivals."""
        return self._arrivals_seconds is not None

    def hear(self) -> None:
        """Begin a round if it is time (process 0), or take the step of one that has begun."""
        if not self._hosts.is_main:
            number, step = self._hosts.peek("runner/round") or [0, 0]
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
        self._hosts.publish("runner/round", [self._number, self._step])

    def _await(self, number: int, step: int) -> None:
        self._number, self._step, self._is_told = number, step, False
        self._progress.awaited_step = step

    def advance(self) -> Straggling | None:
        """Tell of the arrival here; on process 0 take down the others', and say if others are late than before."""
        if not self._is_told and self._progress.step >= self._step:
            self._is_told = True
            self._hosts.publish(f"runner/arrived/{self._number}/{self._hosts.process_id}", 1)
        if self._arrivals_seconds is None:
            return None
        now, arrivals_seconds = time.monotonic(), self._arrivals_seconds
        for key in self._hosts.peek_all(f"runner/arrived/{self._number}"):
            arrivals_seconds.setdefault(int(key), now)
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
        if again == self._reported:
            return None
        self._reported = again
        return Straggling(self._step, again, after_seconds)


def late_processes(after_seconds: Sequence[float], step_seconds: float) -> list[int]:
    """Which arrivals (seconds after the first) are later than the median by what matters in such a step."""
    limit_seconds = statistics.median_low(after_seconds) + max(_LATE_SECONDS, _LATE_SHARE_OF_A_STEP * step_seconds)
    return [process for process, seconds in enumerate(after_seconds) if seconds > limit_seconds]
