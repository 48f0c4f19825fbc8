"""Metrics of the steps since the last row: the window on the device, and the durations of steps.

Results of steps stay on the device until a row needs them, so nothing here makes a step wait.

The row's metrics are a function of the trajectory alone. A save may come between two rows; the contribution of the
steps so far to the next row is then saved with it (`carry`), and a resumed attempt continues from that. Speeds are not
saved.

Memory holds the steps of one window, `_STEPS_MAX` durations at most.
"""

import collections
import math
import queue
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax

from runner.config import Unit
from runner.errors import DivergedError
from runner.metrics.meta import (
    GRAD_NORM,
    HIGH_LOSS_STEPS,
    LEARNING_RATE,
    ROLL_BACKS,
    SKIPPED_UPDATES,
    TOKEN_COUNT,
    Meta,
    RowValue,
    to_finite,
    to_row_value,
)
from runner.metrics.rows import Row
from runner.storage import JsonObject

_STEPS_MAX = 10_000


class StepTimer:
    """Durations of steps since the last row, from the end of one step on the device to the end of the next.

    A thread of its own waits for the device. The training thread makes the timer and calls its methods.
    """

    def __init__(self) -> None:
        # Items, in order: the result of a step, a time from which to measure, a request to catch up, or the end.
        self._ends: queue.SimpleQueue[jax.Array | float | threading.Event | None] = queue.SimpleQueue()
        self._seconds: collections.deque[float] = collections.deque(maxlen=_STEPS_MAX)
        self._thread = threading.Thread(target=self._watch, name="step timer", daemon=True)
        self._thread.start()

    def add(self, loss: jax.Array) -> None:
        """Add a step by its loss, which is never donated. Does not wait."""
        self._ends.put(loss)

    def restart(self) -> None:
        """Exclude the time since the last step from the duration of the next one."""
        self._ends.put(time.monotonic())

    def _watch(self) -> None:
        since = time.monotonic()
        while (end := self._ends.get()) is not None:
            # The queue is in order, so all steps before the request have ended now.
            if isinstance(end, threading.Event):
                end.set()
                continue
            if isinstance(end, float):
                since = end
                continue
            try:
                jax.block_until_ready(end)
            except jax.errors.JaxRuntimeError:  # the training thread gets the same error, and reports it
                continue
            now = time.monotonic()
            self._seconds.append(now - since)
            since = now

    def pop_percentiles(self) -> Row:
        """Return median and 95th percentile of the steps since the last call, and wait until all have ended."""
        caught_up = threading.Event()
        self._ends.put(caught_up)
        caught_up.wait()
        seconds = sorted(self._seconds)
        self._seconds.clear()
        if not seconds:
            return {}
        return {
            "perf/step_seconds_median": statistics.median(seconds),
            "perf/step_seconds_p95": seconds[math.ceil(0.95 * len(seconds)) - 1],
        }

    def close(self) -> None:
        """Let the thread end when the device has finished the steps that were added. Does not wait."""
        self._ends.put(None)


_LOSS_SUM, _WEIGHT, LAST_STEP = "loss_sum", "weight", "last"
NO_SUMS = {_LOSS_SUM: 0.0, _WEIGHT: 0.0}  # the carry of no steps


class _StepResult(NamedTuple):
    step: int
    loss: float | None  # None if the step had no target, or its loss was not finite and its update was skipped
    meta: dict[str, RowValue]


class StepWatcher(Protocol):
    """Feature that looks at the fetched results of each step."""

    def watch(self, step: int, loss: float, meta: Mapping[str, Any], values: dict[str, RowValue]) -> bool:
        """Return True if the update of the step was skipped; see `runner.train.feature.Feature.watch`."""


