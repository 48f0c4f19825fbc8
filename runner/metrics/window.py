"""The steps since the last row, kept on the device until they are asked for: nothing here waits in a step.

What a row says of them is a function of the trajectory alone. A save may fall between two rows; what the steps up to it
add to the next row then rides on the save (`carry`), and a resumed attempt begins with it. Speeds are not carried.

How long single steps take, by when the device has finished each: on a thread of its own, so no step waits for it.

What bounds it: the steps of one window, `STEPS_MAX` of them at most.
"""

import collections
import math
import queue
import statistics
import threading
import time

import jax

from runner.errors import DivergedError
from runner.metrics.meta import GRAD_NORM, TOKEN_COUNT, Meta, RowValue, to_row_value
from runner.metrics.rows import Row
from runner.periodic import count_tokens
from runner.storage import JsonObject

STEPS_MAX = 10_000


class StepTimer:
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

    def pop_percentiles(self) -> Row:
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


_LOSS_SUM, _WEIGHT = "loss_sum", "weight"


class MetricsWindow:
    """The steps since the last row, which is that of `step`.

    `carry` is what an earlier attempt has made of the steps between that row and `step`. Not `is_whole`: there were
    such steps and nothing is known of them, so the next row has no mean.
    """

    def __init__(self, step: int = 0, carry: JsonObject | None = None, is_whole: bool = True):
        self._pending: list[tuple[int, jax.Array, Meta]] = []
        self._last: tuple[int, float, dict[str, RowValue]] | None = None
        self._loss_sum, self._weight = (float(carry[key]) if carry else 0.0 for key in (_LOSS_SUM, _WEIGHT))
        self._is_whole = is_whole
        self._since_step = step
        self._since_seconds = time.monotonic()

    def add(self, step: int, loss: jax.Array, meta: Meta) -> None:
        """Take what step `step` returned, without waiting for it.

        In the mean over the steps its loss counts for its `token_count`; for 1, where steps do not differ in that.
        """
        self._pending.append((step, loss, meta))

    def fetch(self) -> None:
        """Wait for the device. Raises `DivergedError` naming the first step that is not finite."""
        for step, loss, meta in jax.device_get(self._pending):
            figures = {key: to_row_value(value) for key, value in meta.items()}
            grad_norm = float(meta.get(GRAD_NORM, 0.0))
            if not (math.isfinite(loss) and math.isfinite(grad_norm)):
                raise DivergedError(
                    f"step {step}: training diverged: loss {float(loss)}, gradient norm {grad_norm}; "
                    "the last good checkpoint is kept"
                )
            counted = float(meta.get(TOKEN_COUNT, 1.0))
            self._loss_sum, self._weight = self._loss_sum + counted * float(loss), self._weight + counted
            self._last = (step, float(loss), figures)
        self._pending = []

    @property
    def carry(self) -> JsonObject | None:
        """What the steps since the last row add to the next one; None if there are none. After `fetch`."""
        if self._last is None and not self._weight:
            return None
        return {_LOSS_SUM: self._loss_sum, _WEIGHT: self._weight} if self._is_whole else None

    def close(self, tokens_per_step: int) -> Row:
        """The row of the newest step; the next window begins."""
        self.fetch()
        assert self._last is not None, "a row needs a step"
        step, loss, figures = self._last
        seconds = time.monotonic() - self._since_seconds
        tokens = count_tokens(step - self._since_step, tokens_per_step)
        mean = {"train/loss_mean": self._loss_sum / self._weight} if self._is_whole and self._weight else {}
        self._since_step, self._last = step, None
        self._loss_sum = self._weight = 0.0
        self._is_whole = True
        self.restart_clock()
        order = [name for name in (GRAD_NORM, "learning_rate") if name in figures]
        first = {f"train/{name}": figures.pop(name) for name in order}
        return {
            "step": step,
            "train/loss": loss,
            **mean,
            **first,
            "train/tokens": count_tokens(step, tokens_per_step),
            "perf/tokens_per_second": tokens / max(seconds, 1e-9),
            **{f"train/{name}": value for name, value in figures.items()},
        }

    def restart_clock(self) -> None:
        """Leave out of the speed what has passed so far."""
        self._since_seconds = time.monotonic()
