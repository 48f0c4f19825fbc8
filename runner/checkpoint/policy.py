"""Which steps may go, and how they go. By step number: never by a time, never by the order of a listing.

When to save: by steps, by the clock, or by what a save costs. Pure: the clock is handed in.
"""

import math
import time
from collections.abc import Callable, Mapping
from typing import Literal

from runner.checkpoint.manifest import CHECKPOINTS, Manifest, read_committed, remove_files, uncommit
from runner.checkpoint.save import SaveKind
from runner.console import warn
from runner.periodic import is_due, is_overdue
from runner.run.attempt import Attempt
from runner.spec import CheckpointConfig


def compute_best_interval_seconds(
    stall_seconds: float, durable_seconds: float, mean_time_between_failures_hours: float
) -> float:
    """Seconds from save to save that lose the least time: sqrt(2 x stall x mean time between failures).

    Young, "A first order approximation to the optimum checkpoint interval" (1974); Daly (2006) refines it where the
    stall is not small against the interval. Never less than a save takes to be durable: the next could not begin.
    """
    least_loss_seconds = math.sqrt(2 * stall_seconds * mean_time_between_failures_hours * 3600)
    return max(least_loss_seconds, durable_seconds, 1.0)


class SavePolicy:
    """Which save is due at a step, by `checkpoint` of the spec. Asked on every host, with the same answer.

    `decide` makes host 0's answer everyone's: clocks differ between hosts, so host 0's alone counts.
    """

    def __init__(
        self,
        rule: CheckpointConfig,
        logging_every_steps: int,
        decide: Callable[[bool], bool],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._rule, self._logging_every_steps = rule, logging_every_steps
        self._decide, self._clock = decide, clock
        self._last_save_seconds = clock()

    def saved(self) -> None:
        """A durable save has begun, or a state was restored: the time to the next counts from now."""
        self._last_save_seconds = self._clock()

    def due(self, step: int, last_step: int, interval_seconds: float) -> SaveKind | None:
        """The save that is due at `step`. `interval_seconds` is that of `every: auto`, read only there."""
        rule = self._rule
        if is_due(step, rule.every_steps if rule.every is None else None, last_step):
            return SaveKind.REQUIRED if step == last_step else SaveKind.DURABLE
        every_minutes = rule.every_minutes if rule.every is None else interval_seconds / 60
        if (
            every_minutes is not None
            and is_due(step, self._logging_every_steps)
            and self._decide(is_overdue(self._clock(), self._last_save_seconds, every_minutes))
        ):
            return SaveKind.DURABLE
        return SaveKind.FAST if is_due(step, rule.local_every_steps) else None


Mode = Literal["min", "max"]


def find_superfluous_steps(
    metrics: Mapping[int, float | None],
    keep_last: int,
    keep_every_steps: int | None = None,
    best: Mode | None = None,
) -> list[int]:
    """The steps to delete, ascending, of those committed: `metrics` has for each the value that `best` compares.

    Kept are the newest `keep_last`, multiples of `keep_every_steps`, and the best; of equals the older.
    """
    steps = sorted(metrics)
    kept = set(steps[-keep_last:])
    if keep_every_steps is not None:
        kept |= {step for step in steps if step % keep_every_steps == 0}
    if best is not None:
        kept |= {step for step in [find_best_step(metrics, best)] if step is not None}
    return [step for step in steps if step not in kept]


def find_best_step(metrics: Mapping[int, float | None], mode: Mode) -> int | None:
    """The step with the best value, of equals the older; None if none has a value."""
    measured = {step: value for step, value in sorted(metrics.items()) if value is not None and value == value}
    choose = min if mode == "min" else max
    return choose(measured, key=lambda step: measured[step]) if measured else None


def delete_step(attempt: Attempt, step: int) -> None:
    """Delete one step: first the manifest, then the files. Main host only."""
    attempt.fence.check()
    directory = f"{CHECKPOINTS}/{step}"
    uncommit(attempt.store, directory, attempt.number)
    remove_files(attempt.store, directory)


class Retention:
    """The committed steps of a run, and the rule by which they stay. Main host only."""

    def __init__(self, attempt: Attempt, keep_last: int, keep_every_steps: int | None = None, best: Mode | None = None):
        self._attempt = attempt
        self._rule = (keep_last, keep_every_steps, best)
        self._metrics: dict[int, float | None] = {}

    def look(self) -> None:
        """Take in what is there when an attempt begins, and delete what one that was killed has left undeleted."""
        self._metrics = {step: manifest.metric for step, manifest in read_committed(self._attempt.store).items()}
        self._prune()

    def apply(self, manifest: Manifest) -> None:
        """Take in a step that has just been committed, and delete what it has made superfluous. In the background."""
        self._metrics[manifest.step] = manifest.metric
        self._prune()

    def _prune(self) -> None:
        """Delete what is superfluous. What cannot be deleted now is tried again after the next commit."""
        for step in find_superfluous_steps(self._metrics, *self._rule):
            try:
                delete_step(self._attempt, step)
            except OSError as error:
                warn(f"checkpoint {step} cannot be deleted, will be tried again: {error}")
                return
            del self._metrics[step]
