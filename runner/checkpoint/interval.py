"""When to save: by steps, by the clock, or by what a save costs. Pure: the clock is handed in."""

import math
import time
from collections.abc import Callable

from runner.checkpoint.save import SaveKind
from runner.periodic import is_due, is_overdue
from runner.spec import Checkpoint


def best_interval_seconds(
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
        rule: Checkpoint,
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
