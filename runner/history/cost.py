"""Costs of a run in dollars, from the price in its spec and the time of its attempts.

An attempt is charged from its beginning to its last sign of life, for the chips that it had. Time in a queue is free.
"""

import datetime
from dataclasses import dataclass

from runner.accelerator import parse_accelerator
from runner.console import format_dollars
from runner.distributed.clock import TimeCategory
from runner.errors import InvalidError
from runner.history.ledger import get_float
from runner.history.records import AttemptRecord, History


@dataclass(frozen=True)
class Cost:
    """Costs of a run so far, and expected at its end."""

    dollars: float
    steps_dollars: float  # part of `dollars` for steps of the final trajectory
    left_dollars: float | None  # until the last step, at the present speed; None if that is not known
    dollars_per_chip_hour: float
    as_of: str | None  # day of the price list


def compute_cost(history: History) -> Cost | None:
    """Return the cost of a run; None without a price, or without an attempt whose devices are known.

    The spec is that of the directory, and is not trusted.
    """
    topology = history.spec.get("topology")
    price = topology.get("price") if isinstance(topology, dict) else None
    if not isinstance(topology, dict) or not isinstance(price, dict):
        return None
    per_hour, as_of = get_float(price, "dollars_per_chip_hour"), price.get("as_of")
    attempts = [attempt for attempt in history.attempts if attempt.num_devices is not None]
    if per_hour is None or per_hour <= 0 or not attempts:
        return None
    devices_per_chip = _find_devices_per_chip(topology.get("accelerator"))

    def charge(attempt: AttemptRecord, seconds: float) -> float:
        return (attempt.num_devices or 0) / devices_per_chip * per_hour * max(seconds, 0.0) / 3600

    left_seconds = history.speed.left_seconds
    return Cost(
        sum(charge(attempt, attempt.ended - attempt.began) for attempt in attempts),
        sum(charge(attempt, attempt.seconds.get(TimeCategory.STEPS, 0.0)) for attempt in attempts),
        None if left_seconds is None else charge(attempts[-1], left_seconds),
        per_hour,
        str(as_of) if isinstance(as_of, str | datetime.date) else None,  # YAML reads a day as a date
    )


def format_cost(cost: Cost) -> str:
    """Return the line of a cost."""
    dated = "" if cost.as_of is None else f", prices of {cost.as_of}"
    left = "" if cost.left_dollars is None else f", expected {format_dollars(cost.left_dollars)} to the end"
    return (
        f"cost {format_dollars(cost.dollars)}, {format_dollars(cost.steps_dollars)} of it for steps that count{left} "
        f"({format_dollars(cost.dollars_per_chip_hour, is_rate=True)} per chip and hour{dated})"
    )


def _find_devices_per_chip(accelerator: object) -> int:
    try:
        found = parse_accelerator(accelerator) if isinstance(accelerator, str) else None
    except InvalidError:
        return 1
    return 1 if found is None else found.chip.devices_per_chip
