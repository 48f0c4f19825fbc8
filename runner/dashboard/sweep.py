"""JSON of the page of a sweep, which `page.js` draws; of bounded size for `RUNS_MAX` runs."""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from runner.attempts.layout import RESULT, RESULT_KEYS, DamagedRecordError, read_record
from runner.console import format_duration
from runner.dashboard.charts import LOSS, Point, SeriesReducer, find_chart
from runner.dashboard.reader import flatten_spec
from runner.dashboard.view import build_law, format_number, round_value, truncate
from runner.errors import InvalidError
from runner.history.ledger import get_float
from runner.history.records import History, RunState
from runner.history.sweep import (
    DIVERGED,
    RUNS_MAX,
    SEED,
    STOPPED,
    UNREADABLE,
    Sweep,
    SweepRow,
    SweepStatus,
    format_value,
    list_points,
    shorten_keys,
)
from runner.storage import ConfinedStore, DiskError, JsonObject, Store, make_store

_KEYS_MAX = 24  # in which the runs of a page differ
_CATEGORIES_MAX = 12  # of a key whose values are no numbers
_SETTINGS_MAX = 200
_RULE_KEYS_MAX = 40
_BINS_MIN, _BINS_MAX = 12, 100  # of a curve
_LOG_FACTOR, _LOG_MIDDLE_MAX = 10.0, 0.3  # least factor, and largest place of the median, of a logarithmic axis
_LOSS = "train/loss"
_GOOD, _LIVE = (RunState.DONE.value,), (RunState.RUNNING.value,)
_BROKEN = (DIVERGED, UNREADABLE, RunState.FAILED.value, RunState.INVALID.value)
_BAD = (*_BROKEN, RunState.STALLED.value)


