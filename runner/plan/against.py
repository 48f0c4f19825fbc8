"""The forecast of a step beside what a run of it took, by the rows that the run has left. Only reads."""

import statistics

from runner.errors import InvalidError
from runner.history.row import read_sample
from runner.plan.figure import Section
from runner.plan.forecast import Forecast
from runner.storage import JsonObject, open_store


def rows_of(url: str) -> tuple[JsonObject, ...]:
    """Rows of a run that tell how long its steps took. Raises `InvalidError` if there are none."""
    try:
        rows = read_sample(open_store(url))
    except (OSError, ValueError) as error:
        raise InvalidError(f"--against {url}: its metrics cannot be read: {error}") from error
    timed = tuple(row for row in rows if _number(row, "perf/step_seconds_median"))
    if not timed:
        raise InvalidError(f"--against {url}: got no row of metrics.jsonl with perf/step_seconds_median, needs a run's")
    return timed


def against_section(found: Forecast, planned_bytes: int, rows: tuple[JsonObject, ...]) -> Section:
    """What was measured, and how far the forecast is from it. Which devices the run had is not looked at."""
    section = Section("against a run")
    seconds = statistics.median(_number(row, "perf/step_seconds_median") for row in rows)
    about = f"median of {len(rows)} rows, of the devices that the run had"
    section.add("step", seconds, "seconds", "measured", about)
    section.add("over the rooflines of its ops", seconds / found.low, "", "measured", "times; the forecast's lower end")
    if found.has_estimates:
        section.add("over the compiler's estimates", seconds / found.high, "", "measured", "times; the upper end")
    shares = [share for row in rows if (share := _number(row, "perf/mfu"))]
    if shares:
        section.add("MFU", statistics.median(shares), "share", "measured")
    peak = max((_number(row, "perf/peak_bytes") for row in rows), default=0.0)
    if peak:
        error = f"planned are {planned_bytes / peak - 1:+.1%} of it"
        section.add("peak memory of a device", peak, "bytes", "measured", error)
    return section


def _number(row: JsonObject, key: str) -> float:
    value = row.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0
