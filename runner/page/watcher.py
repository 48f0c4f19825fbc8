"""One reader for all clients: a run is read at most once a second, however many look, and not at all if none does.

1. A request names what it wants, and gets what was last read of it, at once. It waits, up to a deadline, only where
   nothing was read yet, or where that was long ago and no other waits.
2. One loop reads what was wanted since its last round. It rests after each round, so that it takes no more than a fixed
   share of one core from whatever trains on this machine.
3. What cannot be read is data too: the reader says so on the page. A bug in the reader ends the loop.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from runner.page.app import Body

REST_SECONDS_MIN = 1.0
REST_TIMES = 4  # a round of so many seconds is followed by so many times that of rest
FRESH_SECONDS = 10.0
KEEP_SECONDS = 600.0
WAIT_SECONDS = 30.0


@dataclass(frozen=True)
class Kept:
    """What was read of one thing, and when by the monotonic clock."""

    body: Body | None
    when: float


class Watcher:
    """See above. `read` gives the data of a run by its id, of all runs by ""; None if there is no such run."""

    def __init__(self, read: Callable[[str], Body | None], wait_seconds: float = WAIT_SECONDS):
        self._read = read
        self._wait_seconds = wait_seconds
        self._changed = threading.Condition()
        self._wanted: set[str] = set()
        self._kept: dict[str, Kept] = {}  # bounded by what was asked for in the last KEEP_SECONDS

    def data(self, name: str) -> Body | None:
        """What was last read of `name`; None if there is no such thing. Any thread.

        Raises `TimeoutError` if nothing was read of it within `wait_seconds`.
        """
        with self._changed:
            is_first = name not in self._wanted  # one waits for what is old, the others take it
            self._wanted.add(name)
            self._changed.notify_all()
            if is_first or name not in self._kept:
                self._changed.wait_for(lambda: self._is_fresh(name), self._wait_seconds)
            if name not in self._kept:
                raise TimeoutError(f"nothing was read within {self._wait_seconds} s")
            return self._kept[name].body

    def _is_fresh(self, name: str) -> bool:
        kept = self._kept.get(name)
        return kept is not None and time.monotonic() - kept.when < FRESH_SECONDS

    def serve(self) -> None:
        """Read what is wanted, for ever."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted)
            began = time.monotonic()
            self.round()
            time.sleep(max(REST_SECONDS_MIN, REST_TIMES * (time.monotonic() - began)))

    def round(self) -> None:
        """Read once what is wanted by now."""
        with self._changed:
            wanted, self._wanted = self._wanted, set()
            oldest = time.monotonic() - KEEP_SECONDS
            self._kept = {name: kept for name, kept in self._kept.items() if kept.when > oldest}
        for name in sorted(wanted):
            body = self._read(name)
            with self._changed:
                self._kept[name] = Kept(body, time.monotonic())
                self._changed.notify_all()