def count_bins(num_runs: int, points_max: int) -> int:
    """Return the bins of each curve of a sweep with `num_runs` runs that keep its curves to about `points_max`."""
    return min(max(points_max // (2 * max(min(num_runs, RUNS_MAX), 1)), _BINS_MIN), _BINS_MAX)


def build_sweep_curves(metric: str, history: History, bins_max: int) -> JsonObject:
    """Return the curves of the training loss and of the metric, each as means over bins of a sample of the rows."""
    points = {"loss": [(row["step"], get_float(row, _LOSS)) for row in history.trend]}
    # A metric of a single row, such as a figure at the end, makes no curve.
    if metric != _LOSS and len(found := list_points(metric, history)) > 1:
        points["metric"] = found
    curves: JsonObject = {}
    for name, pairs in points.items():
        series = SeriesReducer()
        for step, value in pairs:
            if value is not None:
                series.add(Point(step, None, None, value))
        thinned = series.thin(bins_max)
        drawn = thinned.means or thinned.points
        curves[name] = {"step": [each.step for each in drawn], "value": [round_value(each.value) for each in drawn]}
    return curves


def read_law(root: Store, sweep: Sweep) -> JsonObject | None:
    """Return the chart of the law of a ladder with its last forecast, and the loss that came; None without one."""
    if not sweep.forecasts:
        return None
    name, forecast = [*sweep.forecasts.items()][-1]
    store = make_store(f"{root.url}/{name}") if root.root is None else ConfinedStore(root.root, name)
    try:
        result = read_record(store, RESULT, RESULT_KEYS, [])
    except (DamagedRecordError, InvalidError, DiskError):  # as long as there is no result
        result = None
    return build_law(forecast, None if result is None else result.get("val_loss"))


def build_sweep_view(
    title: str, status: SweepStatus, curves: Mapping[str, JsonObject], addresses: Mapping[str, str] | None = None
) -> JsonObject:
    """Return the data of the page; `curves` and `addresses`, the ids of pages, are those of runs by name."""
    sweep, addresses = status.sweep, addresses or {}
    keys = sweep.keys[:_KEYS_MAX]
    short = shorten_keys(keys)
    chart, label = find_chart(sweep.metric)
    metric = truncate(f"{label} {chart.title.lower()}").strip() or "metric"  # a sweep may have none
    ranks = {row.name: rank for rank, row in enumerate(row for row in status.rows if row.is_ranked)}
    best = next((row for row in status.rows if row.name == status.best), None)
    stops = [row.stopped_step for row in status.rows if row.stopped_step is not None]
    num_done, num_runs = status.counts.get(RunState.DONE.value, 0), len(status.rows)
    counts = [f"{count:,} {state}" for state, count in status.counts.items()]
    direction = "highest" if sweep.is_maximised else "lowest"

    def describe(values: Mapping[str, Any]) -> str:
        return ", ".join(f"{short[key]} {text}" for key in keys if (text := format_value(values, key)))

    tiles: list[JsonObject] = []
    chosen: tuple[float | None, str] = (None, "")
    if best is not None:
        chosen = best.metric, f"run {best.name}: {describe(best.values)}"
    elif (setting := status.best_setting) is not None:
        spread = format_number(setting.deviation, ".2g")
        chosen = setting.mean, f"mean of {setting.count} seeds, deviation {spread}: {describe(setting.values)}"
    if chosen[0] is not None:
        value = format_number(chosen[0], ".1%" if chart.form == "share" else ".4f")
        tiles.append({"label": f"Best {metric}", "value": value, "note": truncate(chosen[1]), "kind": "good"})
    share = num_done / max(num_runs, 1)
    value = f"{num_done:,} of {num_runs:,}"
    tiles.append({"label": "Runs done", "value": value, "note": ", ".join(counts), "share": share})
    if status.left_seconds:
        note = "with as many runs at a time as now"
        tiles.append({"label": "Time left", "value": format_duration(status.left_seconds), "note": note})
    notes = []
    if num_runs < len(sweep.runs):
        notes.append(f"Only the first {num_runs:,} of {len(sweep.runs):,} runs are shown.")
    if len(keys) < len(sweep.keys):
        notes.append(f"Only the first {len(keys)} of {len(sweep.keys)} keys are shown.")
    rule = itertools.islice(flatten_spec(sweep.rule).items(), _RULE_KEYS_MAX)
    return {
        "title": title,
        "notes": notes,
        "sweep": {
            "metric": metric,
            "order": f"by {metric} at the end, the {direction} first",
            "unit": "" if chart is LOSS else chart.unit,
            "form": chart.form,
            "maximised": sweep.is_maximised,
            "best": status.best,
            "tiles": tiles,
            "keys": [_build_key(key, short[key], status.rows) for key in keys],
            "runs": [
                _build_row(row, keys)
                | {"rank": ranks.get(row.name), "address": addresses.get(row.name)}
                | {"curves": curves.get(row.name, {})}
                for row in status.rows
            ],
            "settings": [
                {
                    "values": [format_value(setting.values, key) for key in keys],
                    "runs": len(setting.runs),
                    "count": setting.count,
                    "mean": None if setting.mean is None else round_value(setting.mean),
                    "deviation": None if setting.deviation is None else round_value(setting.deviation),
                    "best": setting is status.best_setting,
                }
                for setting in status.settings[:_SETTINGS_MAX]
            ],
            "seed": keys.index(SEED) if status.settings and SEED in keys else None,
            "rungs": [[step, stops.count(step)] for step in sorted(set(stops))],
            "rule": [[truncate(key), truncate(text)] for key, text in rule],
        },
    }


def _build_row(row: SweepRow, keys: Sequence[str]) -> JsonObject:
    is_stopped = row.state == STOPPED
    kind = "good" if row.state in _GOOD else "live" if row.state in _LIVE else "bad" if row.state in _BAD else ""
    return {
        "name": row.name,
        "state": f"stopped at {row.stopped_step:,}" if is_stopped else row.state,
        "reason": truncate(row.reason or ""),
        "kind": kind,
        "mark": "stopped" if is_stopped else "broken" if row.state in _BROKEN else "done" if kind == "good" else "on",
        "step": row.step,
        "total": row.total_steps,
        "metric": None if row.metric is None else round_value(row.metric),
        "seconds": None if row.seconds is None else round(row.seconds),
        "values": [format_value(row.values, key) for key in keys],
    }


def _build_key(key: str, short: str, rows: Sequence[SweepRow]) -> JsonObject:
    """Return a key as an axis: its numbers by run, or the categories of values that are no numbers."""
    values = [row.values.get(key) for row in rows if key in row.values]
    # A bool is an int in Python, but no number of a spec.
    numbers = [get_float(dict(row.values), key) for row in rows]
    known = sorted(number for number in set(numbers) if number is not None)
    if values and all(type(value) in (int, float) for value in values) and known:
        return {"key": truncate(key), "title": truncate(short), "log": _is_logarithmic(known), "numbers": numbers}
    texts = [format_value(row.values, key) for row in rows]
    found = sorted({text for text, row in zip(texts, rows, strict=True) if key in row.values}, key=_sort_key)
    shown = found[:_CATEGORIES_MAX]
    places = {text: min(index, _CATEGORIES_MAX - 1) for index, text in enumerate(found)}
    if len(found) > _CATEGORIES_MAX:
        shown[-1] = f"{len(found) - _CATEGORIES_MAX + 1} others"
    numbers = [float(places[text]) if key in row.values else None for text, row in zip(texts, rows, strict=True)]
    return {"key": truncate(key), "title": truncate(short), "categories": shown, "numbers": numbers}


def _is_logarithmic(known: Sequence[float]) -> bool:
    """Return True if sorted values are spread by factors: over a decade, or as 1, 2, 4."""
    if known[0] <= 0 or len(known) < 2:
        return False
    steps = [after / before for before, after in itertools.pairwise(known)]
    if len(known) > 2 and max(steps) < 1.05 * min(steps):
        return True
    # Uniform draws may begin close to zero, but half of them lie above the middle.
    middle = (known[(len(known) - 1) // 2] - known[0]) / (known[-1] - known[0])
    return known[-1] / known[0] >= _LOG_FACTOR and middle < _LOG_MIDDLE_MAX


def _sort_key(text: str) -> tuple[float, str]:
    """Return a key by which texts of numbers are sorted as numbers, before all others."""
    try:
        number = json.loads(text)
    except ValueError:
        number = None
    return float(number) if type(number) in (int, float) and math.isfinite(number) else math.inf, text