class MetricsWindow:
    """Steps since the last row.

    Args:
        step: step of that row.
        carry: contribution of the steps since that row that an earlier attempt has saved (`MetricsWindow.carry`).
        is_whole: False if the contribution of such steps is unknown; the next row then has no mean.
        watchers: features that look at each step.
        has_row: False if `step` has no row.
    """

    def __init__(
        self,
        step: int = 0,
        carry: JsonObject | None = None,
        is_whole: bool = True,
        watchers: Sequence[StepWatcher] = (),
        has_row: bool = True,
    ):
        self._watchers = watchers
        self._pending: list[tuple[int, jax.Array, Meta]] = []
        last = (carry or {}).get(LAST_STEP)
        self._last = None if last is None else _StepResult(step, last["loss"], dict(last["meta"]))
        self._has_row = has_row
        self._loss_sum, self._weight = (float(carry[key]) if carry else 0.0 for key in (_LOSS_SUM, _WEIGHT))
        self._is_whole = is_whole
        self._since_step = step
        self._since_seconds = time.monotonic()

    def add(self, step: int, loss: jax.Array, meta: Meta) -> None:
        """Add the result of a step, without waiting for it.

        The weight of its loss in the mean over steps is `token_count` of `meta`, or 1 without it: then all steps have
        the same number of tokens.
        """
        self._pending.append((step, loss, meta))

    def fetch(self) -> None:
        """Wait for the device and fetch the results of all steps.

        Raises `DivergedError`, on all hosts at the same place, if a loss or gradient norm is not finite and the update
        was not skipped, or if a watcher ends the run. The error names the first such step.
        """
        # One transfer for all steps of the window.
        for step, loss, meta in jax.device_get(self._pending):
            values = {key: to_row_value(value) for key, value in meta.items()}
            grad_norm = float(meta.get(GRAD_NORM, 0.0))
            is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
            is_skipped = False
            for watcher in self._watchers:
                is_skipped |= watcher.watch(step, float(loss), meta, values)
            if not is_finite and not is_skipped:
                found = f"loss {float(loss)}, gradient norm {grad_norm}"
                raise DivergedError(f"step {step}: training diverged: {found}")
            weight = float(meta.get(TOKEN_COUNT, 1.0))
            if weight <= 0:
                # A mean over nothing is null, and so is the norm of its gradient.
                values |= {key: None for key in values if key.split("/")[0] == GRAD_NORM}
            elif math.isfinite(loss):  # else the update was skipped, and the mean is that of the other steps
                self._loss_sum, self._weight = self._loss_sum + weight * float(loss), self._weight + weight
            self._last = _StepResult(step, to_finite(loss) if weight > 0 else None, values)
        self._pending = []

    @property
    def carry(self) -> JsonObject | None:
        """Contribution of the steps since the last row to the next one, and the result of the last step, after `fetch`.

        None if the newest step has a row, or if the part of an earlier attempt is not known.
        """
        if not self._is_whole or (self._last is None and not self._weight and self._has_row):
            return None
        sums = {_LOSS_SUM: self._loss_sum, _WEIGHT: self._weight}
        if self._last is None:
            return sums
        return sums | {LAST_STEP: {"loss": self._last.loss, "meta": dict(self._last.meta)}}

    @property
    def has_last(self) -> bool:
        """True if the result of the newest step is known and has no row, after `fetch`; `close` then makes its row."""
        return self._last is not None

    def close(self, count_units: Callable[[int], int], unit: Unit = "tokens") -> Row:
        """Return the row of the newest step, and begin the next window.

        `count_units` returns the tokens (or examples, by `unit`) that the run has consumed after a number of steps.
        """
        self.fetch()
        assert self._last is not None, "a row needs a step"
        step, loss, values = self._last
        seconds = time.monotonic() - self._since_seconds
        units = count_units(step) - count_units(self._since_step)
        loss_mean = self._loss_sum / self._weight if self._weight else None
        mean = {"train/loss_mean": loss_mean} if self._is_whole else {}
        self._since_step, self._last = step, None
        self._loss_sum = self._weight = 0.0
        self._is_whole = self._has_row = True
        self.restart_clock()
        # The runner's own values come before those of the job: the order of keys is the order of the columns of a CSV.
        order = (GRAD_NORM, LEARNING_RATE, SKIPPED_UPDATES, ROLL_BACKS, HIGH_LOSS_STEPS)
        first = {f"train/{name}": values.pop(name) for name in order if name in values}
        return {
            "step": step,
            "train/loss": loss,
            **mean,
            **first,
            f"train/{unit}": count_units(step),
            # An attempt that has made no step since the last row knows no speed.
            **({f"perf/{unit}_per_second": units / max(seconds, 1e-9)} if units else {}),
            **{f"train/{name}": value for name, value in values.items()},
        }

    def restart_clock(self) -> None:
        """Exclude the time since the last row from the speed."""
        self._since_seconds = time.monotonic()
