"""How long single steps take, by when the device has finished each: on a thread of its own, so no step waits for it.

What bounds it: the steps of one window, `STEPS_MAX` of them at most.
"""

import collections
import math
import queue
import statistics
import threading
import time

import jax

from runner.train.metrics.row import Row

STEPS_MAX = 10_000


class Pace:
    """The seconds between the ends of steps since the last row. Made and called by the training thread."""

    def __init__(self) -> None:
        self._ends: queue.SimpleQueue[jax.Array | float | threading.Event | None] = queue.SimpleQueue()
        self._seconds: collections.deque[float] = collections.deque(maxlen=STEPS_MAX)
        self._thread = threading.Thread(target=self._watch, name="pace", daemon=True)
        self._thread.start()

    def add(self, loss: jax.Array) -> None:
        """Take a step by what it returns, which is never donated. Waits for nothing."""
        self._ends.put(loss)

    def restart(self) -> None:
        """What has passed so far is no part of the next step."""
        self._ends.put(time.monotonic())

    def _watch(self) -> None:
        since = time.monotonic()
        while (end := self._ends.get()) is not None:
            if isinstance(end, threading.Event):
                end.set()
                continue
            if isinstance(end, float):
                since = end
                continue
            try:
                jax.block_until_ready(end)
            except jax.errors.JaxRuntimeError:  # the training thread meets it, too, and says so
                continue
            now = time.monotonic()
            self._seconds.append(now - since)
            since = now

    def figures(self) -> Row:
        """Median and 95th percentile of the steps added so far, all of which have ended; the next window begins."""
        seen = threading.Event()
        self._ends.put(seen)
        seen.wait()
        seconds = sorted(self._seconds)
        self._seconds.clear()
        if not seconds:
            return {}
        return {
            "perf/step_seconds_median": statistics.median(seconds),
            "perf/step_seconds_p95": seconds[math.ceil(0.95 * len(seconds)) - 1],
        }

    def close(self) -> None:
        """End the thread, once the device has finished what was added."""
        self._ends.put(None)
