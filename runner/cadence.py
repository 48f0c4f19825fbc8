"""Is it time? Pure questions about steps; a clock, where one is needed, is passed in.

`step` counts completed optimizer steps, here and everywhere.
"""

import math


def is_due(step: int, every_steps: int | None, last_step: int | None = None) -> bool:
    """Whether something that happens every `every_steps` steps happens at `step`; always at `last_step`, never at 0."""
    if step <= 0:
        return False
    if step == last_step:
        return True
    return every_steps is not None and step % every_steps == 0


def is_overdue(now_seconds: float, since_seconds: float, every_minutes: float | None) -> bool:
    """Whether `every_minutes` have passed since the last time."""
    return every_minutes is not None and now_seconds - since_seconds >= every_minutes * 60


def best_interval_seconds(
    stall_seconds: float, durable_seconds: float, mean_time_between_failures_hours: float
) -> float:
    """Seconds from save to save that lose the least time: sqrt(2 x stall x mean time between failures).

    Young, "A first order approximation to the optimum checkpoint interval" (1974); Daly (2006) refines it where the
    stall is not small against the interval. Never less than a save takes to be durable: the next could not begin.
    """
    least_loss_seconds = math.sqrt(2 * stall_seconds * mean_time_between_failures_hours * 3600)
    return max(least_loss_seconds, durable_seconds, 1.0)


def tokens_at(step: int, tokens_per_step: int) -> int:
    """Tokens that training has consumed after `step` steps."""
    return step * tokens_per_step
