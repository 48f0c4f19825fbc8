"""Costs of a run, from the price in its spec and the time of its attempts; the spec of a directory is not trusted."""

import datetime
from typing import Any

import pytest

from runner.distributed.clock import TimeCategory
from runner.history.cost import Cost, compute_cost, format_cost
from runner.history.records import AttemptRecord, History, RunState, Throughput

PRICE: dict[str, Any] = {"dollars_per_chip_hour": 2.0, "as_of": "2026-11-30"}


def make_history(topology: Any, attempts: tuple[AttemptRecord, ...], left_seconds: float | None = None) -> History:
    seconds = {TimeCategory.STEPS: 1.0}
    return History(
        url="run", id=None, name=None, now=0.0, state=RunState.RUNNING, since=0.0, reason=None, step=1,
        total_steps=None, attempts=attempts, seconds=seconds, wall_seconds=1.0, goodput=1.0, lost_steps=0,
        speed=Throughput(left_seconds=left_seconds), spec={"topology": topology},
    )  # fmt: skip


def make_attempt(began: float, ended: float, num_devices: int | None, steps_seconds: float = 0.0) -> AttemptRecord:
    return AttemptRecord(
        number=1, state=RunState.KILLED, since=ended, code=None, reason=None, began=began, ended=ended,
        resumed_step=None, reached_step=None, lost_steps=0, seconds={TimeCategory.STEPS: steps_seconds},
        num_devices=num_devices,
    )  # fmt: skip


HOUR = make_attempt(0.0, 3600.0, 4, 1800.0)


@pytest.mark.parametrize(
    ("attempts", "left_seconds", "dollars", "steps_dollars", "left_dollars"),
    [
        ((HOUR,), None, 8.0, 4.0, None),
        ((HOUR,), 7200.0, 8.0, 4.0, 16.0),
        ((HOUR, make_attempt(9000.0, 10800.0, 8)), 3600.0, 16.0, 4.0, 16.0),  # on more hosts; the gap is free
        ((make_attempt(0.0, 3600.0, None), HOUR), None, 8.0, 4.0, None),  # one that had no devices yet
        ((make_attempt(3600.0, 0.0, 4),), None, 0.0, 0.0, None),  # clocks that disagree
    ],
)
def test_a_cost_is_chips_by_time_by_price(attempts, left_seconds, dollars, steps_dollars, left_dollars) -> None:
    history = make_history({"accelerator": "h100-8", "price": PRICE}, attempts, left_seconds)
    assert compute_cost(history) == Cost(dollars, steps_dollars, left_dollars, 2.0, "2026-11-30")


@pytest.mark.parametrize(("accelerator", "dollars"), [("v5e-4", 8.0), ("tpu7x-4", 4.0), ("any", 8.0), ("v99-4", 8.0)])
def test_chips_are_counted_and_not_devices(accelerator: str, dollars: float) -> None:
    cost = compute_cost(make_history({"accelerator": accelerator, "price": PRICE}, (HOUR,)))
    assert cost is not None
    assert cost.dollars == dollars


@pytest.mark.parametrize(
    "topology",
    [
        None,
        "v5e-16",
        [],
        {"accelerator": "v5e-4"},
        {"price": None},
        {"price": 3},
        {"price": {}},
        *(
            {"price": {"dollars_per_chip_hour": value}}
            for value in (0, -1.0, float("nan"), float("inf"), "2", True, [])
        ),
    ],
)
def test_a_directory_without_a_usable_price_has_no_cost(topology: Any) -> None:
    assert compute_cost(make_history(topology, (HOUR,))) is None


def test_a_run_whose_devices_are_not_known_has_no_cost() -> None:
    assert compute_cost(make_history({"price": PRICE}, (make_attempt(0.0, 9.0, None),))) is None


@pytest.mark.parametrize(
    ("as_of", "shown"),
    [
        ("2026-11-30", ", prices of 2026-11-30)"),
        (datetime.date(2026, 11, 30), ", prices of 2026-11-30)"),
        ([], "hour)"),
    ],
)
def test_the_line_has_all_parts(as_of: Any, shown: str) -> None:
    history = make_history({"price": PRICE | {"as_of": as_of}}, (HOUR,), 3600.0)
    cost = compute_cost(history)
    assert cost is not None
    line = format_cost(cost)
    assert line.startswith("cost $8.00, $4.00 of it for steps that count, expected $8.00 to the end ($2.00 per")
    assert line.endswith(shown)
