"""When to save so that the least time is lost. Pure."""

import math


def best_interval_seconds(
    stall_seconds: float, durable_seconds: float, mean_time_between_failures_hours: float
) -> float:
    """Seconds from save to save that lose the least time: sqrt(2 x stall x mean time between failures).

    Young, "A first order approximation to the optimum checkpoint interval" (1974); Daly (2006) refines it where the
    stall is not small against the interval. Never less than a save takes to be durable: the next could not begin.
    """
    least_loss_seconds = math.sqrt(2 * stall_seconds * mean_time_between_failures_hours * 3600)
    return max(least_loss_seconds, durable_seconds, 1.0)
